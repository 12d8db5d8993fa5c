"""Recurrent mixers: layers that carry a state from token to token instead of attending to all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.layers.specs.mlp import Activation
from liger_models.layers.specs.rotary import RopeSpec

Projections = Literal["qkvz", "qkv", "apart"]
Gating = Literal["before_norm", "after_norm", "without_norm"]


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Linear attention by the gated delta rule, with one decay for each value head (Yang et al., 2024,
    arXiv:2412.06464), after a causal depthwise convolution of queries, keys and values.

    Each key head serves `value_heads / key_heads` value heads in a row. `conv` is the width of the
    convolution. `beta_scale` multiplies the learning rate. `norm_eps` and `norm_cast` are those of the norm
    of each value head's output, which is gated by `gate_activation`.
    `projections` says which of the input projections checkpoints hold as one matrix: "qkvz", queries, keys,
    values and the output gate (Qwen3-Next); "qkv", all but the gate (Qwen3.5); "apart", none, nor the taps of
    the convolution (OLMo hybrid).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    beta_scale: float = 1.0
    norm_eps: float = 1e-6
    projections: Projections = "qkv"
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    norm_cast: Literal["llama", "float32"] = "llama"

    @property
    def key_size(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        return self.key_heads, "key heads"

    @property
    def exchanged_size(self) -> int:
        """Elements per token that a rank keeps in addition, if heads are exchanged: what it received, next to
        its own queries, keys and values, whose memory is freed only if the gate does not share it.
        """
        return (self.projections != "qkvz") * self.conv_size

    @property
    def state_flops(self) -> int:
        """Operations of the rule for each token, one token at a time: a decay, a read, a write and a query of
        every state.
        """
        return 7 * self.value_heads * self.key_dim * self.value_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotations of queries and keys: none."""
        return ()


@dataclass(frozen=True)
class SSDSpec:
    """State space duality, the mixer of Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060), after a causal
    depthwise convolution of x, B and C.

    Each of `groups` groups of B and C, of `state` elements, serves `heads / groups` heads in a row. `conv` is
    the width of the convolution and `conv_bias` its bias; `bias` and `out_bias` are those of the projections.
    `dt_min` and `dt_max` bound the step after softplus. `gating` says how the output is gated: before the
    norm of each group, after it, or without a norm; `norm_eps` and `norm_cast` are the norm's. `scales`
    multiply the parts z, x, B, C and dt of the input projection.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    gating: Gating = "before_norm"
    norm_eps: float = 1e-5
    norm_cast: Literal["llama", "float32"] = "llama"
    dt_min: float = 0.0
    dt_max: float | None = None
    scales: tuple[float, ...] = (1.0,) * 5

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return self.size + 2 * self.groups * self.state

    @property
    def dt_limit(self) -> tuple[float, float | None]:
        """Bounds of the step."""
        return self.dt_min, self.dt_max

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        return self.groups, "groups of heads"

    @property
    def exchanged_size(self) -> int:
        """Elements per token that a rank keeps in addition, if heads are exchanged: x, B, C and dt as it
        received them, in addition to the product that contains its own.
        """
        return self.conv_size + self.heads

    @property
    def state_flops(self) -> int:
        """Operations of the scan for each token, one token at a time: a decay, a write and a query of every
        state.
        """
        return 5 * self.heads * self.head_dim * self.state

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotations of queries and keys: none."""
        return ()


@dataclass(frozen=True)
class SelectiveSpec:
    """Selective scan, the mixer of Mamba (Gu and Dao, 2023, arXiv:2312.00752), after a causal depthwise
    convolution of its input.

    Each of `channels` channels has a state of `state` elements. Its step is a product of rank `step_rank`.
    `conv` is the width of the convolution and `conv_bias` its bias; `bias` is that of the input and output
    projections. `norms` says whether step, B and C are normalised (RMSNorm with `norm_eps`), with weights or
    without.
    """

    channels: int
    state: int
    step_rank: int
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    norms: Literal["weighted", "unweighted"] | None = None
    norm_eps: float = 1e-6

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return self.channels

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        return self.channels, "channels"

    @property
    def exchanged_size(self) -> int:
        """Elements per token that a rank keeps in addition, if channels are exchanged: the convolution's
        input as it was received, and its output as it came back.
        """
        return 2 * self.channels

    @property
    def state_flops(self) -> int:
        """Operations of the scan for each token, one token at a time: the exponential of a product, a decay,
        a write and a query of every state.
        """
        return 7 * self.channels * self.state

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotations of queries and keys: none."""
        return ()


@dataclass(frozen=True)
class RGLRUSpec:
    """Real-gated linear recurrent unit, the recurrent mixer of Griffin (De et al., 2024, arXiv:2402.19427,
    section 2.4), after a causal depthwise convolution of its input.

    The matrices of both gates are block diagonal, with `heads` blocks of `head_dim` channels. `conv` is the
    width of the convolution; `activation` is that of the branch that multiplies the output. Convolution and
    projections have biases.
    """

    heads: int
    head_dim: int
    conv: int = 4
    activation: Activation = "gelu_tanh"

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return self.size

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        return self.heads, "heads"

    @property
    def exchanged_size(self) -> int:
        """Elements per token that a rank keeps in addition, if heads are exchanged: the convolution's input
        as it was received, and the output as it came back.
        """
        return 2 * self.size

    @property
    def state_flops(self) -> int:
        """Operations for each token, one token at a time: two products by blocks for the gates, and a dozen
        for each channel.
        """
        return self.size * (4 * self.head_dim + 12)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotations of queries and keys: none."""
        return ()


