"""How the parts of a layer are connected. A new topology is a new block, never a flag in an old one.

A block takes and returns the hidden states as two tensors, `x` and `residual`, whose sum is the residual
stream: the sum is taken inside the next norm, in one kernel. `residual` is None in front of the first block,
and behind blocks that change the sum itself. What layers read and hand on beside it, keys and values say, are
further arguments and results, tensors by name: sharding frameworks and recomputation see all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.cross_attention import CrossAttention
from liger_models.layers.attention.latent_attention import LatentAttention
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.attention.shared_attention import SharedAttention
from liger_models.layers.blocks.per_layer_input import PerLayerInput
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.parts.mlp import GatedMLP, PlainMLP, make_mlp
from liger_models.layers.parts.norm import Norm, make_norm
from liger_models.layers.projections.linear import unwrapped
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory, keep_recipes, recompute
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    CrossAttentionSpec,
    LatentAttentionSpec,
    MoESpec,
    SharedAttentionSpec,
)

Streams = tuple[Tensor, Tensor | None]


def keys_and_values(layer: int) -> tuple[str, str]:
    """What the keys and values of a layer are called where later ones read them."""
    return f"keys.{layer}", f"values.{layer}"


IMAGES = "images"
"""What the features of images are called where layers read them."""


def own_input(layer: int) -> str:
    """What the input is called that a layer has for itself."""
    return f"input.{layer}"


class Mixer(Protocol):
    """What a block asks of that which lets a token see others: attention, or a state."""

    def __call__(self, x: Tensor, sequences: Sequences, *handed: Any) -> Any:
        """x [T, H] -> [T, H]."""

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Room for what it remembers of `batch` sequences of up to `max_length` tokens."""

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """What it keeps of a token for the backward pass."""


