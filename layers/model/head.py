"""The output head: logits, or the loss or the scores of labels without logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import is_zero3
from liger_models.kernels import (
    TokenScores,
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    log_probs,
)
from liger_models.layers.model.scoring import ScoreOptions
from liger_models.layers.parts.embedding import TrainedRows
from liger_models.layers.projections.linear import Linear, as_wide_as
from liger_models.layers.recompute.activation_memory import recompute
from liger_models.layers.sequences.documents import IGNORE_INDEX
from liger_models.layers.specs import ModelSpec


@dataclass(frozen=True)
class LogitForm:
    """Transform of a head's product z: `scale * z`, or `softcap * tanh(scale * z / softcap)`, of the first
    `ids` rows of the head, which are the ids that it predicts; None: of all.

    Kept outside the head, since an adapter around the head adds to the product.
    """

    scale: float = 1.0
    softcap: float | None = None
    ids: int | None = None

    @staticmethod
    def of(spec: ModelSpec) -> LogitForm:
        """The form of a model's logits."""
        return LogitForm(spec.logit_scale, spec.logit_softcap, spec.predicted_ids)

    def predicted(self, z: Tensor, dim: int = -1) -> Tensor:
        """The part of z that belongs to predicted ids; of rows of a weight with `dim` 0."""
        return z if self.ids is None else z.narrow(dim, 0, self.ids)

    def __call__(self, z: Tensor) -> Tensor:
        """z [..., V] -> logits [..., V], or [..., ids]."""
        z = self.predicted(z)
        z = z if self.scale == 1.0 else z * self.scale
        return z if self.softcap is None else self.softcap * (z / self.softcap).tanh()


class LMHead(Linear):
    """Projection onto the vocabulary that also computes the loss and the scores of labels.

    They are computed here, so that the weight is read only inside its own module's forward (sharding
    frameworks gather it just for that time).

    With `float32`, products are in float32 or wider, except under autocast, and the weight may have a wider
    dtype than other matrices.
    """

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool = False, float32: bool = False):
        super().__init__(hidden_size, vocab_size, bias=bias)
        self.float32 = float32
        self.wider_matrices = ("weight",) if float32 else ()
        self.trained_rows: TrainedRows | None = None  # while the others are frozen

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        num_valid: int | None = None,
        num_items: Tensor | int | None = None,
        form: LogitForm = LogitForm(),
        score: ScoreOptions | None = None,
        within: Callable[[Tensor, Tensor, Tensor | None], Any] | None = None,
    ) -> Any:
        """Without `labels`: hidden [..., H] -> the product [..., V].

        With labels [T] (the tokens to predict; -100 does not count): hidden [T, H] -> float32 scalar, the
        summed cross entropy of the logits, in their form, divided by `num_items`, or by the count of labels
        if None. `num_valid` is that count, if known on the host.

        With `score` too, whose coefficients are [T]: the result of `kernels.linear_log_probs` as a plain
        tuple, which all frameworks can traverse.

        With `within`: the result of within(hidden, weight, bias), called while the weight is gathered.

        Raises:
            TypeError: hidden and the weight differ in dtype, without autocast.
        """
        weight = self.weight if self.trained_rows is None else self.trained_rows.within(self.weight)
        wide = self.float32 and not torch.is_autocast_enabled(hidden.device.type)
        if wide:
            dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        _check_dtypes(hidden, weight)
        if within is not None:
            return within(hidden, weight, as_wide_as(weight, self.bias))
        if labels is None and self.trained_rows is None and not wide:
            return super().forward(hidden)
        if labels is None:
            return nn.functional.linear(hidden, weight, as_wide_as(weight, self.bias))
        weight = form.predicted(weight, 0)
        bias = as_wide_as(weight, self.bias)
        operands = hidden, weight, labels, None if bias is None else form.predicted(bias)
        options: Any = {"num_valid": num_valid, "logit_scale": form.scale, "softcap": form.softcap}
        if score is None:
            return linear_cross_entropy(*operands, num_items=num_items, **options)
        options |= {"coefficients": score.coefficients, **score.keywords()}
        return tuple(linear_log_probs(*operands, **options))


def _check_dtypes(hidden: Tensor, weight: Tensor) -> None:
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(
            f"the hidden states are {hidden.dtype} and the head's weight {weight.dtype}; cast one, or use "
            "autocast. Under FSDP2 layers pass on the dtype that they compute in: leave output_dtype out "
            "of their MixedPrecisionPolicy, or give it to the policy of the whole model alone."
        )


