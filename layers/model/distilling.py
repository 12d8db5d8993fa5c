"""Distillation from a teacher in the same process, out of hidden states: no logits of either, but a chunk's.

    loss = model.distill(teacher, input_ids, labels, beta=0.5, hard_weight=0.1).loss
    loss = ddp(input_ids=input_ids, labels=labels, distill=Distillation(teacher)).loss    # of a wrapped model

    loss = weight D(teacher, student) + hard_weight (- log p(label)),    a mean over the labels

D is a generalized Jensen-Shannon divergence (kernels/losses/divergence.py: beta 0 is KL(teacher || student),
1 is KL(student || teacher)), or one minus the cosine of the two rows of logits. With `top_k` it is that of
the teacher's k likeliest tokens and, as one token more, all others together.

The teacher runs without gradients. Its head's weight is read inside its own forward, and there the student's
inside its: both may be sharded.
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
from liger_models.layers.model.scoring import KnowsItsWrapper, refuse_beside_wrapper
from liger_models.layers.recompute.activation_memory import recompute
from liger_models.layers.sequences.documents import IGNORE_INDEX
from liger_models.layers.sequences.sequences import Sequences


class Distillation:
    """What the student learns from a teacher in one call: the keyword `distill` of the model.

    Args:
        teacher: a model of liger_models with the student's vocabulary, here or in transformers.
        divergence: "jsd" or "cosine".
        beta: of the JSD, from 0 (KL(teacher || student)) to 1 (KL(student || teacher)).
        temperature: divides the logits of both; there is no factor of its square.
        top_k: compare the teacher's k likeliest tokens and the rest as a whole. None: all tokens.
        weight, hard_weight: of the divergence, and of the labels' negative log-likelihood.

    Raises:
        ValueError: what does not go together.

    Not a dataclass: sharding frameworks that cast a call's arguments look into those.
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
    """What the teacher is called with, as its keyword `teaching`: the documents, and what to do with its
    head, hidden states [T, H] and form of logits while its forward runs.
    """

    def __init__(self, sequences: Sequences, use: Callable[[nn.Module, Tensor, LogitForm], None]):
        self.sequences, self.use = sequences, use


class Distilling(KnowsItsWrapper):
    """A model that learns from another."""

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
        """`loss`, and without gradients its parts: `divergence` and, with a hard_weight, `hard_loss`.

        Args:
            teacher, divergence, beta, temperature, top_k, weight, hard_weight: those of `Distillation`.
            input_ids: [batch, seq], which both models read.
            labels: [batch, seq], which say where the models are compared, and what the hard labels are.
            inputs: what else `forward` takes beside labels.

        Raises:
            RuntimeError: the model is inside DistributedDataParallel: call the wrapper with `distill=`; or
                behind the learned prompts of a PeftModel.
            DataError: the teacher has another vocabulary, or there are no ids; else as `forward`.
        """
        refuse_beside_wrapper(self, "distill=Distillation(...)")
        options = (divergence, beta, temperature, top_k, weight, hard_weight)
        return self(input_ids=input_ids, labels=labels, distill=Distillation(teacher, *options), **inputs)


def check_lesson(lesson: Distillation | None, score: Any, targets: Tensor | None) -> None:
    """Raises:
    DataError: there is a lesson, and scores are wanted in place of its loss, no labels say where it is, or
        its teacher is no model of liger_models.
    """
    if lesson is None:
        return
    if targets is None or score is not None:
        raise DataError("distill asks for a loss over labels: give labels or shift_labels, and no score")
    if not any(isinstance(module, KnowsItsWrapper) for module in lesson.teacher.modules()):
        raise DataError(
            f"the teacher is a {type(lesson.teacher).__name__}; expected a model of liger_models, whose head "
            "is used within its forward: from liger_models.from_hub, or liger_models.hf"
        )


def learn(
    lesson: Distillation, input_ids: Tensor | None, sequences: Sequences, *call: Any
) -> DistillationOutput:
    """The loss and its parts. `call`: the arguments of `loss_of_head`."""
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
    """The divergence of a student whose hidden states are [T, H] from the lesson's teacher, a scalar: the sum
    over targets [T] that count, over num_items.

    Raises:
        DataError: no ids, sequences that are divided over ranks, or two vocabularies.
    """
    # The teacher gets neither images nor positions on axes.
    images = sequences.visibility.with_images or sequences.positions.axes is not None
    if input_ids is None or sequences.slice is not None or images:
        raise DataError(
            "a teacher reads the ids of whole sequences: give input_ids and no images, and divide no "
            "sequence over ranks"
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
        if lesson.top_k is None and all(type(one).forward is LMHead.forward for one in (head, teacher_head)):
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
    """By the kernels over two linear layers: the teacher's weight is there while its head runs, and the
    student's while its head runs in there.
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
    """From the logits of some tokens at a time, which run again in the backward pass: for heads that are
    wrapped or replaced, and for a divergence of the likeliest tokens.
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

    # For the backward pass, once a piece; where the teacher is sharded, it is gathered for that.
    taught_again = not likeliest and any(is_sharded(p) or is_zero3(p) for p in teacher_head.parameters())
    known = (teacher_hidden[kept],)
    if likeliest:  # few numbers a token, so that the teacher is not asked again
        known = in_one_call(teacher_head, *known, taught_tokens)
    return in_one_call(head, hidden[kept], summed) / num_items


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


_CHUNK = 1024  # tokens, whose logits are float32


def top_k_divergence(logits: Tensor, log_p: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """The generalized JSD of logits [N, V] over the teacher's k likeliest tokens [N, k], which have
    log-probabilities log_p, and the rest as one more.  [N]
    """
    log_q = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    return generalized_jsd(_with_rest(log_q), _with_rest(log_p), beta=beta, reduction="none")


def _with_rest(log_probs: Tensor) -> Tensor:
    """[N, k] and the logarithm of what is left of one, which is 1e-7 at the least: [N, k + 1]."""
    total = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, (-total.expm1()).log()], -1)