class EqualHeads:
    """Sizes of a mixer whose queries, keys and values have equally many heads of one width."""

    head_dim: int

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.shared_heads[0] * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of queries, keys and values."""
        return 3 * self.size

    @property
    def exchanged_size(self) -> int:
        """Elements per token that a rank keeps in addition, if heads are exchanged: the output, and received
        queries, keys and values.
        """
        return 4 * self.size

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotations of queries and keys: none."""
        return ()


@dataclass(frozen=True)
class ChannelDeltaSpec(EqualHeads):
    """Linear attention by the delta rule with a decay for each key channel (Kimi Delta Attention; Kimi Team,
    2025, arXiv:2510.26692), after a causal depthwise convolution of queries, keys and values.

    Queries, keys and values have `heads` heads of `head_dim`. `conv` is the width of the convolution.
    `norm_eps` is that of the norm of each head's output, which is gated. `forget_rank` and `gate_rank` are
    the ranks of the projections of the decay and of that gate (None: full matrices). With `lower_bound` the
    logarithm of a decay lies between it and zero; without, it has no bound.
    """

    heads: int
    head_dim: int
    conv: int = 4
    norm_eps: float = 1e-6
    forget_rank: int | None = None
    gate_rank: int | None = None
    lower_bound: float | None = None

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        return self.heads, "heads"

    @property
    def state_flops(self) -> int:
        """Operations of the rule for each token, one token at a time: a decay, a read, a write and a query of
        every state.
        """
        return 7 * self.heads * self.head_dim * self.head_dim


@dataclass(frozen=True)
class LightningSpec(EqualHeads):
    """Lightning attention: linear attention of queries, keys and values after an activation, with a fixed
    decay for each head (MiniMax, 2025, arXiv:2501.08313, section 2.2).

    A head with decay s multiplies its state by exp(-s) at every token. `norm_eps` is that of the norm of all
    heads' outputs together, which are gated.
    """

    decays: tuple[float, ...]
    head_dim: int
    activation: Activation = "silu"
    norm_eps: float = 1e-6

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.decays)

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        return self.heads, "heads"

    @property
    def state_flops(self) -> int:
        """Operations for each token, one token at a time: a decay, a write and a query of every state."""
        return 5 * self.heads * self.head_dim * self.head_dim


@dataclass(frozen=True)
class GatedConvSpec:
    """Gated short convolution: a causal depthwise convolution of `channels`, between two products with gates
    that the layer computes from its input (LFM2: Liquid AI, 2025, arXiv:2511.23404).

    `conv` is the width of the convolution; `bias` applies to it and to both projections.
    """

    channels: int
    conv: int = 3
    bias: bool = False

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return self.channels

    @property
    def shared_heads(self) -> tuple[int, str]:
        """Number and kind of the heads that ranks divide in sequence parallelism."""
        return self.channels, "channels"

    @property
    def exchanged_size(self) -> int:
        """Elements per token that a rank keeps in addition, if channels are exchanged: the convolution's
        input and output as they were received.
        """
        return 2 * self.channels

    @property
    def state_flops(self) -> int:
        """Operations for each token: a product and a sum for each tap, and two gates."""
        return (2 * self.conv + 2) * self.channels

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotations of queries and keys: none."""
        return ()


RecurrentSpec = (
    GatedDeltaSpec | SSDSpec | SelectiveSpec | GatedConvSpec | ChannelDeltaSpec | LightningSpec | RGLRUSpec
)
"""Mixers that carry a state."""