class Block(nn.Module):
    """A mixer and an MLP, by the types of their specs. What connects them is a subclass.

    Args:
        hidden_size: the width H of the hidden states.
        spec: the layer's parts.
        layer: its place in the model.
        attention: the attention backend.

    Attributes:
        reads: the names of the tensors that the layer reads beside the residual stream.
        makes: and of those that it makes for later layers; of keys and values, if some layer reads them.

    Raises:
        ValueError: parts that the topology has no room for.
    """

    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    has_room_for: tuple[str, ...] = ()
    mixer_name = "self_attn"

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.hidden_size, self.spec = hidden_size, spec
        more = {
            "experts": spec.experts,
            "per_layer_input": spec.per_layer_input,
            "keys of another layer": isinstance(spec.mixer, SharedAttentionSpec) or None,
            "features of images": isinstance(spec.mixer, CrossAttentionSpec) or None,
        }
        if no_room := [name for name, part in more.items() if part and name not in self.has_room_for]:
            raise ValueError(f"layers of topology {spec.topology!r} have no room for {no_room}")
        self.self_attn: Mixer
        setattr(self, self.mixer_name, MIXERS[type(spec.mixer)](hidden_size, spec.mixer, layer, attention))
        self.mlp: GatedMLP | PlainMLP | MixtureOfExperts
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MixtureOfExperts(hidden_size, spec.mlp)
        else:
            self.mlp = make_mlp(hidden_size, spec.mlp)
        self.activation_memory: ActivationMemory = "lean"

    @property
    def mixer(self) -> Mixer:
        """Which lets a token see others."""
        return getattr(self, self.mixer_name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """x, residual [T, H], sequences, and what it `reads` -> two tensors [T, H] whose sum is the residual
        stream behind the layer, or one and None; and what it `makes`.
        """
        raise NotImplementedError

    def set_activation_memory(self, level: ActivationMemory) -> None:
        """Choose what is kept for the backward pass, here and in the parts that have a choice."""
        parts: Iterable[Any] = self.modules()
        for part in parts:
            if hasattr(part, "activation_memory"):
                part.activation_memory = level

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes that the layer keeps for its backward pass, of each token, as on a GPU.

        What a level needs during the backward pass, one layer at a time, is not in it.
        """
        if level in RERUN:
            own = 0 if level == "offload" else itemsize * self.hidden_size
            return own + self._noted_bytes(itemsize) + self._handed_bytes(itemsize)
        parts: Iterable[Any] = self.children()
        kept = (part.activation_bytes(level, itemsize) for part in parts if hasattr(part, "activation_bytes"))
        return sum(kept) + itemsize * self.hidden_size * self._branch_inputs(level)

    def _branch_inputs(self, level: ActivationMemory) -> int:
        """How many tensors [T, H] the branches keep of what they read, beside the norms' own inputs."""
        raise NotImplementedError

    def norm_outputs(self) -> int:
        """How many outputs of norms, [T, H], are kept at `all` alone."""
        return self._branch_inputs("all") - self._branch_inputs("lean")

    def _noted_bytes(self, itemsize: int) -> int:
        """The router's choice, which the second run takes, and its logits, where the loss reads them."""
        kept = 0
        for part in self.children():
            if isinstance(part, MixtureOfExperts):
                spec = part.spec
                logits = spec.num_experts * (4 if spec.float32_router else itemsize)
                kept += unwrapped(part.router).decision_bytes + (logits if spec.has_router_loss else 0)
        return kept

    def _handed_bytes(self, itemsize: int) -> int:
        """The keys and values that later layers read."""
        mixer = self.spec.mixer
        return 2 * itemsize * mixer.kv_size if self.makes and isinstance(mixer, AttentionSpec) else 0

    def _scaled(self, x: Tensor) -> Tensor:
        """What a branch adds to the residual stream."""
        return x if self.spec.residual_scale == 1.0 else x * self.spec.residual_scale


class PreNormBlock(Block):
    """`h = x + attention(norm(x)); y = h + mlp(norm(h))` (Xiong et al., 2020, arXiv:2002.04745): LLaMA,
    Mistral, Qwen.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.self_attn(x, sequences))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self._scaled(self.mlp(x, sequences)), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0


class ChannelScale(nn.Module):
    """What a branch adds to each channel of the residual stream, times a learned number, which starts small.

    Args:
        hidden_size: the width H.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return x * self.weight.to(x.dtype)

    def reset_parameters(self, *_: Any) -> None:
        """A tenth, whatever matrices start with."""
        nn.init.constant_(self.weight, 0.1)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Of a token: what it multiplies."""
        return itemsize * self.weight.numel()


class LayerScaleBlock(PreNormBlock):
    """`h = x + a * attention(norm(x)); y = h + b * mlp(norm(h))`, a and b learned for each channel
    (LayerScale; Touvron et al., 2021, arXiv:2103.17239): InternVL's encoder.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.attention_scale, self.mlp_scale = ChannelScale(hidden_size), ChannelScale(hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.attention_scale(self.self_attn(x, sequences)))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self._scaled(self.mlp_scale(self.mlp(x, sequences))), residual


class GatedPreNormBlock(PreNormBlock):
    """`h = x + tanh(a) * attention(norm(x)); y = h + tanh(b) * mlp(norm(h))`, a and b learned (the encoder of
    Llama 3.2 Vision).
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.gate_attn, self.gate_ffn = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.gate_attn.tanh() * self.self_attn(x, sequences))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self._scaled(self.gate_ffn.tanh() * self.mlp(x, sequences)), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return super()._branch_inputs(level) + 2  # what the gates multiply

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """As every matrix."""
        for gate in (self.gate_attn, self.gate_ffn):
            nn.init.normal_(gate, 0.0, std, generator)


class GatedCrossBlock(Block):
    """`h = x + tanh(a) * attention(norm(x), images); y = h + tanh(b) * shown * mlp(norm(h))`, a and b
    learned, and `shown` 0 for tokens that have been shown no image (Llama 3.2 Vision).
    """

    reads = (IMAGES,)
    has_room_for = ("features of images",)
    mixer_name = "cross_attn"
    cross_attn: Mixer

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, images: Tensor) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.cross_attn_attn_gate.tanh() * self.cross_attn(x, sequences, images))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        seen = sequences.on(x.device).tiles
        assert seen is not None
        x = torch.where(seen.shown, self.mlp(x, sequences), 0)
        return self._scaled(self.cross_attn_mlp_gate.tanh() * x), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 4 if level == "all" else 2  # what the gates multiply

    def reset_parameters(self, *_: Any) -> None:
        """Closed gates: the language model is as it was."""
        nn.init.zeros_(self.cross_attn_attn_gate)
        nn.init.zeros_(self.cross_attn_mlp_gate)


class SandwichBlock(Block):
    """`h = x + norm(attention(norm(x))); y = h + norm(mlp(norm(h)))` (Gemma 2, arXiv:2408.00118): Gemma 2 and
    3, GLM-4.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.pre_feedforward_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.post_attention_layernorm(self.self_attn(x, sequences)))
        x, residual = add_and_norm(self.pre_feedforward_layernorm, x, residual)
        return self._scaled(self.post_feedforward_layernorm(self.mlp(x, sequences))), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0


