"""What each token goes through by itself: MLPs, and mixtures of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.kernels import ClampedSwiGLU

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu2", "xielu"]


@dataclass(frozen=True)
class MLPSpec:
    """MLP: gated, `down(act(gate(x)) * up(x))`, or not, `down(act(up(x)))`. `clipped` projections
    are between stored bounds: layers/projections/clipped_linear.py.
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    clipped: bool = False


@dataclass(frozen=True)
class SparseMixerSpec:
    """A choice of two experts that is drawn at random in training, with an estimate of its gradient
    (SparseMixer-v2, arXiv:2409.12136; layers/experts/sparse_mixer.py has the formulas).

    An expert can be drawn if its logit is below the largest by `2 * jitter` of it at most. `input_noise`: in
    training what router and experts read is multiplied by random numbers from 1 - input_noise to
    1 + input_noise.
    """

    jitter: float
    input_noise: float = 0.0


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: each token goes to `experts_per_token` of `num_experts` gated MLPs.

    `bias` is that of the experts' projections, `router_bias` that of the router's logits. `score` to
    `routed_scaling_factor` say how experts are chosen and weighed, as the options of `route` in
    kernels/experts/moe_routing.py; `sparse_mixer` stands in the place of all of them. `weighted` is what the
    weights multiply, the experts' outputs or their inputs. `float32_router` computes the router's logits in
    float32, whatever the model's dtype. With `router_norm_eps` the router reads its input normalised
    (RMSNorm), times a vector that is learned, over the root of its width; with `expert_scale` each expert's
    weights are multiplied by a number that is learned, in the end. `shared_expert` is one more MLP that every
    token goes through; `shared_gate` weighs its output by sigmoid(gate(x)). The coefficients are those of the
    load balancing loss and of the router's z-loss: see layers/sequences/router_loss.py.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: Activation | ClampedSwiGLU = "silu"
    bias: bool = False
    router_bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after_top_k: bool = False
    renormalize: bool = True
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top_2", "max"] = "top_2"
    routed_scaling_factor: float = 1.0
    sparse_mixer: SparseMixerSpec | None = None
    weighted: Literal["outputs", "inputs"] = "outputs"
    float32_router: bool = False
    router_norm_eps: float | None = None
    expert_scale: bool = False
    shared_expert: MLPSpec | None = None
    shared_gate: bool = False
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    @property
    def has_router_loss(self) -> bool:
        return self.aux_loss_coef != 0 or self.z_loss_coef != 0


@dataclass(frozen=True)
class PerLayerInputSpec:
    """A branch that lets in what a layer has of each token for itself, of `size` elements: see
    layers/blocks/per_layer_input.py.
    """

    size: int
    activation: Activation = "gelu_tanh"
