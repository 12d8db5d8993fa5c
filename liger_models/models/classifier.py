"""Sequence classification, as transformers' ...ForSequenceClassification: a decoder with a head on the last
token; with one label, a reward model.

    logits = W h,  h the hidden state of the sequence's last non-padding token       [labels]

    model = liger_models.from_hub("meta-llama/Llama-3.2-1B", labels=1)     # a random head, score.weight
    loss = model(input_ids, attention_mask=mask, labels=labels).loss                   # or with labels
    rewards = model(input_ids, attention_mask=mask).logits[:, 0]
    values = model(input_ids, attention_mask=mask, every_token=True).logits[..., 0]    # [batch, seq]
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.errors import ConfigError, DataError, UnsupportedModelError
from liger_models.layers.model.call_checks import CallChecks, batch_shape, refuse_unknown
from liger_models.layers.model.head import LMHead
from liger_models.layers.model.output import ModelOutput
from liger_models.layers.parts.head_layers import refuse_head_layers
from liger_models.layers.recompute.eager import not_compiled
from liger_models.layers.sequences.agreement import exchange_device, groups_of_step, refusing_together
from liger_models.layers.sequences.documents import IGNORE_INDEX
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ModelSpec
from liger_models.models.causal_lm import LigerCausalLM

SUFFIX = "ForSequenceClassification"
HEAD = "score."  # its name in checkpoints


PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


class ClassifierOutput(ModelOutput):
    """`loss` (float32 scalar, with labels), `logits` ([sequences, labels], or [batch, seq, labels] for every
    token, float32) and `hidden_states` on request.
    """

    @property
    def loss(self) -> Tensor | None:
        return self.get("loss")

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        return self.get("hidden_states")

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class LigerSequenceClassifier(LigerCausalLM):
    """A decoder with a classification head, named `score` in checkpoints. `from_hub` and `from_config` create
    one from a classifier's config, or with `labels=`.
    """

    tables_of_vocabulary = ("embed_tokens",)
    loss_type = "ForSequenceClassification"  # Trainer counts all labels: these are not shifted

    def __init__(
        self, spec: ModelSpec, architecture: Architecture, raw_config: Mapping[str, Any], *options: Any
    ):
        super().__init__(of_labels(spec), architecture, raw_config, *options)
        self.lm_head = LMHead(spec.hidden_size, labels_of(raw_config) or 1)
        self.note_canonical_forms()

    def _get_name(self) -> str:
        return self.own_name  # its labels are not shifted

    @not_compiled
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        every_token: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> ClassifierOutput | tuple[Any, ...]:
        """Logits of each sequence, in the order of rows or of packed documents, and the loss of labels.

        The loss depends on the config's `problem_type`, and is the mean over all numbers of `labels`:

            regression                   squared error of numbers [sequences], or [sequences, labels]
            single_label_classification  cross entropy of integers [sequences]; -100 does not count
            multi_label_classification   binary cross entropy of numbers [sequences, labels] from 0 to 1

        Without a `problem_type` the first labels decide it, and set it in the config, as in transformers:
        regression for a model with one label, else integers have one label and floating point numbers many.

        Args:
            input_ids, attention_mask, position_ids, cu_seqlens, output_hidden_states, return_dict, others: as
                for `CausalLM`.
            labels: of each sequence, as above.
            num_items_in_batch: divisor of the summed loss instead of the number of labels.
            every_token: return the logits of every token, zero at padding: state values, or step rewards.

        Raises:
            DataError: shapes that do not fit, ids outside the vocabulary, or labels that the model does not
                have; or another process of the training step refused its batch.
            TypeError: an unsupported keyword.
            ConfigError: an unknown `problem_type`.
        """
        refuse_unknown(others)
        groups, own_device = groups_of_step(self), exchange_device(self)
        with refusing_together(groups, own_device):
            shape, device = batch_shape(input_ids, None, self.spec.hidden_size)
            sequences = Sequences.from_call(shape, device, attention_mask, position_ids, cu_seqlens)
            self.prepare_call(sequences, input_ids)
            if labels is not None:
                if every_token:
                    raise DataError("labels belong to sequences: leave out every_token, or the labels")
                labels = self._checked(labels, _count(sequences))
                self._warn_of_a_frozen_head()
        classes = None if labels is None or labels.dim() > 1 else labels
        checks = CallChecks(
            *(input_ids, classes, self.lm_head.out_features, num_items_in_batch),
            num_ids=self.spec.num_ids,
            groups=groups,
            device=own_device,
            of_classes=True,
        )
        self.begin_checks(checks)
        inner: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.run_layers(sequences, input_ids, inputs_of_layers=inner)
        if inner is not None:
            inner.append(sequences.unpack(hidden))
            hidden = sequences.pack(inner[-1])
        checks.finish()
        if self.spec.router is not None:  # its loss belongs to language models
            sequences.notes.router_logits.take()
        if every_token:
            logits = sequences.unpack(self.lm_head(hidden).float())
        else:
            pad = getattr(self.config, "pad_token_id", None)
            logits = self.lm_head(hidden[_last_tokens(sequences, sequences.pack(input_ids), pad)]).float()
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        states = None if inner is None else tuple(inner)
        output = ClassifierOutput(loss=loss, logits=logits, hidden_states=states)
        return output.to_tuple() if return_dict is False else output

    def _warn_of_a_frozen_head(self) -> None:
        """Warn that adapters are trained below a frozen head, often a fresh one."""
        adapted = self.training and torch.is_grad_enabled() and getattr(self, "peft_config", None)
        if adapted and not any(p.requires_grad for p in self.lm_head.parameters()):
            warnings.warn(
                "the classification head is frozen: PEFT trains heads called `score`, and here it is "
                "`lm_head`; pass modules_to_save=['lm_head'] to its config, or lm_head.requires_grad_(True)",
                stacklevel=5,
            )

    def _checked(self, labels: Tensor, sequences: int) -> Tensor:
        """The labels in the shape and dtype of the loss: int64 [sequences], or float32 [sequences, labels].
        Sets the config's `problem_type`.

        Raises:
            ConfigError: an unknown `problem_type`.
            DataError: labels that do not fit it.
        """
        count, integers = self.lm_head.out_features, not labels.dtype.is_floating_point
        problem = getattr(self.config, "problem_type", None)
        if problem is None:
            problem = PROBLEMS[0 if count == 1 else 1 if integers else 2]
            self.config.problem_type = problem  # type: ignore[attr-defined]
        if problem not in PROBLEMS:
            raise ConfigError(f"problem_type is {problem!r}; expected one of {', '.join(PROBLEMS)}")
        single = problem == PROBLEMS[1]
        shapes: list[tuple[int, ...]] = [(sequences, count)]
        if single or count == 1:
            shapes = [(sequences,), (sequences, 1)]
        if tuple(labels.shape) not in shapes or (single and not integers):
            raise DataError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}; expected "
                f"{'integers' if single else 'numbers'} of shape {shapes[0]} for {problem} of {sequences} "
                f"sequences with {count} labels. The config's problem_type chooses between "
                f"{', '.join(PROBLEMS)}"
            )
        if not single:
            return labels.float().reshape(sequences, count)
        return labels.long().flatten()  # their values are checked with the ids

    def _loss(self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        """float32 scalar: the summed loss of logits [sequences, labels], divided by the number of labels."""
        problem = self.config.problem_type  # type: ignore[attr-defined]
        labels = labels.to(logits.device)
        counted: Tensor | int = labels.numel()
        if problem == PROBLEMS[0]:
            total = torch.nn.functional.mse_loss(logits, labels, reduction="sum")
        elif problem == PROBLEMS[1]:
            total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            counted = (labels != IGNORE_INDEX).sum()
        else:
            total = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return total / (counted if num_items is None else num_items)

    def _is_none(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse methods of language models.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError("this model classifies sequences: it has no distribution of tokens")

    generate = score = distill = logits = _is_none  # type: ignore[assignment]


def _count(sequences: Sequences) -> int:
    """Number of sequences of a call."""
    bounds = sequences.documents.cu_seqlens
    return sequences.documents.shape[0] if bounds is None else len(bounds) - 1


def _last_tokens(sequences: Sequences, ids: Tensor, pad: int | None) -> Tensor:
    """Last token of each sequence other than `pad`, as in the reference; the first if all are."""
    if sequences.documents.cu_seqlens is None:
        batch, seq = sequences.documents.shape
        bounds = torch.arange(0, batch * seq + 1, seq, device=ids.device)
    else:
        bounds = sequences.documents.cu_seqlens.long()
    places = torch.arange(len(ids), device=ids.device)
    counted = places if pad is None else torch.where(ids != pad, places, 0)
    number = torch.searchsorted(bounds[1:], places, right=True)
    return torch.zeros_like(bounds[1:]).scatter_reduce(0, number, counted, "amax").maximum(bounds[:-1])


def labels_of(config: Mapping[str, Any]) -> int | None:
    """Number of labels of a classifier's config; None if it is not a classifier."""
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith(SUFFIX):
        return None
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))


