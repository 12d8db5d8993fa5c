"""Sequence classification, as transformers' ...ForSequenceClassification: a decoder with a head on the last
token; with one label, a reward model.

    logits = W h,  h the hidden state of the sequence's last non-padding token       [labels]

    model = liger_models.from_hub("meta-llama/Llama-3.2-1B", labels=1)     # a random head, score.weight
    rewards = model(input_ids, attention_mask=mask).logits[:, 0]
    values = model(input_ids, attention_mask=mask, every_token=True).logits[..., 0]    # [batch, seq]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.errors import ConfigError, UnsupportedModelError
from liger_models.layers.model.call_checks import CallChecks, batch_shape
from liger_models.layers.model.head import LMHead
from liger_models.layers.model.output import ModelOutput
from liger_models.layers.recompute.eager import not_compiled
from liger_models.layers.sequences.agreement import exchange_device, groups_of_step, refusing_together
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ModelSpec
from liger_models.models.causal_lm import LigerCausalLM

SUFFIX = "ForSequenceClassification"
HEAD = "score."  # its name in checkpoints


class ClassifierOutput(ModelOutput):
    """`logits` [sequences, labels], or [batch, seq, labels] for every token, float32."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class LigerSequenceClassifier(LigerCausalLM):
    """A decoder with a classification head, named `score` in checkpoints. `from_hub` and `from_config` create
    one from a classifier's config, or with `labels=`.
    """

    def __init__(
        self, spec: ModelSpec, architecture: Architecture, raw_config: Mapping[str, Any], *options: Any
    ):
        super().__init__(of_labels(spec), architecture, raw_config, *options)
        self.lm_head = LMHead(spec.hidden_size, labels_of(raw_config) or 1)
        self.note_canonical_forms()

    @not_compiled
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        every_token: bool = False,
    ) -> ClassifierOutput:
        """Logits of each sequence, in the order of rows or of packed documents.

        Args:
            input_ids, attention_mask, position_ids, cu_seqlens: as for `CausalLM`.
            every_token: return the logits of every token, zero at padding: state values, or step rewards.

        Raises:
            DataError: shapes that do not fit, or ids outside the vocabulary; or another process of the
                training step refused its batch.
        """
        groups, own_device = groups_of_step(self), exchange_device(self)
        with refusing_together(groups, own_device):
            shape, device = batch_shape(input_ids, None, self.spec.hidden_size)
            sequences = Sequences.from_call(shape, device, attention_mask, position_ids, cu_seqlens)
            self.prepare_call(sequences, input_ids)
        checks = CallChecks(input_ids, None, self.spec.num_ids, groups=groups, device=own_device)
        self.begin_checks(checks)
        hidden = self.run_layers(sequences, input_ids)
        checks.finish()
        if self.spec.router is not None:  # its loss belongs to language models
            sequences.notes.router_logits.take()
        if every_token:
            return ClassifierOutput(logits=sequences.unpack(self.lm_head(hidden).float()))
        last = _last_tokens(sequences, sequences.pack(input_ids), getattr(self.config, "pad_token_id", None))
        return ClassifierOutput(logits=self.lm_head(hidden[last]).float())

    def _is_none(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse methods of language models.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError("this model classifies sequences: it has no distribution of tokens")

    generate = score = distill = logits = _is_none  # type: ignore[assignment]


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
    """The spec with a plain, untied head."""
    return replace(spec, tie_word_embeddings=False, head_bias=False, logit_softcap=None, logit_scale=1.0)


def as_classifier(architecture: Architecture) -> Architecture:
    """The family with a classification head.

    Raises:
        UnsupportedModelError: a vision-language model, or not a causal language model.
    """
    stem, _, rest = architecture.reference.partition("For")
    if architecture.vision or rest != "CausalLM":
        raise UnsupportedModelError(
            f"{architecture.reference} has no sequence classifier here; expected a text-only family"
        )
    layouts = tuple(
        replace(layout, rename=(("lm_head.", HEAD), *layout.rename)) for layout in architecture.layouts
    )
    return replace(architecture, reference=stem + SUFFIX, layouts=layouts)


def leave_out_head(reader: CheckpointReader, architecture: Architecture) -> bool:
    """Whether a checkpoint lacks a classification head. Its language modelling head is then dropped."""
    if any(name.endswith(f"{HEAD}weight") for name in reader.tensors):
        return False
    heads = {layout.name(f"lm_head.{part}") for layout in architecture.layouts for part in ("weight", "bias")}
    for name in heads & reader.tensors.keys():
        reader.tensors.pop(name)
    return True
