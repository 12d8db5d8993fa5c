"""The output head: logits, or the loss without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from liger_models.kernels import cross_entropy, linear_cross_entropy
from liger_models.layers.activation_memory import recompute
from liger_models.layers.linear import Linear, as_wide_as
from liger_models.layers.sequences import IGNORE_INDEX


@dataclass(frozen=True)
class LogitForm:
    """What becomes of a head's product z: `scale * z`, or `softcap * tanh(scale * z / softcap)`.

    It stands beside the head and not in it: an adapter around the head adds to the product.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """z [..., V] -> logits [..., V]."""
        z = z if self.scale == 1.0 else z * self.scale
        return z if self.softcap is None else self.softcap * (z / self.softcap).tanh()


class LMHead(Linear):
    """A projection onto the vocabulary that also knows the loss.

    The loss is computed in here, so that the weight is read inside its own module's forward alone (sharding
    frameworks gather it for just that time).
    """

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool = False):
        super().__init__(hidden_size, vocab_size, bias=bias)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        num_valid: int | None = None,
        num_items: Tensor | int | None = None,
        form: LogitForm = LogitForm(),
    ) -> Tensor:
        """Without `labels`: hidden [..., H] -> the product [..., V].

        With labels [T] (of the tokens to predict; -100 does not count): hidden [T, H] -> float32 scalar, the
        summed cross entropy of the logits, in their form, over `num_items`, or over the count of labels if
        that is None. `num_valid` is the count of labels, if it is known on the host.

        Raises:
            TypeError: hidden and the weight differ in dtype, without autocast.
        """
        _check_dtypes(hidden, self.weight)
        if labels is None:
            return super().forward(hidden)
        loss = linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            as_wide_as(self.weight, self.bias),
            num_valid=num_valid,
            num_items=num_items,
            logit_scale=form.scale,
            softcap=form.softcap,
        )
        assert isinstance(loss, Tensor)  # nothing else was asked for
        return loss


def _check_dtypes(hidden: Tensor, weight: Tensor) -> None:
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(
            f"the hidden states are {hidden.dtype} and the head's weight {weight.dtype}; cast one, or "
            "use autocast. Under FSDP2 layers hand on what they compute in: leave output_dtype out of their "
            "MixedPrecisionPolicy, or give it to the policy of the whole model alone."
        )


def loss_of_head(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    num_valid: int | None = None,
    num_items: Tensor | int | None = None,
    form: LogitForm = LogitForm(),
) -> Tensor:
    """The loss, as `LMHead.forward` gives it with labels, of a head that may have been wrapped or replaced.

    An adapter around the head, or a quantised one, knows its product alone. It is made in chunks of tokens,
    which run again in the backward pass so that not all exist at once.
    """
    if type(head).forward is LMHead.forward:
        return head(hidden, labels, num_valid=num_valid, num_items=num_items, form=form)
    kept = (labels != IGNORE_INDEX).nonzero()[:, 0]
    hidden, labels = hidden[kept], labels[kept]

    def summed_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        product, cap = head(hidden), form.softcap
        loss = cross_entropy(product, labels, reduction="sum", logit_scale=form.scale, softcap=cap)
        assert isinstance(loss, Tensor)  # nothing else was asked for
        return loss

    pieces = zip(hidden.split(_CHUNK), labels.split(_CHUNK), strict=True)
    total = torch.stack([recompute(summed_loss, *piece) for piece in pieces]).sum()
    return total / (len(labels) if num_items is None else num_items)


_CHUNK = 4096  # tokens, as many as make a matrix product run at full speed
