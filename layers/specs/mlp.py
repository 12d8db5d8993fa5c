"""Per-token modules: MLPs, and mixtures of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.kernels import CappedSwiGLU, ClampedSwiGLU
from liger_models.kernels.activations.gated import has_gate
from liger_models.layers.specs.norms import NormSpec

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2", "xielu"]


@dataclass(frozen=True)
class MLPSpec:
    """MLP: gated, `down(act(gate_scale * gate(x)) * up(x))`, or plain, `down(act(up(x)))`. `clipped`
    projections clamp to stored bounds: layers/projections/clipped_linear.py. With `sparsity` about
    that share of a token's gates are cut to zero: kernels/activations/sparse_gated.py. `down_norm` is a norm
    of the input of down.
    """

    intermediate_size: int
    activation: Activation | ClampedSwiGLU | CappedSwiGLU = "silu"
    bias: bool = False
    gated: bool = True
    clipped: bool = False
    gate_scale: float = 1.0
    sparsity: float = 0.0
    down_norm: NormSpec | None = None

    @property
    def plain_gate(self) -> bool:
        """Whether the activation's input is the gate itself."""
        return self.gate_scale == 1.0 and self.sparsity == 0.0

    @property
    def joins_down(self) -> bool:
        """Whether one kernel makes the input of down and reads it: kernels/activations/gated_linear.py."""
        with_gate = self.gated and self.plain_gate and self.activation != "relu2"
        return self.down_norm is None and (with_gate or (not self.gated and self.activation == "relu2"))


@dataclass(frozen=True)
class SparseMixerSpec:
    """Random choice of two experts in training, with a gradient estimate (SparseMixer-v2, arXiv:2409.12136;
    formulas in layers/experts/sparse_mixer.py).

    An expert can be drawn if its logit is below the largest by at most `2 * jitter` of it.
    """

    jitter: float


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: each token goes to `experts_per_token` of `num_experts` MLPs, which are gated, or
    with the activation "relu2" plain.

    `bias` applies to the experts' projections, `router_bias` to the router's logits. The fields from `score`
    to `renormalize_eps` are the options of `route` in kernels/experts/moe_routing.py; `sparse_mixer`
    replaces all of them. With `input_noise` the input of router and experts is multiplied in training by
    random numbers from 1 - input_noise to 1 + input_noise. `weighted` is whether the weights multiply the
    experts' outputs or their inputs. `float32_router` computes the router's logits in float32, whatever the
    model's dtype. With `router_norm_eps` the router's input is normalised (RMSNorm), multiplied by a learned
    vector and divided by the root of its width; with `expert_scale` each expert's final weights are
    multiplied by a learned number. With `latent_size` the experts' inputs and outputs have that width: a
    projection precedes and one follows them, with biases if `latent_bias`, while the router and the shared
    expert read the tokens themselves. `shared_expert` is an additional MLP for all tokens; `shared_scale`
    multiplies its output, and `shared_gate` weighs it by sigmoid(gate(x)). With `output_norm` the sum of all
    their outputs is normalised. The router also chooses among
    `identity_experts` without weights, which return their input; their numbers follow those of the MLPs.
    Every token also goes to `sink_experts` further ones, which share in the weights
    (layers/experts/sinks.py); a learned number then multiplies all weights. With
    `image_size` tokens of pictures have as many other experts of that width, with a router of their own
    (layers/experts/modal_experts.py). With `by_token_id` a stored table has the experts of each of so many
    token ids, and the router computes only their weights. The coefficients are those of the load balancing
    loss and of the router's z-loss: see layers/sequences/router_loss.py.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: Activation | ClampedSwiGLU | CappedSwiGLU = "silu"
    bias: bool = False
    router_bias: bool = False
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    softmax_after_top_k: bool = False
    renormalize: bool = True
    correction_bias: bool = False
    correct_logits: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top_2", "top_2_else_0", "max"] = "top_2"
    routed_scaling_factor: float = 1.0
    renormalize_eps: float = 1e-20
    sparse_mixer: SparseMixerSpec | None = None
    input_noise: float = 0.0
    weighted: Literal["outputs", "inputs"] = "outputs"
    float32_router: bool = False
    router_norm_eps: float | None = None
    expert_scale: bool = False
    latent_size: int | None = None
    latent_bias: bool = False
    shared_expert: MLPSpec | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    output_norm: NormSpec | None = None
    identity_experts: int = 0
    sink_experts: int = 0
    image_size: int | None = None
    by_token_id: int | None = None
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    @property
    def gated(self) -> bool:
        """Whether the experts have gates."""
        return has_gate(self.activation)

    @property
    def num_choices(self) -> int:
        """Number of experts that the router chooses from."""
        return self.num_experts + self.identity_experts

    @property
    def num_logits(self) -> int:
        """Number of the router's logits."""
        return self.num_choices + self.sink_experts

    def input_size(self, hidden_size: int) -> int:
        """Width of the experts' inputs and outputs."""
        return hidden_size if self.latent_size is None else self.latent_size

    @property
    def has_router_loss(self) -> bool:
        return self.aux_loss_coef != 0 or self.z_loss_coef != 0


@dataclass(frozen=True)
class PerLayerInputSpec:
    """A branch that adds per-layer embeddings of `size` elements: see layers/blocks/per_layer_input.py."""

    size: int
    activation: Activation | ClampedSwiGLU = "gelu_tanh"


@dataclass(frozen=True)
class NgramSpec:
    """Embeddings of the tokens that end at each token, added to all residual streams
    (layers/recurrent/ngrams.py).

    For each length from 2 to `size` there are `heads` tables of numbers of rows that hashes are divided by,
    `table_sizes` in all, one after another in one table of `rows` rows, and `width` elements of a token
    together. `eos` ends what n-grams may hold. A convolution of `conv` taps, `size` tokens apart, follows.
    `factors` are those of the hash, and a checkpoint may hold the table in `pieces` of equal height.
    """

    size: int
    heads: int
    width: int
    eos: int
    table_sizes: tuple[int, ...]
    factors: tuple[int, ...]
    rows: int
    conv: int = 4
    pieces: int = 1
