"""A mixture of experts: gated MLPs, of which each token sees a few (Shazeer et al., 2017, arXiv:1701.06538).

    y = sum over the chosen experts e of weight_e * down_e(act(gate_e(x)) * up_e(x))
    y = y + shared(x),   or   y + sigmoid(gate(x)) * shared(x)

Which experts a token goes to, and with what weights: kernels/experts/moe_routing.py. Native weights are
stacked: gate_up_proj [E, 2 I, H], the gate's rows first, and down_proj [E, H, I].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from liger_models.convert.checkpoints.weight_map import Cat, Expr, Ref, Stack, Transpose
from liger_models.kernels import moe_experts, route
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import MoESpec


@dataclass(frozen=True)
class MoENames:
    """What a checkpoint calls the parts of a mixture of experts, below the layer's own prefix.

    The names of the experts' projections are those of whole tensors. `{e}` stands for the expert's number; a
    name without it is that of all experts' matrices in one tensor. If `gate_up_proj` is given, gate and up
    are one tensor, the gate first, and their own names are not used. `transposed` says that the experts'
    matrices have their inputs first, [.., in, out]. The other names are bare, without ".weight", but for that
    of the correction bias.
    """

    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    gate_proj: str = "mlp.experts.{e}.gate_proj.weight"
    up_proj: str = "mlp.experts.{e}.up_proj.weight"
    down_proj: str = "mlp.experts.{e}.down_proj.weight"
    gate_up_proj: str | None = None
    transposed: bool = False
    shared_gate_proj: str = "mlp.shared_expert.gate_proj"
    shared_up_proj: str = "mlp.shared_expert.up_proj"
    shared_down_proj: str = "mlp.shared_expert.down_proj"
    shared_expert_gate: str = "mlp.shared_expert_gate"


class MixtureOfExperts(nn.Module):
    """A router, its experts, and perhaps an expert that all tokens share.

    Args:
        hidden_size: the width H of input and output.
        spec: the experts, the routing, the shared expert.

    Raises:
        ValueError: a gate for a shared expert that is not there.
    """

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        if spec.shared_gate and spec.shared_expert is None:
            raise ValueError("shared_gate is the gate of a shared expert, but shared_expert is None")
        self.spec, self.hidden_size = spec, hidden_size
        self.router = Router(hidden_size, spec)
        self.experts = Experts(hidden_size, spec)
        self.shared_expert = None if spec.shared_expert is None else GatedMLP(hidden_size, spec.shared_expert)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False) if spec.shared_gate else None

    def forward(self, x: Tensor, sequences: Sequences | None = None) -> Tensor:
        """x [T, H] -> [T, H]. `sequences` is where a router with losses notes its logits."""
        logits, weights, experts = self.router(x)
        if sequences is not None and self.spec.has_router_loss:
            sequences.router_logits.note(logits)
        y = self.experts(x, weights, experts)
        if self.shared_expert is None:
            return y
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid() * shared
        return y + shared

    def weight_map(self, prefix: str, source: str, names: MoENames) -> dict[str, Expr]:
        """`prefix` of the native names, `source` of the checkpoint's."""
        spec, hidden, inner = self.spec, self.hidden_size, self.spec.intermediate_size

        def of_experts(name: str, out_features: int, in_features: int) -> Expr:
            """All experts' matrices, [E, out, in]."""
            shape = (in_features, out_features) if names.transposed else (out_features, in_features)
            expr: Expr = Ref(source + name, (spec.num_experts, *shape))
            if "{e}" in name:
                each = (source + name.replace("{e}", str(e)) for e in range(spec.num_experts))
                expr = Stack(tuple(Ref(name, shape) for name in each))
            return Transpose(expr) if names.transposed else expr

        if names.gate_up_proj is not None:
            gate_up = of_experts(names.gate_up_proj, 2 * inner, hidden)
        else:
            gate_and_up = (of_experts(name, inner, hidden) for name in (names.gate_proj, names.up_proj))
            gate_up = Cat(tuple(gate_and_up), dim=1)
        expressions = {
            f"{prefix}router.weight": Ref(f"{source}{names.router}.weight", (spec.num_experts, hidden)),
            f"{prefix}experts.gate_up_proj": gate_up,
            f"{prefix}experts.down_proj": of_experts(names.down_proj, hidden, inner),
        }
        if spec.correction_bias:
            bias = Ref(source + names.correction_bias, (spec.num_experts,))
            expressions[f"{prefix}router.correction_bias"] = bias
        if self.shared_expert is not None:
            shared = (names.shared_gate_proj, names.shared_up_proj, names.shared_down_proj)
            expressions |= self.shared_expert.weight_map(
                f"{prefix}shared_expert.", *(source + name for name in shared)
            )
        if self.shared_expert_gate is not None:
            gate = Ref(f"{source}{names.shared_expert_gate}.weight", (1, hidden))
            expressions[f"{prefix}shared_expert_gate.weight"] = gate
        return expressions


class Router(nn.Module):
    """The experts that each token goes to, and their weights.

    The correction bias, where there is one, is a buffer in float32, which belongs to the checkpoint and which
    no gradient, optimizer or mixed precision touches: who balances the load by it changes it between steps
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    correction_bias: Tensor | None

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden_size))
        bias = torch.empty(spec.num_experts, dtype=torch.float32) if spec.correction_bias else None
        self.register_buffer("correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_as_linear(self.weight)
        if self.correction_bias is not None:
            self.correction_bias.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> logits [T, E], weights [T, k] in float32, experts [T, k] int32."""
        spec = self.spec
        product = _ProductInFloat32.apply if spec.float32_router else F.linear
        logits = product(x, self.weight)
        weights, experts = route(
            logits,
            spec.experts_per_token,
            score=spec.score,
            softmax_after_top_k=spec.softmax_after_top_k,
            renormalize=spec.renormalize,
            correction_bias=self.correction_bias,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            scale=spec.routed_scaling_factor,
        )
        return logits, weights, experts

    def extra_repr(self) -> str:
        return f"{self.spec.experts_per_token} of {self.spec.num_experts}, score={self.spec.score!r}"


class Experts(nn.Module):
    """Gated MLPs of one size, each of which computes the tokens that were routed to it.

    For the backward pass it keeps its input, the weights and the products with gate and up, [T k, 2 I]. Run
    again in the backward pass (the levels `mlp` and `checkpoint`), it repeats both matrix products.
    """

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        self.activation = spec.activation
        inner = spec.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(spec.num_experts, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(spec.num_experts, hidden_size, inner))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_as_linear(self.gate_up_proj)
        _reset_as_linear(self.down_proj)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, H], weights [T, k], experts [T, k] -> [T, H]."""
        return moe_experts(x, weights, experts, self.gate_up_proj, self.down_proj, self.activation)

    def extra_repr(self) -> str:
        num_experts, hidden, inner = self.down_proj.shape
        return f"{num_experts} of {hidden} x {inner}, activation={self.activation!r}"


def _reset_as_linear(weight: nn.Parameter) -> None:
    bound = weight.shape[-1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)


class _ProductInFloat32(torch.autograd.Function):
    """x @ weight.T from operands cast to float32 (float64 stays), under autocast too.

    For the backward pass it keeps the operands and not their casts, which are of twice the size.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide_product(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad
        dx = _wide_product(dy, weight).to(x.dtype) if want_x else None
        return dx, _wide_product(dy.T, x).to(weight.dtype) if want_weight else None


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)