def with_labels(config: Mapping[str, Any], labels: int, reference: str) -> dict[str, Any]:
    """Config of the class `reference` with this number of labels.

    Raises:
        ConfigError: it already has another number.
    """
    found = labels_of(config)
    if labels < 1 or found not in (None, labels):
        raise ConfigError(f"labels is {labels}; expected {found or '1 or more'}")
    names = {str(i): f"LABEL_{i}" for i in range(labels)}
    fresh = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    return {**config, "architectures": [reference], **({} if found else fresh)}


def of_labels(spec: ModelSpec) -> ModelSpec:
    """The spec with a plain, untied head.

    Raises:
        UnsupportedModelError: the family's classifiers have further layers in their head.
    """
    refuse_head_layers(spec)
    return replace(spec, tie_word_embeddings=False, head_bias=False, logit_softcap=None, logit_scale=1.0)


def as_classifier(architecture: Architecture) -> Architecture:
    """The family with a classification head.

    Raises:
        UnsupportedModelError: a vision-language model, or not a causal language model.
    """
    stem, _, rest = architecture.reference.partition("For")
    if architecture.multimodal or rest != "CausalLM":
        raise UnsupportedModelError(
            f"{architecture.reference} has no sequence classifier here; expected a text-only family"
        )
    with_head = tuple(
        replace(layout, rename=(("lm_head.", HEAD), *layout.rename)) for layout in architecture.layouts
    )
    rootless = tuple(layout.of_base() for layout in with_head)  # the body may come from a base model
    return replace(
        architecture,
        reference=stem + SUFFIX,
        layouts=(*with_head, *rootless),
        module_names=with_head[-1],
    )


def leave_out_head(reader: CheckpointReader, architecture: Architecture) -> bool:
    """Whether a checkpoint lacks a classification head. Its language modelling head is then dropped."""
    if any(name.endswith(f"{HEAD}weight") for name in reader.tensors):
        return False
    heads = {layout.name(f"lm_head.{part}") for layout in architecture.layouts for part in ("weight", "bias")}
    for name in heads & reader.tensors.keys():
        reader.tensors.pop(name)
    return True