class ScaledSandwichBlock(SandwichBlock):
    """`y = s * (h + norm(own(h)))`, h what the sandwich makes, s a number that is stored and not trained, and
    `own` a branch for the layer's own input (layers/blocks/per_layer_input.py), where there is one (Gemma 4).
    """

    has_room_for: tuple[str, ...] = ("per_layer_input", "keys of another layer")
    layer_scalar: Tensor

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.register_buffer("layer_scalar", torch.ones(1))
        mixer, own = spec.mixer, spec.per_layer_input
        self.reads_keys = isinstance(mixer, SharedAttentionSpec)
        if isinstance(mixer, SharedAttentionSpec):
            self.reads = keys_and_values(mixer.keys_of)
        self.per_layer_input = None
        if own is not None:
            self.reads = (*self.reads, own_input(layer))
            self.per_layer_input = PerLayerInput(hidden_size, own)
            self.post_per_layer_input_norm = make_norm(hidden_size, spec.norm)

    def forward(
        self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor
    ) -> tuple[Any, ...]:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        keys = read[:2] if self.reads_keys else (True,) if self.makes else ()
        attended = self.self_attn(x, sequences, *keys)
        x, *made = attended if self.makes else (attended,)
        x = self._scaled(self.post_attention_layernorm(x))
        x, residual = add_and_norm(self.pre_feedforward_layernorm, x, residual)
        x = residual + self._scaled(self.post_feedforward_layernorm(self._feed(x, residual, sequences)))
        if self.per_layer_input is not None:
            x = x + self._scaled(self.post_per_layer_input_norm(self.per_layer_input(x, read[-1])))
        return (x * self.layer_scalar.to(x.dtype), None, *made)

    def _feed(self, x: Tensor, residual: Tensor, sequences: Sequences) -> Tensor:
        """The MLP of x [T, H], which is the norm of `residual`."""
        return self.mlp(x, sequences)

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return super()._branch_inputs(level) + (self.per_layer_input is not None)

    def _handed_bytes(self, itemsize: int) -> int:
        own = self.per_layer_input
        kept = 0 if own is None else own.activation_bytes("checkpoint", itemsize)
        return super()._handed_bytes(itemsize) + kept

    def reset_parameters(self, *_: Any) -> None:
        """A factor of one."""
        nn.init.ones_(self.layer_scalar)


class ScaledSandwichWithExpertsBlock(ScaledSandwichBlock):
    """The same with experts beside the MLP, `norm(norm(mlp(norm(h))) + norm(experts(norm(h))))`, whose router
    reads h itself (Gemma 4).
    """

    has_room_for = (*ScaledSandwichBlock.has_room_for, "experts")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if spec.experts is None:
            raise ValueError(f"layers of topology {spec.topology!r} have experts, and this spec has none")
        self.moe = MixtureOfExperts(hidden_size, spec.experts)
        self.post_feedforward_layernorm_1 = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm_2 = make_norm(hidden_size, spec.norm)
        self.pre_feedforward_layernorm_2 = make_norm(hidden_size, spec.norm)

    def _feed(self, x: Tensor, residual: Tensor, sequences: Sequences) -> Tensor:
        dense = self.post_feedforward_layernorm_1(self.mlp(x, sequences))
        routed = self.moe(self.pre_feedforward_layernorm_2(residual), sequences, residual)
        return dense + self.post_feedforward_layernorm_2(routed)

    def _branch_inputs(self, level: ActivationMemory) -> int:
        # Two norms have one input; the experts' own is kept as an output.
        return super()._branch_inputs(level) - 1 + (1 if level == "all" else 0)


class PostNormBlock(Block):
    """`h = x + norm(attention(x)); y = h + norm(mlp(h))` (OLMo 2, arXiv:2501.00656, section 3.2): OLMo 2 and
    3, EXAONE 4.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x = x if residual is None else x + residual
        x = x + self._scaled(self.post_attention_layernorm(self.self_attn(x, sequences)))
        return self._scaled(self.post_feedforward_layernorm(self.mlp(x, sequences))), x

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2  # the branches read the residual stream itself


class ParallelBlock(Block):
    """`n = norm(x); y = x + attention(n) + mlp(n)` (GPT-J, 2021; PaLM, arXiv:2204.02311): Cohere, Phi."""

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        return self._scaled(self.self_attn(x, sequences) + self.mlp(x, sequences)), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 1 if level == "all" else 0


MIXERS: dict[type, Callable[..., Mixer]] = {
    AttentionSpec: Attention,
    SharedAttentionSpec: SharedAttention,
    LatentAttentionSpec: LatentAttention,
    CrossAttentionSpec: CrossAttention,
}
BLOCKS: dict[str, type[Block]] = {
    "pre_norm": PreNormBlock,
    "layer_scale": LayerScaleBlock,
    "gated_pre_norm": GatedPreNormBlock,
    "gated_cross": GatedCrossBlock,
    "sandwich": SandwichBlock,
    "scaled_sandwich": ScaledSandwichBlock,
    "scaled_sandwich_with_experts": ScaledSandwichWithExpertsBlock,
    "post_norm": PostNormBlock,
    "parallel": ParallelBlock,
}


def run_block(
    layer: Block,
    x: Tensor,
    residual: Tensor | None,
    sequences: Sequences,
    *read: Tensor,
    offload: Offload,
) -> tuple[Any, ...]:
    """What the layer gives, keeping for the backward pass what its level of activation memory says. `offload`
    is that of the pass.
    """
    offload.settle()
    lean = torch.is_grad_enabled()
    # A second run of a layer that fills a cache would fill it twice.
    if layer.activation_memory in RERUN and lean and sequences.cache is None:
        # The sum is taken in front of the layer, so that one tensor is kept and not two.
        again = offload.recompute if layer.activation_memory == "offload" else recompute
        return again(layer, x if residual is None else x + residual, None, sequences, *read)
    with keep_recipes() if lean and layer.activation_memory != "all" else nullcontext():
        return layer(x, residual, sequences, *read)


def add_and_norm(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), or of x alone where there is nothing to add."""
    return (norm(x), x) if residual is None else norm(x, residual)
