"""Base class of blocks, and the function that runs one.

A block takes and returns the hidden states as two tensors, `x` and `residual`, whose sum is the residual
stream: the sum is computed inside the next norm, in one kernel. `residual` is None before the first block and
after blocks that change the sum itself. Other tensors that layers exchange, such as keys and values, are
further arguments and results, so that sharding frameworks and recomputation handle them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.blocks.mixers import MIXER_NAMES, MIXERS, Mixer
from liger_models.layers.experts.modal_experts import make_experts
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.parts.mlp import GatedMLP, PlainMLP, make_mlp
from liger_models.layers.parts.norm import Norm
from liger_models.layers.projections.clipped_linear import ClippedLinear
from liger_models.layers.projections.linear import has_hooks, saved_input_bytes, unwrapped
from liger_models.layers.recompute.activation_memory import (
    ON_HOST,
    RERUN,
    ActivationMemory,
    keep_recipes,
    recompute,
)
from liger_models.layers.recompute.offload import Offload, Results
from liger_models.layers.recompute.saved_on_host import SavedOnHost
from liger_models.layers.recurrent.ssd import SSD
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    CrossAttentionSpec,
    GatedNormSpec,
    LatentAttentionSpec,
    MoESpec,
    NormSpec,
    RecurrentSpec,
    SharedAttentionSpec,
)

Streams = tuple[Tensor, Tensor | None]


def keys_and_values(layer: int) -> tuple[str, str]:
    """Name of a layer's keys and values, for later layers that read them."""
    return f"keys.{layer}", f"values.{layer}"


def latents(layer: int) -> tuple[str, str]:
    """Name of a layer's latents and rotated parts of keys, for later layers that read them."""
    return f"latents.{layer}", f"rotated.{layer}"


IMAGES = "images"
"""Name of image features, for layers that read them."""


DISTANCES = "distances"
"""Name of a table of biases by distance, which the layers of an encoder share."""


EMBEDDINGS = "embeddings"
"""Name of the first layer's input, for layers that read it again."""


IDS = "ids"
"""Name of the token ids, for layers that look something up by them."""


def own_input(layer: int) -> str:
    """Name of a layer's own input."""
    return f"input.{layer}"