def loss_of_head(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    num_valid: int | None = None,
    num_items: Tensor | int | None = None,
    form: LogitForm = LogitForm(),
) -> Tensor:
    """The loss of `LMHead.forward` with labels, for a head that may have been wrapped or replaced.

    Adapters and quantised heads compute only the product. It is computed in chunks of tokens and recomputed
    in the backward pass, so that not all logits exist at once.
    """
    if type(head).forward is LMHead.forward:
        return head(hidden, labels, num_valid=num_valid, num_items=num_items, form=form)
    kept = (labels != IGNORE_INDEX).nonzero()[:, 0]
    hidden, labels = hidden[kept], labels[kept]

    def summed(product: Product, hidden: Tensor) -> Tensor:
        def of_piece(hidden: Tensor, labels: Tensor) -> Tensor:
            z, cap = form.predicted(product(hidden)), form.softcap
            loss = cross_entropy(z, labels, reduction="sum", logit_scale=form.scale, softcap=cap)
            assert isinstance(loss, Tensor)  # nothing else was requested
            return loss

        pieces = in_pieces(_CHUNK, hidden, labels, together=has_gathered_parts(head))
        return torch.stack([recompute(of_piece, *piece) for piece in pieces]).sum()

    return in_one_call(head, hidden, summed) / (len(labels) if num_items is None else num_items)


def scores_of_head(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    num_valid: int | None = None,
    form: LogitForm = LogitForm(),
    *,
    score: ScoreOptions,
) -> TokenScores:
    """The scores [T] of `LMHead.forward`, for a head that may have been wrapped or replaced: see
    `loss_of_head`.
    """
    if type(head).forward is LMHead.forward:
        return TokenScores(*head(hidden, labels, num_valid=num_valid, form=form, score=score))
    kept = (labels != IGNORE_INDEX).nonzero()[:, 0]
    options: Any = {"logit_scale": form.scale, "softcap": form.softcap, **score.keywords()}
    temperatures = [options.pop("temperature")[kept]] if isinstance(score.temperature, Tensor) else []

    def scores(product: Product, hidden: Tensor) -> tuple[tuple[Tensor | None, ...], ...]:
        def of_piece(hidden: Tensor, labels: Tensor, *temperature: Tensor) -> tuple[Tensor | None, ...]:
            own: Any = {"temperature": temperature[0]} if temperature else {}
            return tuple(log_probs(form.predicted(product(hidden)), labels, **options, **own))

        # At least one piece, possibly empty: it determines the outputs and connects the result to the graph.
        columns = hidden, labels[kept], *temperatures
        pieces = in_pieces(_CHUNK, *columns, together=has_gathered_parts(head))
        return tuple(recompute(of_piece, *piece) for piece in pieces)

    columns = zip(*in_one_call(head, hidden[kept], scores), strict=True)

    def placed(column: tuple[Tensor | None, ...]) -> Tensor | None:
        parts = [part for part in column if part is not None]
        if not parts:
            return None
        values = torch.cat(parts)
        return values.new_zeros(len(labels)).index_put((kept,), values)

    found = TokenScores(*map(placed, columns))  # type: ignore[arg-type]
    if score.coefficients is None:
        return found
    weighted_sum = (score.coefficients * found.log_probs).sum()
    constant = [None if column is None else column.detach() for column in found]
    return TokenScores(*constant)._replace(weighted_sum=weighted_sum)  # type: ignore[arg-type]


Product = Callable[[Tensor], Tensor]


def in_one_call(head: nn.Module, hidden: Tensor, function: Callable[[Product, Tensor], Any]) -> Any:
    """Return function(product, hidden), run within one call of the head, whose own forward is `product`.

    Sharding frameworks gather parameters at a call and exchange gradients after it. With one call per head,
    processes with different numbers of pieces do not deadlock.
    """
    others, product = vars(head).get("forward"), head.forward
    head.forward = lambda hidden: function(product, hidden)  # type: ignore[method-assign]
    try:
        return head(hidden)
    finally:
        del head.forward
        if others is not None:
            head.forward = others  # type: ignore[method-assign]


def has_gathered_parts(head: nn.Module) -> bool:
    """Whether ZeRO-3 gathers parts of the head anew each time they run, even within a call of the head."""
    return any(is_zero3(p) for part in head.children() for p in part.parameters())


def in_pieces(size: int, *columns: Tensor, together: bool) -> list[tuple[Tensor, ...]]:
    """Split columns of equal length into pieces of `size` tokens, at least one. With `together`, all
    processes get the same number of pieces; the last may be empty.
    """
    count = max(1, -(-len(columns[0]) // size))
    if together and dist.is_initialized():
        most = torch.tensor(count, device=columns[0].device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        count = int(most)
    return [tuple(column[i * size : (i + 1) * size] for column in columns) for i in range(count)]


_CHUNK = 4096  # enough tokens for a matrix product to run at full speed
