"""Distillation from a teacher in the same process, from hidden states: logits exist for one chunk at a time.

    loss = model.distill(teacher, input_ids, labels, beta=0.5, hard_weight=0.1).loss
    loss = ddp(input_ids=input_ids, labels=labels, distill=Distillation(teacher)).loss    # of a wrapped model

    loss = weight D(teacher, student) + hard_weight (- log p(label)),    a mean over the labels

D is a generalized Jensen-Shannon divergence (kernels/losses/divergence.py: beta 0 is KL(teacher || student),
1 is KL(student || teacher)), or one minus the cosine of the two rows of logits. With `top_k` it is over the
teacher's k likeliest tokens, with all others merged into one.

The teacher runs without gradients. Each head's weight is read inside its own forward, the student's within
the teacher's: both may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import is_sharded, is_zero3
from liger_models.convert.errors import DataError
from liger_models.kernels import generalized_jsd, linear_cosine_distillation, linear_jsd
from liger_models.kernels.losses._logit_tiles import check_temperature
from liger_models.kernels.losses.divergence import jsd_kind
from liger_models.layers.model.head import (
    LMHead,
    LogitForm,
    Product,
    has_gathered_parts,
    in_one_call,
    in_pieces,
    loss_of_head,
)
from liger_models.layers.model.output import DistillationOutput
from liger_models.layers.model.scoring import KnowsItsWrapper, refuse_inside_wrapper
from liger_models.layers.recompute.activation_memory import recompute
from liger_models.layers.sequences.documents import IGNORE_INDEX
from liger_models.layers.sequences.sequences import Sequences


class Distillation:
    """Distillation settings of one call: the model's keyword `distill`.

    Args:
        teacher: a liger_models model with the student's vocabulary, native or for transformers.
        divergence: "jsd" or "cosine".
        beta: parameter of the JSD, from 0 (KL(teacher || student)) to 1 (KL(student || teacher)).
        temperature: divides the logits of both; there is no factor of its square.
        top_k: compare the teacher's k likeliest tokens and the rest as a whole. None: all tokens.
        weight, hard_weight: factors of the divergence and of the labels' negative log-likelihood.

    Raises:
        ValueError: incompatible settings.

    Not a dataclass: sharding frameworks that cast a call's arguments recurse into dataclasses.
    """

    def __init__(
        self,
        teacher: nn.Module,
        divergence: str = "jsd",
        beta: float = 0.0,
        temperature: float = 1.0,
        top_k: int | None = None,
        weight: float = 1.0,
        hard_weight: float = 0.0,
    ):
        if divergence not in ("jsd", "cosine"):
            raise ValueError(f"divergence is {divergence!r}; expected 'jsd' or 'cosine'")
        if divergence == "cosine" and (temperature != 1.0 or top_k is not None or beta != 0.0):
            raise ValueError("divergence='cosine' has no beta, temperature or top_k")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; expected 1 or more, or None for all tokens")
        jsd_kind(beta)
        check_temperature(temperature)
        self.teacher, self.divergence, self.beta = teacher, divergence, beta
        self.temperature, self.top_k = temperature, top_k
        self.weight, self.hard_weight = weight, hard_weight


class TeacherCall:
    """The teacher's keyword `teaching`: the documents, and a function to call with its head, hidden states
    [T, H] and form of logits while its forward runs.
    """

    def __init__(self, sequences: Sequences, use: Callable[[nn.Module, Tensor, LogitForm], None]):
        self.sequences, self.use = sequences, use


class Distilling(KnowsItsWrapper):
    """A model that can be distilled from another."""

    def distill(
        self,
        teacher: nn.Module,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        divergence: str = "jsd",
        beta: float = 0.0,
        temperature: float = 1.0,
        top_k: int | None = None,
        weight: float = 1.0,
        hard_weight: float = 0.0,
        **inputs: Any,
    ) -> DistillationOutput:
        """Return `loss` and, without gradients, its parts: `divergence` and, with a hard_weight, `hard_loss`.

        Args:
            teacher, divergence, beta, temperature, top_k, weight, hard_weight: as in `Distillation`.
            input_ids: [batch, seq], input of both models.
            labels: [batch, seq], the hard labels; the models are compared where they count.
            inputs: other arguments of `forward`.

        Raises:
            RuntimeError: the model is inside DistributedDataParallel: call the wrapper with `distill=`; or
                inside a PeftModel with learned prompts.
            DataError: the teacher has another vocabulary, or there are no ids; else as `forward`.
        """
        refuse_inside_wrapper(self, "distill=Distillation(...)")
        options = (divergence, beta, temperature, top_k, weight, hard_weight)
        return self(input_ids=input_ids, labels=labels, distill=Distillation(teacher, *options), **inputs)


def check_lesson(lesson: Distillation | None, score: Any, targets: Tensor | None) -> None:
    """Check a call with a lesson.

    Raises:
        DataError: the lesson is combined with scores, has no labels, or its teacher is not a liger_models
            model.
    """
    if lesson is None:
        return
    if targets is None or score is not None:
        raise DataError("distill asks for a loss over labels: pass labels or shift_labels, and no score")
    if not any(isinstance(module, KnowsItsWrapper) for module in lesson.teacher.modules()):
        raise DataError(
            f"the teacher is a {type(lesson.teacher).__name__}; expected a model of liger_models, whose head "
            "is used within its forward: from liger_models.from_hub, or liger_models.hf"
        )


def learn(
    lesson: Distillation, input_ids: Tensor | None, sequences: Sequences, *call: Any
) -> DistillationOutput:
    """Return the loss and its parts. `call`: the arguments of `loss_of_head`."""
    divergence = _divergence(lesson, input_ids, sequences, *call)
    loss, hard = lesson.weight * divergence, None
    if lesson.hard_weight:
        hard = loss_of_head(*call)
        loss = loss + lesson.hard_weight * hard
        hard = hard.detach()
    return DistillationOutput(loss=loss, divergence=divergence.detach(), hard_loss=hard)


def _divergence(
    lesson: Distillation,
    input_ids: Tensor | None,
    sequences: Sequences,
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    num_valid: int,
    num_items: Tensor | int,
    form: LogitForm,
) -> Tensor:
    """Scalar divergence of a student with hidden states [T, H] from the lesson's teacher: the sum over
    counted targets [T], divided by num_items.

    Raises:
        DataError: no ids, sequences divided over ranks, or different vocabularies.
    """
    # The teacher gets neither images nor multi-axis positions.
    images = sequences.visibility.with_images or sequences.positions.axes is not None
    if input_ids is None or sequences.slice is not None or images:
        raise DataError(
            "a teacher reads the ids of whole sequences: pass input_ids and no images, and do not divide "
            "sequences over ranks"
        )
    found: list[Tensor] = []

    def use(teacher_head: nn.Module, teacher_hidden: Tensor, teacher_form: LogitForm) -> None:
        sizes = [getattr(one, "out_features", None) for one in (head, teacher_head)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise DataError(
                f"the student's vocabulary has {sizes[0]} tokens and the teacher's {sizes[1]}; a divergence "
                "is defined over one vocabulary"
            )
        compare = _in_chunks
        plain = all(type(one).forward is LMHead.forward for one in (head, teacher_head))
        if lesson.top_k is None and plain and form.ids is None and teacher_form.ids is None:
            compare = _fused
        pair = (head, hidden, form), (teacher_head, teacher_hidden, teacher_form)
        with torch.enable_grad() if gradients else torch.no_grad():
            found.append(compare(*pair, targets, num_valid, num_items, lesson))

    gradients, training = torch.is_grad_enabled(), lesson.teacher.training
    lesson.teacher.eval()
    try:
        with torch.no_grad():
            lesson.teacher(input_ids=input_ids, teaching=TeacherCall(sequences.without_notes(), use))
    finally:
        lesson.teacher.train(training)
    return found[0]


_Side = tuple[Any, Tensor, LogitForm]


def _fused(
    student: _Side,
    teacher: _Side,
    targets: Tensor,
    num_valid: int,
    num_items: Tensor | int,
    lesson: Distillation,
) -> Tensor:
    """Divergence from the kernels over two linear layers. The student's head runs within the teacher's, so
    that both weights are gathered.
    """
    (head, hidden, form), (teacher_head, teacher_hidden, teacher_form) = student, teacher
    options: dict[str, Any] = {
        "softcap": form.softcap,
        "logit_scale": form.scale,
        "teacher_softcap": teacher_form.softcap,
        "teacher_logit_scale": teacher_form.scale,
        "num_items": num_items,
        "num_valid": num_valid,
    }
    function: Callable[..., Tensor] = linear_cosine_distillation
    if lesson.divergence == "jsd":
        function = linear_jsd
        options |= {"beta": lesson.beta, "temperature": lesson.temperature}
    found: list[Tensor] = []

    def in_teacher(teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None) -> None:
        def in_student(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            layers = hidden, weight, teacher_hidden, teacher_weight
            return function(*layers, targets, bias, teacher_bias, **options)

        found.append(head(hidden, within=in_student))

    teacher_head(teacher_hidden, within=in_teacher)
    return found[0]


def _in_chunks(
    student: _Side,
    teacher: _Side,
    targets: Tensor,
    num_valid: int,
    num_items: Tensor | int,
    lesson: Distillation,
) -> Tensor:
    """Divergence from logits of a chunk of tokens at a time, recomputed in the backward pass: for wrapped or
    replaced heads, and for top-k divergences.
    """
    (head, hidden, form), (teacher_head, teacher_hidden, teacher_form) = student, teacher
    kept = (targets != IGNORE_INDEX).nonzero()[:, 0]
    likeliest = lesson.top_k is not None

    @torch.no_grad()
    def taught(product: Product, hidden: Tensor) -> Tensor:
        return teacher_form(_wide(product(hidden)))

    def taught_tokens(product: Product, hidden: Tensor) -> tuple[Tensor, ...]:
        pieces = in_pieces(_CHUNK, hidden, together=has_gathered_parts(teacher_head))
        rows = ((taught(product, *piece) / lesson.temperature).log_softmax(-1) for piece in pieces)
        tops = [log_p.topk(min(lesson.top_k or 1, log_p.shape[-1]), -1) for log_p in rows]
        return tuple(torch.cat(columns) for columns in zip(*tops, strict=True))

    def summed(product: Product, hidden: Tensor) -> Tensor:
        def of_piece(hidden: Tensor, *known: Tensor) -> Tensor:
            logits = form(_wide(product(hidden)))
            if likeliest:
                log_p, tokens = known
                return top_k_divergence(logits / lesson.temperature, log_p, tokens, lesson.beta).sum()
            teacher_logits = taught(teacher_head, *known)
            if lesson.divergence == "cosine":
                return (1 - F.cosine_similarity(logits, teacher_logits, dim=-1)).sum()
            options: Any = {"beta": lesson.beta, "temperature": lesson.temperature}
            return generalized_jsd(logits, teacher_logits, reduction="sum", **options)

        pieces = in_pieces(_CHUNK, hidden, *known, together=has_gathered_parts(head) or taught_again)
        return torch.stack([recompute(of_piece, *piece) for piece in pieces]).sum()

    # For the backward pass, once per piece; a sharded teacher is gathered for it.
    taught_again = not likeliest and any(is_sharded(p) or is_zero3(p) for p in teacher_head.parameters())
    known = (teacher_hidden[kept],)
    if likeliest:  # few numbers per token, which saves a second run of the teacher
        known = in_one_call(teacher_head, *known, taught_tokens)
    return in_one_call(head, hidden[kept], summed) / num_items


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


_CHUNK = 1024  # tokens; their logits are float32


def top_k_divergence(logits: Tensor, log_p: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """The generalized JSD of logits [N, V] over the teacher's k likeliest tokens [N, k], with
    log-probabilities log_p, and the rest merged into one. Returns [N].
    """
    log_q = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    return generalized_jsd(_with_rest(log_q), _with_rest(log_p), beta=beta, reduction="none")


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append the logarithm of the remaining probability, at least 1e-7, to [N, k]: [N, k + 1]."""
    total = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, (-total.expm1()).log()], -1)
