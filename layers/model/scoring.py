"""Per-token scores of a model, the inputs of post-training losses (formulas in kernels/losses/log_probs.py).

    scores = model.score(input_ids, labels, entropy=True)  # log_probs, entropy [batch, seq - 1]; no logits
    scores = ddp(input_ids=input_ids, labels=labels, score=ScoreOptions(entropy=True))  # of a wrapped model

The head computes them in its own forward, so that its weight may be sharded, adapted or quantised.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.convert.errors import DataError
from liger_models.kernels import TokenScores
from liger_models.kernels.losses._logit_tiles import check_temperatures
from liger_models.layers.model.output import ScoreOutput
from liger_models.layers.sequences.sequences import Sequences


class ScoreOptions:
    """Which scores a call of the model returns instead of a loss: its keyword `score`.

    Args:
        temperature: divides the logits: a number, or a tensor of one per row [batch] or in the shape of the
            scores, without a gradient. Of documents packed in one row, repeat each one's for its tokens.
        entropy: also return the entropy of each token's distribution.
        top1: also return whether the label has the largest logit (the first one in a tie).
        log_sum_sq_probs: also return the logarithm of the sum of squared probabilities.
        coefficients: in the shape of the scores. Gradients then flow through `weighted_sum`, the sum of
            coefficients * log_probs, and are computed in the forward pass, which saves up to a quarter of
            the head's work where tokens fill several chunks. For losses whose gradients are known before the
            scores: a negative log-likelihood, or a policy gradient on fresh samples, whose ratios are one.

    Raises:
        TypeError: a tensor of temperatures that requires a gradient.
        ValueError: a temperature that is not positive (in a tensor on a GPU it makes the scores nan).

    Not a dataclass: sharding frameworks that cast a call's arguments would round the coefficients in one.
    """

    def __init__(
        self,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        top1: bool = False,
        log_sum_sq_probs: bool = False,
        coefficients: Tensor | None = None,
    ):
        check_temperatures(temperature)
        self.temperature, self.coefficients = temperature, coefficients
        self.entropy, self.top1, self.log_sum_sq_probs = entropy, top1, log_sum_sq_probs

    def keywords(self) -> dict[str, Any]:
        """All settings except the coefficients, as `kernels.log_probs` takes them."""
        return {
            "temperature": self.temperature,
            "entropy": self.entropy,
            "top1": self.top1,
            "log_sum_sq_probs": self.log_sum_sq_probs,
        }

    def packed(self, sequences: Sequences, shifted: bool) -> ScoreOptions:
        """The same with packed coefficients and temperatures [T].

        Raises:
            DataError: tensors that do not have the shape of the scores.
        """
        packed = ScoreOptions(**self.keywords())
        batch, seq = sequences.documents.shape
        shape = (batch, seq if shifted else seq - 1)

        def pack(values: Tensor, fill: float) -> Tensor:
            return sequences.pack(F.pad(values.to(sequences.device), (0, seq - shape[1]), value=fill))

        if self.coefficients is not None:
            if tuple(self.coefficients.shape) != shape:
                raise DataError(
                    f"coefficients must have the shape of the scores, {shape}; found "
                    f"{tuple(self.coefficients.shape)}"
                )
            packed.coefficients = pack(self.coefficients, 0.0)
        if isinstance(self.temperature, Tensor):
            found = tuple(self.temperature.shape)
            if found not in ((), (batch,), shape):
                raise DataError(
                    f"temperature must be a number, one per row, ({batch},), or in the shape of the scores, "
                    f"{shape}; found {found}"
                )
            rows = self.temperature.unsqueeze(1) if found == (batch,) else self.temperature
            rows = rows if rows.is_floating_point() else rows.float()
            packed.temperature = pack(rows.expand(shape), 1.0)
        return packed


class KnowsItsWrapper(nn.Module):
    """A module that records whether it was wrapped in DistributedDataParallel or combined with learned
    prompts.
    """

    _wrapped = False
    _prompted = False
    _left_out: Any = ()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Read by DistributedDataParallel when it wraps a model, which is how the model detects it."""
        self._wrapped = True
        return self._left_out

    @_ddp_params_and_buffers_to_ignore.setter
    def _ddp_params_and_buffers_to_ignore(self, names: Any) -> None:
        self._left_out = names


