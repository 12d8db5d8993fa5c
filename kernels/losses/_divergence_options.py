"""Parameters of a row's divergence, and their form as kernel arguments."""

from __future__ import annotations

from typing import NamedTuple

from liger_models.kernels.losses._logit_tiles import fold_temperature


class DivergenceOptions(NamedTuple):
    """Parameters of a row's divergence apart from its logits and its label."""

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
        """Scale and cap that give the student's capped logits divided by the temperature."""
        return fold_temperature(self.logit_scale, self.softcap, self.temperature)

    @property
    def teacher_scaling(self) -> tuple[float, float | None]:
        """The same for the teacher."""
        return fold_temperature(self.teacher_logit_scale, self.teacher_softcap, self.temperature)


def row_arguments(student, teacher, labels, options):
    """Leading arguments and compile-time flags of kernels over rows of student and teacher."""
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
