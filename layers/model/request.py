"""A call's labels, and the loss, scores or distillation loss computed from them.

    request = Request.take(keywords, labels, num_items)      # takes its keywords out of the call's
    targets = request.targets(sequences)                     # [T]
    output = request.compute(head, form, hidden, targets, ...)
    output = request.complete(output, sequences, added)      # with the routers' loss

The native model and the ones for transformers run these steps around their own passes through the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from liger_models.layers.model.call_checks import CallChecks, labels_of_beginnings, targets_of
from liger_models.layers.model.distilling import Distillation, TeacherCall, check_lesson, learn
from liger_models.layers.model.head import LogitForm, loss_of_head, scores_of_head
from liger_models.layers.model.output import CausalLMOutput, ModelOutput, ScoreOutput
from liger_models.layers.model.scoring import ScoreOptions, check_score_call, score_output
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ModelSpec


@dataclass(frozen=True, eq=False)
class Request:
    """Computation that a call requests from the model's head.

    Attributes:
        labels: [batch, seq], aligned with the input.
        shift_labels: [batch, seq], already shifted, instead of labels.
        num_items: the divisor of a summed loss. Default: the number of counted labels.
        score: compute the scores of the labels and no loss.
        lesson: compute a distillation loss.
        teaching: the model is the teacher, and computes nothing itself.
    """

    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    num_items: Tensor | int | None = None
    score: ScoreOptions | None = None
    lesson: Distillation | None = None
    teaching: TeacherCall | None = None

    @classmethod
    def take(cls, keywords: dict[str, Any], labels: Tensor | None, num_items: Tensor | int | None) -> Self:
        """The request of a call. Removes the keywords `shift_labels`, `score`, `distill` and `teaching`."""
        shift_labels, score = keywords.pop("shift_labels", None), keywords.pop("score", None)
        lesson, teaching = keywords.pop("distill", None), keywords.pop("teaching", None)
        return cls(labels, shift_labels, num_items, score, lesson, teaching)

    @property
    def with_labels(self) -> bool:
        return self.labels is not None or self.shift_labels is not None

    def check_score(self, batch: int, cu_seqlens: Any, return_logits: bool | None) -> None:
        """Check the arguments of a call with scores: see `check_score_call`."""
        if self.score is not None:
            given = self.num_items, return_logits
            check_score_call(self.labels, self.shift_labels, cu_seqlens, batch, *given)

    def targets(self, sequences: Sequences) -> Tensor | None:
        """The token that each position must predict, [T], of whole sequences; None without labels.

        Raises:
            DataError: labels that do not match the tokens, or a lesson without labels.
        """
        targets = targets_of(sequences.documents, self.labels, self.shift_labels)
        check_lesson(self.lesson, self.score, targets)
        return targets

    def packed(self, sequences: Sequences) -> Request:
        """The same request with the coefficients of its scores packed, [T]."""
        if self.score is None:
            return self
        return replace(self, score=self.score.packed(sequences, self.shift_labels is not None))

    def checks(
        self,
        input_ids: Tensor | None,
        targets: Tensor | None,
        spec: ModelSpec,
        sequences: Sequences,
        groups: Sequence[Any],
        device: torch.device,
    ) -> CallChecks:
        """Checks of the call's values, for a rank's share of its sequences."""
        # Scores have no divisor, so a call without labels is valid.
        num_items = self.num_items if self.score is None else 1
        beginnings = labels_of_beginnings(sequences.documents, self.labels, num_items)
        num_labels, num_ids = spec.num_labels, spec.num_ids
        return CallChecks(
            input_ids, targets, num_labels, num_items, sequences, num_ids, beginnings, groups, device
        )

    def divisor(self, num_valid: int) -> Tensor | int:
        """The divisor of a loss over `num_valid` labels."""
        return num_valid if self.num_items is None else self.num_items

    def compute(
        self,
        head: nn.Module,
        form: LogitForm,
        hidden: Tensor,
        targets: Tensor | None,
        checks: CallChecks,
        sequences: Sequences,
        input_ids: Tensor | None,
    ) -> ModelOutput:
        """The output for a rank's hidden states [T, H] and targets [T]; empty without targets. Requires
        finished checks.

        Raises:
            DataError: a teacher cannot read the call.
        """
        if targets is None:
            return CausalLMOutput()
        if self.score is not None:
            scores = scores_of_head(head, hidden, targets, checks.own_valid, form, score=self.score)
            return score_output(scores, sequences, self.shift_labels is not None)
        call = head, hidden, targets, checks.own_valid, self.divisor(checks.num_valid), form
        if self.lesson is None:
            return CausalLMOutput(loss=loss_of_head(*call))
        return learn(self.lesson, input_ids, sequences, *call)

    def complete(self, output: ModelOutput, sequences: Sequences, added: Tensor | None = None) -> ModelOutput:
        """The output with the routers' loss `added`, summed over the ranks that divide the sequences."""
        if isinstance(output, ScoreOutput):
            if added is not None:
                output["router_loss"] = sequences.summed(added)
        elif "loss" in output:
            loss = output["loss"] if added is None else output["loss"] + added
            output["loss"] = sequences.summed(loss)
        return output

    def teach(self, head: nn.Module, form: LogitForm, hidden: Tensor) -> CausalLMOutput:
        """Give the student in `teaching` the head and the hidden states [T, H]."""
        assert self.teaching is not None
        self.teaching.use(head, hidden, form)
        return CausalLMOutput()
