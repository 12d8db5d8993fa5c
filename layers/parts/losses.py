"""Losses as modules, for use in any model. Each calls one function of `liger_models.kernels`, whose file has
the formula. A module takes the function's options by name: `LigerKLDivLoss(temperature=2.0)`.

All have `ignore_index` (-100: tokens with this label are ignored) and `reduction` ("mean" over the counted
tokens, "sum" over them, or "none": one loss per token). Losses are float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from liger_models.kernels import (
    CrossEntropyOutput,
    cross_entropy,
    generalized_jsd,
    kl_div,
    linear_cosine_distillation,
    linear_cross_entropy,
    linear_jsd,
    linear_kl,
    total_variation,
)


class _Loss(nn.Module):
    """A function and its options.

    Raises:
        TypeError: an unknown option.
    """

    function: Callable[..., Any]

    def __init__(self, **options: Any):
        super().__init__()
        inspect.signature(self.function).bind_partial(**options)
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LigerCrossEntropyLoss(_Loss):
    """Cross entropy of logits, in three passes over them.

    Options of `kernels.cross_entropy`: ignore_index, reduction, label_smoothing, z_loss, softcap and
    so on.
    """

    function = staticmethod(cross_entropy)

    def forward(self, input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """input [N, C] (or [N, C, d...]), target [N] (or [N, d...]) -> float32 scalar, or [N] for "none"; a
        CrossEntropyOutput if options request more than the loss.
        """
        return self.function(input, target, **self.options)


class LigerFusedLinearCrossEntropyLoss(_Loss):
    """Cross entropy of `input @ weight.T + bias`, without materialising all logits. Ignored labels cost
    nothing.

    Options of `kernels.linear_cross_entropy`: ignore_index, reduction, label_smoothing, z_loss,
    softcap and so on.
    """

    function = staticmethod(linear_cross_entropy)

    def forward(
        self, weight: Tensor, input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """weight [V, H], input [T, H], target [T], bias [V] -> float32 scalar, or [T] for "none"; a
        CrossEntropyOutput if options request more than the loss.
        """
        return self.function(input, weight, target, bias, **self.options)


class _Divergence(_Loss):
    def forward(self, student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None = None) -> Tensor:
        """student_logits and teacher_logits [..., V], labels [...] -> float32 scalar, or [...] for "none".

        Both are logits; log-probabilities are valid logits, but probabilities are not: pass their logarithm.
        The teacher has no gradient. Labels only select the counted tokens.
        """
        return self.function(student_logits, teacher_logits, labels=labels, **self.options)


class LigerKLDivLoss(_Divergence):
    """KL(teacher || student) of two next-token distributions: the forward KL.

    Equals torch's `kl_div(student_log_probs, teacher_log_probs, reduction="batchmean", log_target=True)`: the
    mean is over tokens, of sums over the vocabulary.

    Options of `kernels.kl_div`: ignore_index, reduction, temperature and so on.
    """

    function = staticmethod(kl_div)


class LigerJSDLoss(_Divergence):
    """Generalized Jensen-Shannon divergence of two next-token distributions (Agarwal et al., 2023, GKD).

    Options of `kernels.generalized_jsd`: ignore_index, reduction, temperature, beta (0.5; 0 is
    KL(teacher || student), 1 is KL(student || teacher)) and so on.
    """

    function = staticmethod(generalized_jsd)


class LigerTVDLoss(_Divergence):
    """Total variation distance of two next-token distributions: half the sum of |p - q|, from 0 to 1.

    Options of `kernels.total_variation`: ignore_index, reduction, temperature and so on.
    """

    function = staticmethod(total_variation)


class _FusedLinearDistillation(_Loss):
    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        labels: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        """student_input [..., H], student_weight [V, H], student_bias [V]; teacher_input [..., H'],
        teacher_weight [V, H'], teacher_bias [V]; labels [...] -> float32 scalar, or [...] for "none".

        The teacher has no gradient. Labels only select the counted tokens; the others cost nothing.
        """
        student, teacher = (student_input, student_weight), (teacher_input, teacher_weight)
        return self.function(*student, *teacher, labels, student_bias, teacher_bias, **self.options)


class LigerFusedLinearKLDivLoss(_FusedLinearDistillation):
    """KL(teacher || student) of two linear layers' outputs, without materialising all logits.

    Options of `kernels.linear_kl`: ignore_index, reduction, temperature and so on.
    """

    function = staticmethod(linear_kl)


class LigerFusedLinearJSDLoss(_FusedLinearDistillation):
    """Generalized Jensen-Shannon divergence of two linear layers' outputs, without materialising all logits.

    Options of `kernels.linear_jsd`: ignore_index, reduction, temperature, beta (0.5; 0 is
    KL(teacher || student), 1 is KL(student || teacher)) and so on.
    """

    function = staticmethod(linear_jsd)


class LigerFusedLinearCosineSimilarityLoss(_FusedLinearDistillation):
    """One minus the cosine between a student's and a teacher's logits, outputs of two linear layers, without
    materialising all of them.

    Options of `kernels.linear_cosine_distillation`: ignore_index, reduction and so on.
    """

    function = staticmethod(linear_cosine_distillation)