class Block(nn.Module):
    """Mixers and an MLP, built from their specs. Subclasses define how they are connected.

    Args:
        hidden_size: the width H of the hidden states.
        spec: the layer's parts.
        layer: its index in the model.
        attention: the attention backend.

    Attributes:
        reads: names of the tensors that the layer reads in addition to the residual stream.
        makes: names of the tensors that it returns for later layers: keys and values, if a layer reads them.
        mlp: the MLP or the experts; a layer without them has no such attribute.
        norms_after_branches: number of norms whose input is the output of a branch.

    Raises:
        ValueError: parts that the topology does not support, or needs and does not have.
    """

    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    mlp: GatedMLP | PlainMLP | MixtureOfExperts
    supports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("mixer", "mlp")
    norms_after_branches: int = 0

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.hidden_size, self.spec = hidden_size, spec
        more = {
            "experts": spec.experts,
            "per_layer_input": spec.per_layer_input,
            "keys of another layer": isinstance(spec.mixer, SharedAttentionSpec) or None,
            "latents of another layer": getattr(spec.mixer, "latents_of", None) is not None,
            "features of images": isinstance(spec.mixer, CrossAttentionSpec) or None,
            "second_mixer": spec.second_mixer,
            "branch_scales": set(spec.branch_scales) != {1.0},
            "stream_scales": set(spec.stream_scales) != {1.0},
            "dropout": spec.dropout > 0,
            "branch_norm": spec.branch_norm,
            "shared": spec.shared,
            "streams": spec.streams,
            "bound": spec.bound,
            "ngrams": spec.ngrams,
            "laurel_rank": spec.laurel_rank,
            "norms with gates": isinstance(spec.norm, GatedNormSpec),
            "plain_mlp_norm": spec.plain_mlp_norm,
        }
        if unsupported := [name for name, part in more.items() if part and name not in self.supports]:
            raise ValueError(f"layers of topology {spec.topology!r} do not support {unsupported}")
        if missing := [name for name in self.needs if getattr(spec, name) is None]:
            raise ValueError(f"layers of topology {spec.topology!r} need {missing}, found None")
        own = spec if spec.shared is None else replace(spec, second_mixer=None, mlp=None)
        self.mixer_names = tuple(MIXER_NAMES.get(type(mixer), "self_attn") for mixer in own.mixers)
        for name, mixer in zip(self.mixer_names, own.mixers, strict=True):
            setattr(self, name, MIXERS[type(mixer)](hidden_size, mixer, layer, attention))
        if isinstance(own.mlp, MoESpec):
            self.mlp = make_experts(hidden_size, own.mlp)
        elif own.mlp is not None:
            self.mlp = make_mlp(hidden_size, own.mlp)
        # A module, so that tools that disable dropout find it (TRL does for DPO).
        self.branch_dropout = nn.Dropout(spec.dropout) if spec.dropout else None
        self.activation_memory: ActivationMemory = "lean"

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The token mixers: attention or a recurrent layer, or both, or none."""
        return tuple(getattr(self, name) for name in self.mixer_names)

    @property
    def borrowed(self) -> tuple[nn.Module, ...]:
        """Modules of the model whose weights this layer shares with others: none."""
        return ()

    @property
    def token_mixer(self) -> Mixer:
        """The only token mixer, or the first of two. (Named apart from modules of other libraries.)"""
        return self.mixers[0]

    @property
    def float32_stream(self) -> bool:
        """Whether the residual stream is in float32."""
        return isinstance(self.spec.norm, NormSpec) and self.spec.norm.float32_stream

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Empty cache tensors of attention, and states of a recurrent mixer; () for mixers that the layer
        does not have.
        """
        tokens: tuple[Tensor, ...] = ()
        states: tuple[Tensor, ...] = ()
        for mixer, spec in zip(self.mixers, self.spec.mixers, strict=True):
            new = mixer.new_cache(batch, max_length, device, dtype)
            tokens, states = (tokens, new) if isinstance(spec, RecurrentSpec) else (new, states)
        return tokens, states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map x, residual [T, H], sequences and the tensors in `reads` to two tensors [T, H] whose sum is the
        residual stream after the layer, or to one and None; followed by the tensors in `makes`.
        """
        raise NotImplementedError

    def set_activation_memory(self, level: ActivationMemory) -> None:
        """Choose what is kept for the backward pass, in all parts that support a choice."""
        parts: Iterable[Any] = self.modules()
        for part in parts:
            if hasattr(part, "activation_memory"):
                part.activation_memory = "lean" if level == ON_HOST else level
        self.activation_memory = level

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token that the layer keeps for its backward pass on a GPU.

        Excludes temporary memory of the backward pass, which is needed for one layer at a time.
        """
        if level in RERUN:
            own = 0 if level == "offload" else self.stream_bytes(itemsize)
            return own + self._noted_bytes(itemsize) + self._shared_kv_bytes(itemsize)
        parts: Iterable[Any] = self.children()
        kept = (part.activation_bytes(level, itemsize) for part in parts if hasattr(part, "activation_bytes"))
        masks = 0 if self.branch_dropout is None else 2 * self.hidden_size  # of one byte per element
        inputs = itemsize * self.hidden_size * self._branch_inputs("lean")
        kept_by_parts = sum(kept) + inputs + self._clip_bytes(level, itemsize) + masks
        return kept_by_parts + (level == "all") * self.norm_output_bytes(itemsize)

    def _clip_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token that clips keep, but for those of projections in MLPs that run again."""
        again = (GatedMLP, PlainMLP) if level == "mlp" else ()
        children = [child for child in self.children() if not isinstance(child, again)]
        parts = (part for child in children for part in child.modules())
        return sum(part.clip_bytes(itemsize) for part in parts if isinstance(part, ClippedLinear))

    def stream_bytes(self, itemsize: int) -> int:
        """Bytes per token of the residual stream."""
        return (max(4, itemsize) if self.float32_stream else itemsize) * self.hidden_size

    def _branch_inputs(self, level: ActivationMemory) -> int:
        """Number of tensors [T, H] that the branches keep of their inputs, in addition to the norms' own
        inputs.
        """
        raise NotImplementedError

    def norm_outputs(self) -> int:
        """Number of norm outputs [T, H] that only the level `all` keeps."""
        return self._branch_inputs("all") - self._branch_inputs("lean")

    def norm_output_bytes(self, itemsize: int) -> int:
        """Bytes per token of these, or of their copies in float8 if only products in float8 read them."""
        linears = (part for part in self.modules() if isinstance(part, nn.Linear))
        saved = [
            saved_input_bytes(part, itemsize) for part in linears if part.in_features == self.hidden_size
        ]
        each = itemsize * self.hidden_size
        return self.norm_outputs() * (max(saved, default=each) if hasattr(self, "mlp") else each)

    def _noted_bytes(self, itemsize: int) -> int:
        """Bytes of the router's choice, reused by recomputation, and of its logits if the loss reads them."""
        kept = 0
        for part in self.children():
            if isinstance(part, MixtureOfExperts):
                spec = part.spec
                logits = spec.num_logits * (4 if spec.float32_router else itemsize)
                kept += unwrapped(part.router).decision_bytes + (logits if spec.has_router_loss else 0)
        return kept

    def _shared_kv_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values, or of the latents, that later layers read."""
        mixer = self.spec.mixer
        if self.makes and isinstance(mixer, LatentAttentionSpec):
            return itemsize * (mixer.kv_lora_rank + mixer.qk_rope_head_dim)
        if not self.makes or not isinstance(mixer, AttentionSpec):
            return 0
        return itemsize * (mixer.kv_size + mixer.v_size)

    def _dropped(self, x: Tensor) -> Tensor:
        """Drop elements of a branch's output in training."""
        return x if self.branch_dropout is None else self.branch_dropout(x)

    def _branch_of(self, part: Any, x: Tensor, sequences: Sequences) -> Tensor:
        """The output of a mixer or an MLP, scaled; in its last product, if it has no bias, and if no hooks
        see the part's output, which is unscaled in transformers.
        """
        scale = self.spec.residual_scale
        if scale != 1.0 and type(part) in _WITH_SCALES and not has_hooks(part):
            scaled: Tensor = part(x, sequences, scale=scale)
            return scaled
        return self._scaled(part(x, sequences))

    def _scaled(self, x: Tensor) -> Tensor:
        """Scale a branch's output before it is added to the residual stream."""
        return x if self.spec.residual_scale == 1.0 else x * self.spec.residual_scale


