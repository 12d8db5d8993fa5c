"""Our decoder as a transformers base model, with its caches and outputs.

    LigerModel: ids [batch, seq] -> BaseModelOutputWithPast, hidden states [batch, seq, H]

`layers.Decoder` runs the computation, as in the native model. This file implements the interface that
transformers and the libraries around it expect of a base model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.expressions import Expr, Ref
from liger_models.convert.checkpoints.layout import Layout, canonical_forms
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import DataError
from liger_models.hf.cache import CACHE, TransformersCache, UnfilledCache, given_cache, tokens_in
from liger_models.hf.checkpoints.module_names import (
    LanguageModel,
    give_names,
    hide_matrices,
    stored_as_one,
    to_split,
)
from liger_models.hf.checkpoints.unread import carry_unread, own_layout, own_skeleton
from liger_models.hf.pretrained import LigerPreTrainedModel
from liger_models.kernels import load_balancing_loss
from liger_models.layers.audio.media import NO_MEDIA, Media
from liger_models.layers.model.call_checks import (
    CallChecks,
    batch_shape,
    refuse_float16_training,
    refuse_unknown,
)
from liger_models.layers.model.decoder import Decoder
from liger_models.layers.parts.fresh_weights import note_fresh_weights
from liger_models.layers.projections.in_place import child_table
from liger_models.layers.projections.packed_linear import name_layers
from liger_models.layers.sequences.agreement import exchange_device, groups_of_step, refusing_together
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.positions import Positions, split_axes
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import ModelSpec, MoESpec


class LigerModel(LigerPreTrainedModel, Decoder):  # type: ignore[misc]
    """Embeddings, blocks and a final norm.

    Args:
        config: transformers' config of the family.
        ignore_config_keys: unknown config keys to ignore. `from_pretrained` and `from_config` of the Auto
            classes pass them on.
    """

    forms: dict[str, Expr]  # by native name
    names: dict[str, str]  # native name -> name here
    ambiguous: set[str]
    several: dict[str, list[str]]  # layers that are several in transformers' own model, and their names
    own_layout: Layout  # layout of the modules of transformers' own model, and of ours
    # Unused tensors carried along, by their names here, which are transformers' names.
    unread: dict[str, Ref]
    initializers: dict[type, Callable[[nn.Module], None]]  # of their modules, by type

    def __init__(self, config: Any, ignore_config_keys: Collection[str] = ()):
        super().__init__(config)
        self.make_decoder(
            spec_of(self.architecture, config, ignore_config_keys),
            "eager" if config._attn_implementation == "eager" else "auto",
        )
        note_fresh_weights(self, self.spec.fresh)
        Decoder.set_activation_memory(self, "lean")
        self.note_forms()
        self.layouts = self.architecture.layouts
        self.names, self.unread = {name: name for name in self.forms}, {}
        self.initializers = {}
        theirs = own_skeleton(self.architecture, config) if self.encoders else None
        self.own_layout = own_layout(self, theirs)
        self.names, self.ambiguous = give_names(self, self.weight_map(self.own_layout))
        weight_map = self.weight_map(self.own_layout)
        self.several = stored_as_one(self, to_split(self), weight_map)
        hide_matrices(self, weight_map)
        name_layers(self, weight_map)
        LanguageModel.within(self)
        if theirs is not None:
            carry_unread(self, theirs)
        if self.projections == "split":
            self.split_projections()
        self._begin()

    def get_decoder(self) -> Any:
        """Return the language model: this model itself if it is text-only, or if another module has the name
        of the language model (Gemma 4).
        """
        found = child_table(self).get("language_model")
        return found if isinstance(found, LanguageModel) else self

    def note_forms(self) -> None:
        """Record the tensors' names and expressions before adapters or wrappers are added."""
        forms = canonical_forms(self) if not hasattr(self, "forms") else self.forms
        embedding = "embed_tokens.weight"
        self.forms = {**forms, embedding: Ref(embedding, (self.spec.num_ids, self.spec.hidden_size))}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        """Compute the hidden states after the final norm, [batch, seq, H], zero at padding.

        Args:
            input_ids: [batch, seq]; or `inputs_embeds` [batch, seq, H] instead, or both where layers have
                per-layer inputs looked up by id.
            attention_mask: [batch, all tokens so far], 0 at padding.
            position_ids: [batch, seq]. Without an attention mask and a cache, a restart begins a document;
                documents do not attend to each other. Models with three position axes also take
                [3, batch, seq], or [4, batch, seq] with the text positions first.
            past_key_values: any transformers cache; also as `cache`, its name since transformers 5.24.
            use_cache: fill a cache. Default: the config's `use_cache`, unless a row holds several documents.
                A training step then fills none, and returns an `UnfilledCache`: see `new_cache`.
            output_hidden_states: also return the input of each layer and the last output, [batch, seq, H]
                each. They are part of the graph, so `retain_grad` works on them.
            output_attentions: not supported.
            others: `pixel_values`, `input_features` and the other inputs of the family's processor;
                `cu_seq_lens_q`, or `cu_seqlens`, [n + 1], the bounds of packed documents, and `parents` [n],
                the documents that these continue (layers/sequences/tree.py); `output_router_logits`, by
                default the config's: also return the router logits of each MoE layer, [batch * seq, E],
                zero at padding; `logits_to_keep`, ignored here; unused keywords at their default values.

        Raises:
            DataError: shapes that do not fit, ids outside the vocabulary, positions beyond the rotary tables.
            ValueError: attention weights are requested, router logits of a model without experts, or a cache
                in training under gradient checkpointing.
            TypeError: an unsupported keyword, or training with hidden states in float16.
        """
        text = self.config.get_text_config()
        if text.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions=True: attention weights are never computed here; use transformers' own "
                "model"
            )
        with_routers = self.wants_router_logits(others.pop("output_router_logits", None))
        others.pop("logits_to_keep", None)  # TRL's distillation also passes it to the base model
        past_key_values = given_cache(past_key_values, others)
        sequences, checks = others.pop("sequences", None), others.pop("checks", None)
        groups = groups_of_step(self) if checks is None else checks.groups
        device = exchange_device(self.embed_tokens)
        with refusing_together(groups, device):
            if sequences is None:
                width = self.spec.hidden_size
                shape, _ = batch_shape(input_ids, inputs_embeds, width, ids_needed=self.needs_ids)
                sequences, past_key_values = self.begin(
                    shape, attention_mask, position_ids, past_key_values, use_cache, others
                )
            media = self._media(sequences, others)
            _refuse_others(others)
            ids = input_ids if self.needs_ids or media != NO_MEDIA else None
            self.prepare_call(sequences, ids, media)
        sequences.notes.router_logits.asked_for = with_routers
        if checks is None:
            checks = CallChecks(input_ids, None, self.spec.num_ids, groups=groups, device=device)
        self.begin_checks(checks, media)
        if inputs_embeds is None:
            assert input_ids is not None
            # With its batch and padding, as hooks on the embedding (NEFTune) expect it.
            inputs_embeds = self.embed_ids(input_ids.clamp(0, self.spec.num_ids - 1))
        refuse_float16_training(self, inputs_embeds)
        if output_hidden_states is None:
            output_hidden_states = text.output_hidden_states
        inner: list[Tensor] | None = [] if output_hidden_states else None
        last = sequences.unpack(self.run_layers(sequences, ids, inputs_embeds, inner, media))
        checks.finish()
        if isinstance(sequences.cache, TransformersCache):
            sequences.cache.keep()
        output: dict[str, Any] = {
            "last_hidden_state": last,
            CACHE: past_key_values,
            "hidden_states": None if inner is None else (*inner, last),
        }
        routers = sequences.notes.router_logits.take()
        if not with_routers:
            return BaseModelOutputWithPast(**output)
        # Not divided into rows, as in transformers.
        padded = tuple(sequences.unpack(logits).flatten(0, 1) for logits in routers)
        return MoeModelOutputWithPast(**output, router_logits=padded)

    def _media(self, sequences: Sequences, others: dict[str, Any]) -> Media:
        """Take images and sounds out of a call's keywords.

        Raises:
            DataError: an input is missing or does not fit, or the cache holds tokens already.
        """
        media = self.take_media(others)
        view = sequences.cache
        if not self.encoders or not (isinstance(view, TransformersCache) and view.seen):
            return media
        if media.pictures is not None or media.sounds is not None:
            kind = "images" if media.pictures is not None else "sounds"
            raise DataError(
                f"got {kind} with a cache that already holds {view.seen} tokens a row: pass the whole "
                f"conversation, with all of its {kind}, and a new cache"
            )
        return NO_MEDIA  # generated tokens are text

    def wants_router_logits(self, asked: bool | None) -> bool:
        """Return the argument, or else the config's current value, which TRL's trainers change."""
        if asked is None:
            asked = getattr(self.config.get_text_config(), "output_router_logits", False)
        if asked and self._experts() is None:
            raise ValueError(f"output_router_logits={asked}: no layer of this model has experts")
        return bool(asked)

    def router_loss(self, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (load balancing loss, its weighted contribution to the model's loss) from the logits [T, E]
        of each MoE layer and the config's current coefficient.
        """
        experts = self._experts()
        assert experts is not None
        balance = load_balancing_loss(logits, experts.experts_per_token)
        return balance, getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * balance

    def _experts(self) -> MoESpec | None:
        return next((block.mlp for block in self.spec.blocks if isinstance(block.mlp, MoESpec)), None)

    def begin(
        self,
        shape: tuple[int, int],
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        use_cache: bool | None,
        others: dict[str, Any],
        with_labels: bool = False,
    ) -> tuple[Sequences, Cache | None]:
        """Return the documents of a call, with its view of the cache, and the cache that the call returns."""
        if self.spec.is_bidirectional:
            if use_cache or past_key_values is not None:
                raise DataError(
                    "this model's attention is bidirectional, so new tokens change the keys and values of "
                    "earlier ones: leave out past_key_values and use_cache"
                )
            return self.sequences(shape, attention_mask, position_ids, None, others), None
        if past_key_values is None:
            new = self.new_cache(shape, attention_mask, position_ids, use_cache, others, with_labels)
            past_key_values, filled = new, None if isinstance(new, UnfilledCache) else new
        else:
            filled = past_key_values
        return self.sequences(shape, attention_mask, position_ids, filled, others), past_key_values

    def sequences(
        self,
        shape: tuple[int, int],
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        others: dict[str, Any],
    ) -> Sequences:
        """Return the documents of a call and its view of the cache."""
        device = exchange_device(self.embed_tokens)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must be [batch, seq], 0 at padding; found the shape "
                f"{tuple(attention_mask.shape)}. Pass position_ids or cu_seq_lens_q for packed documents."
            )
        if past_key_values is None:
            bounds, parents = others.pop("cu_seq_lens_q", None), others.pop("parents", None)
            bounds = others.pop("cu_seqlens", None) if bounds is None else bounds
            if bounds is not None or position_ids is not None:
                for name in ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
                    others.pop(name, None)  # redundant descriptions of the same documents
            return Sequences.from_call(shape, device, attention_mask, position_ids, bounds, parents)
        seen = tokens_in(past_key_values)
        if torch.is_grad_enabled() and self.training and self.is_gradient_checkpointing:
            raise ValueError(
                "gradient checkpointing cannot recompute layers that fill a cache: disable checkpointing, or "
                "leave out use_cache and past_key_values"
            )
        if seen == 0 and self._are_documents(shape, attention_mask, position_ids):
            raise DataError(_NO_CACHE)
        if attention_mask is not None and (
            len(attention_mask) != shape[0] or attention_mask.shape[1] < seen + shape[1]
        ):
            raise DataError(
                f"attention_mask must cover all tokens so far, [{shape[0]}, {seen + shape[1]}], those in the "
                f"cache included; found {list(attention_mask.shape)}"
            )
        if attention_mask is not None and bool((attention_mask != 0).all()):
            attention_mask = None
        if attention_mask is not None and seen == 0:
            sequences = Sequences.from_call(shape, device, attention_mask[:, : shape[1]], position_ids)
        else:
            given, axes = (None, None) if position_ids is None else split_axes(position_ids.to(device), shape)
            positions = given
            if positions is None:
                positions = torch.arange(seen, seen + shape[1], device=device).repeat(shape[0])
                if attention_mask is not None and not self.spec.padding_has_positions:
                    counts = attention_mask.to(device).cumsum(1) - 1
                    positions = counts[:, seen : seen + shape[1]].clamp(min=0).flatten()
            end = int((positions if axes is None else axes).max()) + 1
            sequences = Sequences(
                Visibility(Documents.of_rows(shape, device)),
                Positions(
                    *(positions, end, axes),
                    given=position_ids is not None,
                    counted=given is not None or axes is None,
                ),
            )
        sequences.cache = view = TransformersCache(past_key_values, sequences.documents, attention_mask)
        if view.shift is not None and not sequences.positions.given:
            # With images, which take fewer positions than tokens.
            ids = (torch.arange(seen, view.longest, device=device) + view.shift[:, None]).flatten()
            sequences.positions = Positions(ids, view.longest + view.ahead)
        return sequences

    def new_cache(
        self,
        shape: tuple[int, int],
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        use_cache: bool | None,
        others: dict[str, Any],
        with_labels: bool = False,
    ) -> Cache | None:
        """Return the cache that a first call fills.

        It is None for packed documents, since later tokens would attend to all of them. If only the config
        requests a cache, a training step fills none either, because keys and values would outlive the step.
        A call counts as a training step if gradients are enabled and at least two of training mode, labels
        and gradient checkpointing hold. Using the `UnfilledCache` that it returns is an error.

        Raises:
            DataError: `use_cache` is true, and a row holds several documents.
        """
        wanted = use_cache
        if wanted is None:
            wanted = bool(getattr(self.config.get_text_config(), "use_cache", False))  # GPT has none
        if not wanted:
            return None
        packed = any(others.get(name) is not None for name in ("cu_seq_lens_q", "cu_seqlens", "parents"))
        if packed or self._are_documents(shape, attention_mask, position_ids):
            if use_cache:
                raise DataError(_NO_CACHE)
            return None
        signs = self.training, with_labels, self.is_gradient_checkpointing
        if use_cache is None and torch.is_grad_enabled() and sum(signs) > 1:
            return UnfilledCache()
        return DynamicCache(config=self.config)

    def _are_documents(
        self, shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> bool:
        """Return whether position ids show several documents in a row."""
        if attention_mask is not None or position_ids is None:
            return False
        device = exchange_device(self.embed_tokens)
        return Sequences.from_call(shape, device, None, position_ids).documents.cu_seqlens is not None


_NO_CACHE = (
    "position_ids or cu_seqlens say that a row holds several documents, and what follows in a cache would "
    "see all of them: leave past_key_values out, and use_cache too. If they are one document with positions "
    "that jump, give an attention_mask of ones."
)


def spec_of(architecture: Architecture, config: Any, ignore_config_keys: Collection[str] = ()) -> ModelSpec:
    """Return the spec of a transformers config.

    Raises:
        ConfigError: the config has a feature that the family does not support.
    """
    raw = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    read = HFConfig.load(raw, ignore_config_keys=tuple(ignore_config_keys))
    read.complete = True
    return architecture.spec(read)


def _refuse_others(others: dict[str, Any]) -> None:
    """Refuse the keywords of transformers' models that we do not support."""
    others.pop("return_dict", None)
    refuse_unknown(others)
