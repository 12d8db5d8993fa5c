"""A causal language model: embeddings, blocks, a final norm and a head.

input_ids [batch, seq] -> tokens [T] -> hidden [T, H] -> blocks -> norm -> head -> loss, or logits [batch,
seq, V]
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.convert.weight_map import Expr, Ref
from liger_models.layers.activation_memory import ActivationMemory, keep_recipes, parse_levels, recompute
from liger_models.layers.attention import Attention
from liger_models.layers.attention_backends import BACKENDS, AttentionBackend
from liger_models.layers.blocks import BLOCKS, BlockNames, add_and_norm
from liger_models.layers.cache import KVCache
from liger_models.layers.head import LMHead
from liger_models.layers.host import HostCopy
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.output import CausalLMOutput
from liger_models.layers.sequences import IGNORE_INDEX, Sequences
from liger_models.layers.spec import ModelSpec

_INTEGERS = (torch.int64, torch.int32)  # what an embedding and the kernels take


@dataclass(frozen=True)
class ModelNames:
    """What a checkpoint calls the parts of a model. `layer` holds `{i}`, the layer's number."""

    embed_tokens: str = "model.embed_tokens"
    layer: str = "model.layers.{i}."
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    block: BlockNames = field(default_factory=BlockNames)


class CausalLM(nn.Module):
    """Embeddings, blocks, a final norm and a head.

    Args:
        spec: what the model is made of.
        names: what its checkpoint calls the parts.
        attention: the attention backend, see layers/attention_backends.py.
        activation_memory: what is kept for the backward pass, one name for all layers or one a layer, see
            layers/activation_memory.py.
    """

    def __init__(
        self,
        spec: ModelSpec,
        names: ModelNames | None = None,
        attention: AttentionBackend = "auto",
        activation_memory: str | Sequence[str] = "lean",
    ):
        super().__init__()
        if attention not in BACKENDS:
            raise ValueError(f"unknown attention backend {attention!r}; choose one of {', '.join(BACKENDS)}")
        self.spec, self.names = spec, names or ModelNames()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        )
        self.norm = LigerRMSNorm.from_spec(spec.hidden_size, spec.norm)
        self.lm_head = LMHead(spec.hidden_size, spec.vocab_size)
        self.tie_weights()
        if spec.tie_word_embeddings:
            self.register_state_dict_post_hook(_drop_tied_head)
            self.register_load_state_dict_pre_hook(_restore_tied_head)
        self.set_activation_memory(activation_memory)

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
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
            num_items_in_batch: the loss is the sum over labels divided by this count, not by their own (exact
                gradient accumulation).
            logits_to_keep: make logits of the last so many positions only, or of these positions; 0: of all.
            return_logits: make logits beside the loss. Default: only if there are no labels.

        Returns:
            A dict with `loss` (float32 scalar) and `logits` ([batch, seq, V], zero at padding) as asked.

        Raises:
            DataError: shapes that do not fit, ids or labels outside the vocabulary, no label in the batch,
                positions beyond the rotary tables, a num_items_in_batch that is not above 0.
        """
        shape, device = self._batch_shape(input_ids, inputs_embeds)
        sequences = Sequences.from_call(shape, device, attention_mask, position_ids, cu_seqlens)
        targets = self._targets(sequences, labels, shift_labels)
        checks = self._begin_checks(input_ids, targets)
        hidden = self.hidden_states(sequences, input_ids, inputs_embeds)
        num_valid = self._finish_checks(checks, targets is not None, num_items_in_batch)

        output: dict[str, Tensor] = {}
        if targets is not None:
            output["loss"] = self.lm_head(hidden, targets, num_valid=num_valid, num_items=num_items_in_batch)
        if return_logits or (return_logits is None and targets is None):
            output["logits"] = self._logits(hidden, sequences, logits_to_keep)
        return CausalLMOutput(**output)

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

        lean = torch.is_grad_enabled() and not torch.compiler.is_compiling()
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

    def check_ids(self, input_ids: Tensor) -> None:
        """Check [batch, seq] ids as `forward` does, now and not beside the work (it waits for the device).

        Raises:
            DataError: they are not integers of this shape, or one is outside the vocabulary.
        """
        self._batch_shape(input_ids, None)
        self._finish_checks(self._begin_checks(input_ids, None), False, None)

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Room for the keys and values of `batch` sequences of up to `max_length` tokens, for generation."""
        sizes = [
            (block.attention.num_key_value_heads, block.attention.head_dim) for block in self.spec.blocks
        ]
        weight = self.embed_tokens.weight
        return KVCache(sizes, batch, max_length, weight.device, weight.dtype)

    # -- parameters
    # --------------------------------------------------------------------------------------------

    def weight_map(self) -> dict[str, Expr]:
        """Every native parameter as an expression over the checkpoint's tensors, in the model's order."""
        names, vocab = self.names, (self.spec.vocab_size, self.spec.hidden_size)
        expressions: dict[str, Expr] = {"embed_tokens.weight": Ref(f"{names.embed_tokens}.weight", vocab)}
        for i, layer in enumerate(self.layers):
            expressions |= layer.weight_map(  # type: ignore[operator]  # a ModuleList forgets its class
                f"layers.{i}.", names.layer.format(i=i), names.block
            )
        expressions |= self.norm.weight_map("norm.", names.norm)
        if not self.spec.tie_word_embeddings:
            expressions["lm_head.weight"] = Ref(f"{names.lm_head}.weight", vocab)
        return expressions

    def tie_weights(self) -> None:
        """Let the head use the embedding's parameter, if the spec says so."""
        if self.spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def materialize(self, device: torch.device | str | None, dtype: torch.dtype) -> None:
        """Give parameters that were made on the meta device uninitialised memory on a real one."""
        made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
        for module in self.modules():
            for name, old in module.named_parameters(recurse=False):
                if old not in made:
                    memory = torch.empty(old.shape, dtype=dtype, device=device)
                    made[old] = nn.Parameter(memory, requires_grad=old.requires_grad)
                setattr(module, name, made[old])

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Fresh weights in place: matrices and sinks from a normal distribution of `initializer_range`, norms
        one, biases zero.
        """
        for module in self.modules():
            if isinstance(module, LigerRMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, self.spec.initializer_range, generator=generator)
                bias = getattr(module, "bias", None)
                if bias is not None:
                    bias.zero_()
            elif isinstance(module, Attention) and module.sinks is not None:
                module.sinks.normal_(0.0, self.spec.initializer_range, generator=generator)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters, a tied head counted once."""
        excluded = {id(self.embed_tokens.weight)} if exclude_embeddings else set()
        counted = (p for p in self.parameters() if p.requires_grad or not only_trainable)
        return sum(p.numel() for p in counted if id(p) not in excluded)

    # -- activation memory
    # -------------------------------------------------------------------------------------

    @property
    def activation_memory(self) -> tuple[ActivationMemory, ...]:
        """The level of each layer."""
        return tuple(layer.activation_memory for layer in self.layers)  # type: ignore[misc]

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Choose what is kept for the backward pass: one level for all layers, or one a layer.

        Raises:
            ValueError: an unknown level, or the wrong number of them.
        """
        levels = levels if isinstance(levels, str) else tuple(levels)
        for layer, level in zip(self.layers, parse_levels(levels, len(self.layers)), strict=True):
            layer.activation_memory = level  # type: ignore[assignment]
        self._levels_before_checkpointing = self.activation_memory

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        """Level `checkpoint` for every layer. The keyword is accepted for trainers that pass it; it changes
        nothing.
        """
        before = self._levels_before_checkpointing
        self.set_activation_memory("checkpoint")
        self._levels_before_checkpointing = before

    def gradient_checkpointing_disable(self) -> None:
        """Back to the levels that were chosen before."""
        self.set_activation_memory(self._levels_before_checkpointing)

    # -- the call's parts
    # --------------------------------------------------------------------------------------

    def _batch_shape(
        self, input_ids: Tensor | None, embeds: Tensor | None
    ) -> tuple[tuple[int, int], torch.device]:
        if (input_ids is None) == (embeds is None):
            raise DataError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            if input_ids.dim() != 2 or input_ids.dtype not in _INTEGERS:
                raise DataError(
                    f"input_ids must be integers, int64 or int32, of shape [batch, seq], found "
                    f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
                )
            given = input_ids
        else:
            assert embeds is not None
            if embeds.dim() != 3 or embeds.shape[-1] != self.spec.hidden_size:
                raise DataError(
                    f"inputs_embeds must have the shape [batch, seq, {self.spec.hidden_size}], "
                    f"found {tuple(embeds.shape)}"
                )
            given = embeds
        if 0 in given.shape[:2]:
            raise DataError(f"the batch holds no token: its shape is {tuple(given.shape)}")
        return (given.shape[0], given.shape[1]), given.device

    def _targets(
        self, sequences: Sequences, labels: Tensor | None, shift_labels: Tensor | None
    ) -> Tensor | None:
        """What every token shall predict, [T], or None."""
        if labels is not None and shift_labels is not None:
            raise DataError("give either labels or shift_labels")
        given = labels if labels is not None else shift_labels
        if given is None:
            return None
        if tuple(given.shape) != sequences.shape or given.dtype not in _INTEGERS:
            raise DataError(
                f"labels must be integers, int64 or int32, of the shape of the tokens, {sequences.shape}; "
                f"found {given.dtype} of shape {tuple(given.shape)}"
            )
        packed = sequences.pack(given)
        return sequences.next_labels(packed) if labels is not None else packed

    def _begin_checks(self, input_ids: Tensor | None, targets: Tensor | None) -> HostCopy | None:
        """Start counting what `_finish_checks` will look at, without waiting for the device."""
        if torch.compiler.is_compiling():
            return None
        ids = (
            [torch.zeros(2, dtype=torch.long)]
            if input_ids is None
            else [torch.stack(input_ids.aminmax()).long()]
        )
        device = ids[0].device if targets is None else targets.device
        if targets is None:
            counts = torch.zeros(3, dtype=torch.long, device=device)
        else:
            valid = targets != IGNORE_INDEX
            seen = torch.where(valid, targets, 0)
            counts = torch.stack([valid.sum(), *seen.aminmax()]).long()
        return HostCopy(torch.cat([ids[0].to(device), counts]))

    def _finish_checks(
        self, checks: HostCopy | None, with_labels: bool, num_items: Tensor | int | None
    ) -> int | None:
        """Raise what the checks found; else the number of labels that count."""
        if isinstance(num_items, int | float) and not num_items > 0:
            raise DataError(f"num_items_in_batch must be above 0, found {num_items}")
        if checks is None:
            return None
        lowest_id, highest_id, num_valid, lowest_label, highest_label = checks.tolist()
        vocab = self.spec.vocab_size
        for what, low, high in (("id", lowest_id, highest_id), ("label", lowest_label, highest_label)):
            if low < 0 or high >= vocab:
                raise DataError(
                    f"found the {what} {low if low < 0 else high}, which is outside the vocabulary of "
                    f"{vocab}: expected 0 to {vocab - 1}{' or -100' if what == 'label' else ''}. Does the "
                    "tokenizer belong to this model?"
                )
        if with_labels and num_valid == 0 and num_items is None:
            raise DataError(
                "no token of the batch has a label (all are -100, padding, or the first of a document), so "
                "the mean loss is undefined; drop the batch, or pass num_items_in_batch"
            )
        return num_valid

    def _logits(self, hidden: Tensor, sequences: Sequences, logits_to_keep: int | Tensor) -> Tensor:
        if isinstance(logits_to_keep, int) and logits_to_keep == 0:
            return sequences.unpack(self.lm_head(hidden))
        rows = sequences.unpack(hidden)
        rows = rows[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else rows[:, logits_to_keep]
        return self.lm_head(rows)


def _drop_tied_head(
    model: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: object
) -> None:
    """A tied parameter has one entry: sharding and safetensors refuse two."""
    state_dict.pop(f"{prefix}lm_head.weight", None)


def _restore_tied_head(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
    embedding = state_dict.get(f"{prefix}embed_tokens.weight")
    if embedding is not None:
        state_dict.setdefault(f"{prefix}lm_head.weight", embedding)