# Parts that take a factor of their output.
_WITH_SCALES = (Attention, SSD, GatedMLP, PlainMLP)


def run_block(
    layer: Block,
    x: Tensor,
    residual: Tensor | None,
    sequences: Sequences,
    *read: Tensor,
    offload: Offload,
) -> tuple[Any, ...]:
    """Run a layer, keeping tensors for the backward pass according to its activation memory level. `offload`
    belongs to the pass.
    """
    offload.settle()
    saved = None
    if not torch.is_grad_enabled():
        return layer(x, residual, sequences, *read)
    # Recomputing a layer that fills a cache would fill it twice.
    if layer.activation_memory in RERUN and sequences.cache is None:
        # The sum is taken before the layer, so that one tensor is kept instead of two.
        streams = joined(x, residual, layer.float32_stream)
        if layer.activation_memory != "offload":
            out = recompute(layer, *streams, sequences, *read)
        else:
            results = Results()
            own = sequences.running(results) if offload.keeps_results else sequences
            out = offload.recompute(layer, *streams, own, *read, results=results)
    elif layer.activation_memory == ON_HOST and not torch.compiler.is_compiling():
        tables = (table for pair in sequences.positions.rotary.values() for table in pair)
        saved = SavedOnHost(layer, [*read, *tables])
        with saved.saving():
            out = layer(x, residual, sequences, *read)
    else:
        with keep_recipes() if layer.activation_memory != "all" else nullcontext():
            out = layer(x, residual, sequences, *read)
    offload.ran(out[0], saved)
    return out


def joined(x: Tensor, residual: Tensor | None, float32_stream: bool) -> Streams:
    """Return the residual stream as its sum and None; a stream in float32 as its sum and zeros of the
    branches' dtype, which take no memory.
    """
    if residual is None:
        return x, None
    if not float32_stream or x.dtype == residual.dtype == torch.float32:
        return x + residual, None
    branch = min(x, residual, key=lambda term: term.element_size())
    total = x.to(torch.promote_types(x.dtype, torch.float32)) + residual
    return total, branch.new_zeros(()).expand_as(total)


def add_and_norm(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual); the sum is x if residual is None."""
    return (norm(x), x) if residual is None else norm(x, residual)
