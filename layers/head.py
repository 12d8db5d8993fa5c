"""The output head: logits, or the loss without them."""

from __future__ import annotations

from torch import Tensor, nn

from liger_models.kernels import linear_cross_entropy


class LMHead(nn.Linear):
    """A projection onto the vocabulary that also knows the loss.

    The loss is computed in here, so that the weight is read inside its own module's forward alone (sharding
    frameworks gather it for just that time).
    """

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        num_valid: int | None = None,
        num_items: Tensor | int | None = None,
    ) -> Tensor:
        """Without `labels`: hidden [..., H] -> logits [..., V].

        With labels [T] (of the tokens to predict; -100 does not count): hidden [T, H] -> float32 scalar, the
        summed cross entropy over `num_items`, or over the count of labels if that is None. `num_valid` is the
        count of labels, if it is known on the host.
        """
        if labels is None:
            return super().forward(hidden)
        loss = linear_cross_entropy(
            hidden, self.weight, labels, self.bias, num_valid=num_valid, num_items=num_items
        )
        assert isinstance(loss, Tensor)  # nothing else was asked for
        return loss