def refuse_inside_wrapper(model: KnowsItsWrapper, keyword: str) -> None:
    """Refuse a call that bypasses the model's wrapper.

    Raises:
        RuntimeError: learned prompts would be left out, or gradients would not be averaged.
    """
    if model._prompted:
        raise RuntimeError(
            "learned prompts were put in front of this model, which only the PeftModel knows: call it, with "
            f"{keyword} as well as input_ids and labels, within its disable_adapter() to do without them"
        )
    if model._wrapped and torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            "this model is inside DistributedDataParallel, which averages the gradients of its own forward "
            f"alone: call the wrapper, with {keyword} as well as input_ids and labels, or disable gradients"
        )


class Scoring(KnowsItsWrapper):
    """A model with `score`."""

    def score(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        shift_labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        top1: bool = False,
        log_sum_sq_probs: bool = False,
        coefficients: Tensor | None = None,
        **inputs: Any,
    ) -> ScoreOutput:
        """Compute each label's log-probability and the other requested scores, without logits.

        Args:
            input_ids: [batch, seq] integers.
            labels: [batch, seq], aligned with the input: position t of the result scores labels[:, t + 1];
                -100, padding, and the first token of a document do not count.
            shift_labels: [batch, seq], already shifted, instead of labels: position t of the result scores
                shift_labels[:, t].
            temperature, entropy, top1, log_sum_sq_probs, coefficients: as in `ScoreOptions`.
            inputs: other arguments of `forward`: attention_mask, position_ids, cu_seqlens and so on.

        Returns:
            `log_probs`, in nats, and `entropy`, `is_top1` (bool), `log_sum_sq_probs`, `weighted_sum` (a
            scalar) as requested: float32 [batch, seq - 1], or [batch, seq] with shift_labels, zero where
                there is
            no label. log_probs and entropy have gradients. `router_loss`, a scalar, if routers add to the
            model's loss.

        Raises:
            RuntimeError: the model is inside DistributedDataParallel, which would not average the gradients,
                or a PeftModel with learned prompts: call the wrapper with score=ScoreOptions(...).
            TypeError: a tensor of temperatures that requires a gradient.
            ValueError: a temperature that is not positive.
            DataError: no labels, or a tensor of another shape; else as `forward`.
        """
        refuse_inside_wrapper(self, "score=ScoreOptions(...)")
        options = ScoreOptions(temperature, entropy, top1, log_sum_sq_probs, coefficients)
        return self(input_ids=input_ids, labels=labels, shift_labels=shift_labels, score=options, **inputs)


def score_output(
    scores: TokenScores, sequences: Sequences, shifted: bool, router_loss: Tensor | None = None
) -> ScoreOutput:
    """Convert scores [T] to rows as the caller expects them: without the last column, which predicts nothing,
    unless the labels came shifted.
    """

    def seen(score: Tensor | None) -> Tensor | None:
        if score is None:
            return None
        if not score.dim():
            return sequences.summed(score)
        rows = sequences.unpack(score)
        return rows if shifted else rows[:, :-1]

    found = {name: seen(score) for name, score in scores._asdict().items()}
    return ScoreOutput(**found, router_loss=router_loss)


def check_score_call(
    labels: Tensor | None, shift_labels: Tensor | None, cu_seqlens: Any, batch: int, *others: Any
) -> None:
    """Check the other arguments of a call with `score`; `others` must be None.

    Raises:
        DataError: nothing to score, scores in the omitted last column, or options for the loss or logits.
    """
    if any(other is not None for other in others):
        raise DataError("score cannot be combined with num_items_in_batch or return_logits: omit them")
    if labels is None and shift_labels is None:
        raise DataError("scores need labels: pass labels or shift_labels")
    if cu_seqlens is not None and batch > 1 and labels is not None:
        raise DataError(
            f"documents of cu_seqlens may go on from one of the {batch} rows to the next, whose first "
            "token is then scored at the end of the row before: pass shift_labels, or all documents in "
            "one row"
        )
