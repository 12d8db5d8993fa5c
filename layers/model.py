"""A causal language model: embeddings, blocks, a final norm and a head.

input_ids [batch, seq] -> tokens [T] -> hidden [T, H] -> blocks -> norm -> head -> loss, or logits [batch,
seq, V]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_models.layers.activation_memory import ActivationMemory, keep_recipes, parse_levels, recompute
from liger_models.layers.attention_backends import BACKENDS, AttentionBackend
from liger_models.layers.blocks import BLOCKS, Block, add_and_norm
from liger_models.layers.cache import KVCache
from liger_models.layers.call_checks import CallChecks, batch_shape, refuse_unknown, targets_of
from liger_models.layers.eager import not_compiled
from liger_models.layers.embedding import TokenEmbedding
from liger_models.layers.head import LMHead, LogitForm, loss_of_head
from liger_models.layers.model_output import CausalLMOutput
from liger_models.layers.model_parameters import ModelParameters, drop_tied_head, restore_tied_head
from liger_models.layers.norm import make_norm
from liger_models.layers.router_loss import router_loss
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import ModelSpec


class CausalLM(ModelParameters):
    """Embeddings, blocks, a final norm and a head.

    Args:
        spec: what the model is made of.
        attention: the attention backend, see layers/attention_backends.py.
        activation_memory: what is kept for the backward pass, one name for all layers or one a layer, see
            layers/activation_memory.py.
    """

    def __init__(
        self,
        spec: ModelSpec,
        attention: AttentionBackend = "auto",
        activation_memory: str | Sequence[str] = "lean",
    ):
        super().__init__()
        if attention not in BACKENDS:
            raise ValueError(f"unknown attention backend {attention!r}; choose one of {', '.join(BACKENDS)}")
        self.spec = spec
        self.embed_tokens = TokenEmbedding(
            spec.vocab_size, spec.hidden_size, spec.embed_scale, spec.padding_idx
        )
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        self.norm = make_norm(spec.hidden_size, spec.norm)
        self.lm_head = LMHead(spec.hidden_size, spec.vocab_size, spec.head_bias)
        self.logit_form = LogitForm(spec.logit_scale, spec.logit_softcap)
        self.tie_weights()
        if spec.tie_word_embeddings:
            self.register_state_dict_post_hook(drop_tied_head)
            self.register_load_state_dict_pre_hook(restore_tied_head)
            # With assign=True each module gets a parameter of its own.
            self.register_load_state_dict_post_hook(lambda model, keys: model.tie_weights())
        self.note_canonical_forms()
        self.set_activation_memory(activation_memory)

    @not_compiled
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        """Loss with labels, logits without.

        Args:
            input_ids: [batch, seq] integers; or `inputs_embeds` [batch, seq, H] in their place.
            labels: [batch, seq], aligned with the input and shifted in here; -100, padding, and the first
                token of a document do not count.
            attention_mask: [batch, seq], 0 at padding.
            position_ids: [batch, seq]; the default counts from 0 in every row, or in every document of
                `cu_seqlens`.
            cu_seqlens: [n + 1] integers, the boundaries of packed documents in the flattened batch: documents
                neither see nor predict one another. On the CPU it costs no synchronisation.
            shift_labels: [batch, seq], already shifted: the label of position t is what position t shall
                predict.
                (Not in the signature: trainers take any parameter with "label" in its name for one that every
                batch must have.)
            num_items_in_batch: the loss is the sum over labels divided by this count, not by their own (exact
                gradient accumulation).
            logits_to_keep: make logits of the last so many positions only, or of these positions; 0: of all.
            return_logits: make logits beside the loss. Default: only if there are no labels.
            others: keywords of other libraries' models are taken where they ask for nothing: None, False, and
                return_dict=True.

        Returns:
            A dict with `loss` (float32 scalar) and `logits` ([batch, seq, V], zero at padding) as asked.

        Raises:
            DataError: shapes that do not fit, ids or labels outside the vocabulary, no label in the batch,
                positions beyond the rotary tables, a num_items_in_batch that is not above 0.
            TypeError: a keyword that asks for what is not there.
        """
        shift_labels = others.pop("shift_labels", None)
        refuse_unknown(others)
        shape, device = batch_shape(input_ids, inputs_embeds, self.spec.hidden_size)
        sequences = Sequences.from_call(shape, device, attention_mask, position_ids, cu_seqlens)
        targets = targets_of(sequences, labels, shift_labels)
        checks = CallChecks(input_ids, targets, self.spec.vocab_size, num_items_in_batch)
        hidden = self.hidden_states(sequences, input_ids, inputs_embeds)
        num_valid = checks.finish()

        output: dict[str, Tensor] = {}
        if targets is not None:
            output["loss"] = loss_of_head(
                self.lm_head, hidden, targets, num_valid, num_items_in_batch, self.logit_form
            )
            if self.spec.router is not None:
                output["loss"] += router_loss(sequences.router_logits.take(), self.spec.router)
        if return_logits or (return_logits is None and targets is None):
            output["logits"] = self._logits(hidden, sequences, logits_to_keep)
        return CausalLMOutput(**output)

    @not_compiled
    def hidden_states(
        self, sequences: Sequences, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """The normalised output of the last block, [T, H], from [batch, seq] ids or [batch, seq, H]
        embeddings.
        """
        sequences.prepare_rotary(self.spec.ropes)
        if inputs_embeds is None:
            assert input_ids is not None
            # An id outside the vocabulary is reported by the checks; until then it must not stop the device.
            ids = sequences.pack(input_ids).clamp(0, self.spec.vocab_size - 1)
            inputs_embeds = self.embed_tokens(ids)
        else:
            inputs_embeds = sequences.pack(inputs_embeds)
        if self.spec.input_scale != 1.0:
            inputs_embeds = inputs_embeds * self.spec.input_scale

        lean = torch.is_grad_enabled()
        x, residual = inputs_embeds, None
        for layer in self.layers:
            if layer.activation_memory == "checkpoint" and torch.is_grad_enabled():
                # The sum is taken in front of the layer, so that one tensor is kept and not two.
                x = x if residual is None else x + residual
                x, residual = recompute(layer, x, None, sequences)
            else:
                with keep_recipes() if lean and layer.activation_memory != "all" else nullcontext():
                    x, residual = layer(x, residual, sequences)
        return add_and_norm(self.norm, x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of hidden states [..., H], as `hidden_states` gives them."""
        return self.logit_form(self.lm_head(hidden))

    def check_ids(self, input_ids: Tensor) -> None:
        """Check [batch, seq] ids as `forward` does, now and not beside the work (it waits for the device).

        Raises:
            DataError: they are not integers of this shape, or one is outside the vocabulary.
        """
        batch_shape(input_ids, None, self.spec.hidden_size)
        CallChecks(input_ids, None, self.spec.vocab_size).finish()

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Room for what the layers remember of `batch` sequences of up to `max_length` tokens, for
        generation.
        """
        weight = self.embed_tokens.weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        room = (batch, max_length, weight.device, dtype)
        return KVCache([layer.self_attn.new_cache(*room) for layer in self.layers], batch, weight.device)

    # -- activation memory
    # -------------------------------------------------------------------------------------

    @property
    def activation_memory(self) -> tuple[ActivationMemory, ...]:
        """The level of each layer."""
        return tuple(layer.activation_memory for layer in self.layers)

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Choose what is kept for the backward pass: one level for all layers, or one a layer.

        Raises:
            ValueError: an unknown level, or the wrong number of them.
        """
        levels = levels if isinstance(levels, str) else tuple(levels)
        for layer, level in zip(self.layers, parse_levels(levels, len(self.layers)), strict=True):
            layer.set_activation_memory(level)
        self._levels_before_checkpointing = self.activation_memory

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Level `checkpoint` for the first of every `every_n_layers` layers, as trainers switch it on.

        `use_reentrant` and `preserve_rng_state` may be anything: the results are those of a run without
        checkpointing whatever they say. `offload` is not done here: run the step under
        `torch.autograd.graph.save_on_cpu`.

        Raises:
            ValueError: another option, which would not be honoured.
        """
        given = set(activation_checkpointing_kwargs or {}) - {"use_reentrant", "preserve_rng_state"}
        if offload:
            given.add("offload")
        if given or every_n_layers < 1:
            found = f"{sorted(given)}" if given else f"every_n_layers={every_n_layers}"
            raise ValueError(
                f"found {found}; of the options of checkpointing only use_reentrant, preserve_rng_state and "
                "every_n_layers (1 or more) are known. To hold activations on the host, run the step under "
                "torch.autograd.graph.save_on_cpu()."
            )
        before = self._levels_before_checkpointing
        levels = [level if i % every_n_layers else "checkpoint" for i, level in enumerate(before)]
        self.set_activation_memory(levels)
        self._levels_before_checkpointing = before

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Back to the levels that were chosen before."""
        self.set_activation_memory(self._levels_before_checkpointing)

    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether some layer runs again as a whole in the backward pass."""
        return "checkpoint" in self.activation_memory

    def _logits(self, hidden: Tensor, sequences: Sequences, logits_to_keep: int | Tensor) -> Tensor:
        if isinstance(logits_to_keep, int) and logits_to_keep == 0:
            return sequences.unpack(self.logits(hidden))
        rows = sequences.unpack(hidden)
        rows = rows[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else rows[:, logits_to_keep]
        return self.logits(rows)
