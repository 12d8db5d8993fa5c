"""Our models with heads as transformers' models: a language model and a classifier.

    LigerForCausalLM: ids [batch, seq] -> CausalLMOutputWithPast, the loss without logits, or logits
    LigerForSequenceClassification: ... -> SequenceClassifierOutputWithPast

The base model is in base_model.py, the common base class in pretrained.py. families.py generates each
family's classes from these. The native model's `LMHead` runs the computation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from liger_models.convert.checkpoints.expressions import Expr, Ref
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.hf.base_model import LigerModel
from liger_models.hf.cache import CACHE, given_cache
from liger_models.hf.checkpoints.module_names import move_head
from liger_models.hf.fused_head import refuse_other_logits
from liger_models.hf.pretrained import LigerPreTrainedModel, keep_initialized
from liger_models.known_to_trainer import KnownToTrainer
from liger_models.layers.model.call_checks import (
    batch_shape,
)
from liger_models.layers.model.distilling import Distilling
from liger_models.layers.model.head import LMHead, LogitForm
from liger_models.layers.model.output import CausalLMOutput, ModelOutput
from liger_models.layers.model.request import Request
from liger_models.layers.model.scoring import Scoring
from liger_models.layers.parts.head_layers import make_head_layers, refuse_head_layers
from liger_models.layers.sequences.agreement import groups_of_step, refusing_together
from liger_models.layers.sequences.documents import IGNORE_INDEX
from liger_models.layers.sequences.sequences import Sequences


@dataclass
class StateSpaceOutput(CausalLMOutputWithPast):
    """Output of models without attention, whose cache transformers before 5.24 names `cache_params`."""

    cache_params: Cache | None = None


HEAD, HEAD_BIAS, HEAD_LAYERS = "lm_head.weight", "lm_head.bias", "head_layers"


class LigerForCausalLM(KnownToTrainer, Scoring, Distilling, LigerPreTrainedModel, GenerationMixin):
    """Causal language model."""

    base_class: type[LigerModel]
    own_name = LigerPreTrainedModel.own_name

    def __init__(self, config: Any, ignore_config_keys: Collection[str] = ()):
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.base_class(config, ignore_config_keys))
        spec = self.base_decoder.spec
        self.vocab_size = spec.vocab_size
        self.head_layers = make_head_layers(spec.hidden_size, spec.head_layers)
        self.lm_head = LMHead(spec.hidden_size, spec.vocab_size, spec.head_bias, spec.float32_head)
        self.logit_form = LogitForm.of(spec)
        self._place_parts()
        self._begin()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            refuse_other_logits(self, value)
        super().__setattr__(name, value)

    def _place_parts(self) -> None:
        """Move submodules to their paths in transformers' own model."""
        head = self.architecture.modules_layout.name(HEAD)
        if head != HEAD:
            move_head(self, head.removesuffix(".weight"))
        if self.head_layers is not None:
            own = self.architecture.modules_layout.name(f"{HEAD_LAYERS}.")
            move_head(self, own.removesuffix("."), HEAD_LAYERS)

    def weight_map(self, layout: Layout | None = None) -> dict[str, Expr]:
        """Add the head, whose name differs between layouts, to the decoder's map."""
        layout, own, spec = layout or self.layouts[0], self.base_decoder.own_layout, self.base_decoder.spec
        shapes = {HEAD: (spec.vocab_size, spec.hidden_size), HEAD_BIAS: (spec.vocab_size,)}
        heads = [HEAD, HEAD_BIAS] if spec.head_bias else [HEAD]
        if self.head_layers is not None:
            shapes |= {f"{HEAD_LAYERS}.{n}": shape_of(p) for n, p in self.head_layers.named_parameters()}
            heads += [name for name in shapes if name.startswith(HEAD_LAYERS)]
        return super().weight_map(layout) | {own.name(n): Ref(layout.name(n), shapes[n]) for n in heads}

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Convert a plain linear layer, as resizing makes it, to our head with the fused loss."""
        if type(new_embeddings) is nn.Linear:
            with torch.device("meta"):
                sizes = new_embeddings.in_features, new_embeddings.out_features
                head = LMHead(*sizes, float32=self.base_decoder.spec.float32_head)
            head.weight, head.bias = new_embeddings.weight, new_embeddings.bias
            keep_initialized(new_embeddings, head)
            new_embeddings = head
        self.lm_head = new_embeddings

    def for_head(self, hidden: Tensor) -> Tensor:
        """The input of the head's projection, [..., H]."""
        return hidden if self.head_layers is None else self.head_layers(hidden)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast | ModelOutput:
        """Compute the loss or logits. Takes the arguments of `LigerModel.forward`, and:

        Args:
            labels: [batch, seq], aligned with the input and shifted internally; -100, padding and the first
                token of a document are ignored. With `logits_to_keep` also [batch, positions], as in
                transformers: the target of a kept position is the next label.
            logits_to_keep: compute logits of the last N positions only, or of these positions (indices in
                ascending order, or a mask); 0: of all.
            others: `shift_labels` [batch, seq], shifted already, which take precedence over `labels`;
                `score`, `ScoreOptions`, to return the output of the method `score` instead; `distill`,
                `Distillation`, to return that of the method `distill`; `num_items_in_batch`, the divisor of
                the summed loss; `return_logits` or `skip_logits`, whether logits are returned with the loss
                (default: in evaluation, for metrics, and not in training); `output_router_logits`, by
                default the config's: the load balancing loss is added to the loss.

        Returns:
            `loss` (float32 scalar, with labels), `logits` [batch, seq, V], the cache, hidden states if
            requested; with router logits also `aux_loss`, without the coefficient.

        Raises:
            DataError: as `LigerModel.forward`; labels outside the vocabulary, or all of them ignored.
        """
        # Not in the signature: trainers treat any parameter with "label" in its name as a label column.
        if others.get("shift_labels") is not None:
            labels = None  # as in transformers
        request = Request.take(others, labels, others.pop("num_items_in_batch", None))
        past_key_values = given_cache(past_key_values, others)
        return_logits, skip_logits = others.pop("return_logits", None), others.pop("skip_logits", None)
        if request.teaching is not None:
            sequences = request.teaching.sequences
            output = self.base_decoder(input_ids=input_ids, sequences=sequences, use_cache=False)
            hidden = self.for_head(sequences.pack(output.last_hidden_state))
            return request.teach(self.lm_head, self.logit_form, hidden)
        with_routers = self.base_decoder.wants_router_logits(others.pop("output_router_logits", None))
        alone = request.score is not None or request.lesson is not None  # an output without a cache
        use_cache = False if alone else use_cache
        groups, device = groups_of_step(self), next(self.parameters()).device
        with refusing_together(groups, device):
            spec, needed = self.base_decoder.spec, self.base_decoder.needs_ids
            shape, _ = batch_shape(input_ids, inputs_embeds, spec.hidden_size, ids_needed=needed)
            if labels is not None and labels.shape != shape:
                request = replace(request, labels=_labels_of_all(labels, logits_to_keep, shape))
            bounds = others.get("cu_seq_lens_q", others.get("cu_seqlens"))
            request.check_score(shape[0], bounds, return_logits)
            sequences, past_key_values = self.base_decoder.begin(
                shape, attention_mask, position_ids, past_key_values, use_cache, others, request.with_labels
            )
            targets = request.targets(sequences)
            request = request.packed(sequences)
            # The base model prepares these, after it has read the images.
            checks = request.checks(input_ids, targets, spec, sequences, groups, device)
        output = self.base_decoder(
            input_ids=input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=with_routers,
            sequences=sequences,
            checks=checks,
            **others,
        )
        hidden, added = self.for_head(output.last_hidden_state), None
        routers: dict[str, Any] = {}
        if with_routers:
            routers, added = self._router_outputs(output.router_logits, sequences, shape)
        found: ModelOutput = CausalLMOutput()
        if targets is not None:
            packed = sequences.pack(hidden)
            found = request.compute(
                self.lm_head, self.logit_form, packed, targets, checks, sequences, input_ids
            )
            found = request.complete(found, sequences, added)
        if alone:
            return found
        logits = None
        if return_logits is None:
            return_logits = targets is None or not (self.training or skip_logits)
        if return_logits:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.logit_form(self.lm_head(hidden[:, kept]))
        return self._complete(output, routers, loss=found.get("loss"), logits=logits)

    def _router_outputs(
        self, router_logits: tuple[Tensor, ...], sequences: Sequences, shape: tuple[int, int]
    ) -> tuple[dict[str, Any], Any]:
        """The outputs of routers, and the loss that is added to the model's."""
        # Padding is ignored, as in transformers.
        of_tokens = [sequences.pack(x.unflatten(0, shape)) for x in router_logits]
        aux_loss, added = self.base_decoder.router_loss(of_tokens)
        return {"aux_loss": aux_loss, "router_logits": router_logits}, added

    def _complete(self, output: Any, routers: dict[str, Any], **of_head: Tensor | None) -> ModelOutput:
        """Output of the class that transformers' own model returns, with the cache under its name there."""
        spec, filled = self.base_decoder.spec, getattr(output, CACHE)
        make: Any = MoeCausalLMOutputWithPast if routers else CausalLMOutputWithPast
        of_states = spec.is_recurrent and all(block.recurrent is not None for block in spec.blocks)
        if of_states and CACHE == "past_key_values":
            make, routers = StateSpaceOutput, {"cache_params": filled}
        return make(**of_head, hidden_states=output.hidden_states, **{CACHE: filled}, **routers)

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
        """Return the mask unchanged to `generate` with a static cache: our layers build their own masks."""
        return attention_mask


class LigerForSequenceClassification(GenericForSequenceClassification, LigerPreTrainedModel):  # type: ignore[misc]
    """Linear layer on the last token's hidden state: a classifier or reward model."""

    base_class: type[LigerModel]

    def __init__(self, config: Any, ignore_config_keys: Collection[str] = ()):
        LigerPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.base_class(config, ignore_config_keys))
        refuse_head_layers(self.base_decoder.spec)
        self.score = nn.Linear(self.base_decoder.spec.hidden_size, self.num_labels, bias=False)
        self._begin()


def _labels_of_all(labels: Tensor, kept: int | Tensor, shape: tuple[int, int]) -> Tensor:
    """Expand labels of kept positions to [batch, seq], ignoring the others. Labels of any other shape are
    returned as is; the caller reports the shape.
    """
    positions = torch.arange(shape[1], device=labels.device)
    positions = positions[-kept:] if isinstance(kept, int) else positions[kept.to(labels.device)]
    if labels.shape != (shape[0], len(positions)):
        return labels
    every = labels.new_full((shape[0], shape[1] + 1), IGNORE_INDEX)
    every[:, positions[:-1] + 1] = labels[:, 1:]
    return every[:, : shape[1]]
