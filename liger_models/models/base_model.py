"""Base models: a decoder without a head, whose outputs are hidden states or one embedding for each sequence.

    model = liger_models.from_hub("Qwen/Qwen3-Embedding-0.6B")               # a checkpoint without a head
    model = liger_models.from_hub("Qwen/Qwen3-0.6B", head=False)             # or with a head left out
    states = model(input_ids, attention_mask=mask).last_hidden_state         # [batch, seq, H]
    embeddings = model(input_ids, attention_mask=mask, pooling="last").embeddings      # [batch, H]

Checkpoints of base models have tensor names without the language model's root ("model."), as transformers'
...Model classes write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.model.call_checks import CallChecks, batch_shape, refuse_unknown
from liger_models.layers.model.output import ModelOutput
from liger_models.layers.recompute.eager import not_compiled
from liger_models.layers.sequences.agreement import exchange_device, groups_of_step, refusing_together
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ModelSpec
from liger_models.models.causal_lm import LigerCausalLM

Pooling = Literal["last", "mean"]


class BaseModelOutput(ModelOutput):
    """`last_hidden_state` ([batch, seq, H], after the final norm, zero at padding), or with a pooling
    `embeddings` ([sequences, H]); and `hidden_states` on request.
    """

    @property
    def last_hidden_state(self) -> Tensor | None:
        return self.get("last_hidden_state")

    @property
    def embeddings(self) -> Tensor | None:
        return self.get("embeddings")

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        return self.get("hidden_states")


class LigerBaseModel(LigerCausalLM):
    """A decoder without a head. `from_hub` makes one from a base model's checkpoint, or with `head=False`."""

    tables_of_vocabulary = ("embed_tokens",)
    lm_head: Any

    def __init__(
        self, spec: ModelSpec, architecture: Architecture, raw_config: Mapping[str, Any], *options: Any
    ):
        spec = replace(spec, tie_word_embeddings=False, head_layers=None)
        super().__init__(spec, architecture, raw_config, *options)
        self.lm_head = None
        self.note_canonical_forms()

    @not_compiled
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pooling: Pooling | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutput | tuple[Any, ...]:
        """Hidden states after the final norm, or embeddings of sequences.

        Args:
            input_ids, attention_mask, position_ids, cu_seqlens, output_hidden_states, return_dict, others: as
                for `CausalLM`.
            pooling: return one embedding for each row or packed document instead: the hidden state of its
                last token ("last"), or the mean of its tokens' ("mean", summed in float32). Padding does not
                count. A sequence without tokens gives zeros. Embeddings are not normalised.

        Raises:
            DataError: shapes that do not fit or ids outside the vocabulary; or another process of the
                training step refused its batch.
            TypeError: an unsupported keyword.
            ValueError: an unknown pooling.
        """
        refuse_unknown(others)
        if pooling is not None and pooling not in get_args(Pooling):
            raise ValueError(f"pooling is {pooling!r}; expected 'last' or 'mean'")
        groups, own_device = groups_of_step(self), exchange_device(self)
        with refusing_together(groups, own_device):
            shape, device = batch_shape(input_ids, None, self.spec.hidden_size)
            sequences = Sequences.from_call(shape, device, attention_mask, position_ids, cu_seqlens)
            self.prepare_call(sequences, input_ids)
        checks = CallChecks(input_ids, None, self.spec.num_ids, groups=groups, device=own_device)
        self.begin_checks(checks)
        inner: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.run_layers(sequences, input_ids, inputs_of_layers=inner)
        if inner is not None:
            inner.append(sequences.unpack(hidden))
            hidden = sequences.pack(inner[-1])
        checks.finish()
        if self.spec.router is not None:  # its loss belongs to language models
            sequences.notes.router_logits.take()
        output = BaseModelOutput(
            last_hidden_state=sequences.unpack(hidden) if pooling is None else None,
            embeddings=None if pooling is None else pooled(hidden, sequences.documents.boundaries(), pooling),
            hidden_states=None if inner is None else tuple(inner),
        )
        return output.to_tuple() if return_dict is False else output

    def _is_none(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse methods of language models.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError("this is a base model: it has no head that predicts tokens")

    generate = score = distill = logits = _is_none  # type: ignore[assignment]


def pooled(hidden: Tensor, cu_seqlens: Tensor, pooling: Pooling) -> Tensor:
    """One row for each packed document: hidden [T, H], cu_seqlens [n + 1] -> [n, H], in hidden's dtype."""
    bounds = cu_seqlens.to(hidden.device, torch.int64)
    lengths = bounds.diff()
    if pooling == "last":
        return hidden[(bounds[1:] - 1).clamp(min=0)] * (lengths > 0)[:, None]
    sums = torch.segment_reduce(hidden.float(), "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
    return (sums / lengths.clamp(min=1)[:, None]).to(hidden.dtype)


def is_base(config: HFConfig, architecture: Architecture, reader: CheckpointReader | None) -> bool:
    """Whether a config or a checkpoint is of a base model: its tensors have names without the root, or its
    config names a class of base models and there is no head.
    """
    if architecture.multimodal:
        return False
    named = str((config.raw.get("architectures") or [""])[0])
    base = named.endswith("Model") and not named.endswith("LMHeadModel")
    if reader is None:
        return base
    embedding, head = "embed_tokens.weight", "lm_head.weight"
    if not any(layout.name(embedding) in reader.tensors for layout in architecture.layouts):
        return any(layout.of_base().name(embedding) in reader.tensors for layout in architecture.layouts)
    return base and not any(layout.name(head) in reader.tensors for layout in architecture.layouts)


def as_base(architecture: Architecture) -> Architecture:
    """The family without a head. Its own layouts have no root; those of language models are read, too.

    Raises:
        UnsupportedModelError: a multimodal model.
    """
    if architecture.multimodal:
        raise UnsupportedModelError(
            f"{architecture.reference} has no base model here; expected a text-only family, or text_only=True"
        )
    stem = architecture.reference.partition("For")[0].removesuffix("LMHeadModel")
    of_text = architecture.model_type.endswith("_text") and not stem.endswith("Text")
    kind = "TextModel" if of_text else "Model"
    rootless = tuple(layout.of_base() for layout in architecture.layouts)
    return replace(
        architecture,
        reference=stem + kind,
        layouts=(*rootless, *architecture.layouts),
        carried=partial(_carried, architecture),
        module_names=rootless[-1],
    )


def _carried(architecture: Architecture, config: HFConfig) -> tuple[str, ...]:
    roots = {layout.base_prefix for layout in architecture.layouts}
    patterns = architecture.carried(config)
    return (*patterns, *(pattern.removeprefix(root) for pattern in patterns for root in roots))


def leave_out_heads(reader: CheckpointReader, architecture: Architecture) -> bool:
    """Whether a checkpoint has the names of a language model. Its head is then dropped."""
    heads, embeddings = (
        {layout.name(name) for layout in architecture.layouts for name in names}
        for names in (("lm_head.weight", "lm_head.bias"), ("embed_tokens.weight",))
    )
    further = tuple(layout.name("head_layers.") for layout in architecture.layouts)
    for name in [name for name in reader.tensors if name in heads or name.startswith(further)]:
        reader.tensors.pop(name)
    return bool(embeddings & reader.tensors.keys())
