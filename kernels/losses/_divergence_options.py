"""What a row's divergence depends on, and how kernels over rows of a student and a teacher are given it."""

from __future__ import annotations

from typing import NamedTuple

from liger_models.kernels.losses._logit_tiles import fold_temperature


class DivergenceOptions(NamedTuple):
    """What a row's divergence depends on beside its two rows of logits and its label."""

    kind: str  # "forward_kl", "reverse_kl", "jsd", "total_variation", or linear_divergence's "cosine"
    ignore_index: int
    beta: float = 0.0
    temperature: float = 1.0
    softcap: float | None = None  # of the student's logits
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0

    @property
    def student_scaling(self) -> tuple[float, float | None]:
        """The scale and the cap that give the student's capped logits over the temperature."""
        return fold_temperature(self.logit_scale, self.softcap, self.temperature)

    @property
    def teacher_scaling(self) -> tuple[float, float | None]:
        """The same of the teacher."""
        return fold_temperature(self.teacher_logit_scale, self.teacher_softcap, self.temperature)


def row_arguments(student, teacher, labels, options):
    """The arguments that a kernel over rows of two begins with, and the flags that it is compiled for."""
    scale, cap = options.student_scaling
    teacher_scale, teacher_cap = options.teacher_scaling
    arguments = (
        student,
        teacher,
        labels,
        student.stride(0),
        teacher.stride(0),
        0 if labels is None else labels.stride(0),
        student.shape[1],
        options.ignore_index,
        scale,
        1.0 if cap is None else cap,
        teacher_scale,
        1.0 if teacher_cap is None else teacher_cap,
    )
    return arguments, {"HAS_SOFTCAP": cap is not None, "HAS_TEACHER_SOFTCAP": teacher_cap is not None}
