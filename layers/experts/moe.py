"""Mixture of experts: MLPs, a few per token (Shazeer et al., 2017, arXiv:1701.06538).

    y = sum over the chosen experts e of weight_e * down_e(act(gate_e(x)) * up_e(x)),   or with weight_e * x
    y = y + scale * shared(x),   or   y + sigmoid(gate(x)) * shared(x)

Plain experts compute down_e(act(up_e(x))). Latent experts (LatentMoE: Elango et al., 2026, arXiv:2601.18089)
work in a narrower space, into which and out of which two matrices project, the same for all experts:

    y = fc2(sum of weight_e * down_e(act(up_e(fc1(x))))) + shared(x)

The choice of experts and their weights is in kernels/experts/moe_routing.py or, for random routing, in
layers/experts/sparse_mixer.py. Native weights are stacked: gate_up_proj [E, 2 I, H], the gate's rows first,
or up_proj [E, I, H] of plain experts, and down_proj [E, H, I].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref, Stack
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.kernels import moe_experts, rms_norm, route
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.experts.expert_parallel import ExpertExchange, Routes
from liger_models.layers.experts.float32_product import product_in_float32
from liger_models.layers.experts.sparse_mixer import InputNoise, decide, draw_noise, weigh
from liger_models.layers.parts.mlp import make_mlp
from liger_models.layers.projections.linear import Linear, as_wide_as, project, unwrapped
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory, carry_recipe, recompute
from liger_models.layers.sequences.routing_decisions import RoutingDecisions, in_backward_pass
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import MoESpec


class MixtureOfExperts(nn.Module):
    """A router, its experts, and optionally a shared expert.

    Args:
        hidden_size: the width H of input and output.
        spec: the experts, the routing, the shared expert.

    Raises:
        ValueError: a gate or a scale without a shared expert, or biases of latent projections without these.
    """

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        if spec.shared_expert is None and (spec.shared_gate or spec.shared_scale != 1.0):
            raise ValueError(
                "shared_gate and shared_scale belong to a shared expert, but shared_expert is None"
            )
        if spec.latent_bias and spec.latent_size is None:
            raise ValueError("latent_bias is that of the latent projections, but latent_size is None")
        self.spec, self.hidden_size = spec, hidden_size
        mixer = spec.sparse_mixer
        self.input_noise = InputNoise(mixer.input_noise) if mixer and mixer.input_noise else None
        self.router = (SparseMixerRouter if mixer else Router)(hidden_size, spec)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if spec.latent_size is not None:
            self.fc1_latent_proj = Linear(hidden_size, spec.latent_size, bias=spec.latent_bias)
            self.fc2_latent_proj = Linear(spec.latent_size, hidden_size, bias=spec.latent_bias)
        self.experts = Experts(spec.input_size(hidden_size), spec)
        self.shared_expert = None if spec.shared_expert is None else make_mlp(hidden_size, spec.shared_expert)
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if spec.shared_gate else None

    def forward(
        self, x: Tensor, sequences: Sequences | None = None, routed_by: Tensor | None = None
    ) -> Tensor:
        """x [T, H] -> [T, H]. The router stores its decisions in `sequences`, and its logits if it has losses
        or they are requested. `routed_by` [T, H] is the router's input, if not x.
        """
        if self.input_noise is not None:
            x = self.input_noise(x)
        read = x if routed_by is None else routed_by
        logits, weights, experts = self.router(read, None if sequences is None else sequences.notes.routing)
        if sequences is not None and (self.spec.has_router_loss or sequences.notes.router_logits.asked_for):
            sequences.notes.router_logits.note(logits)
        y = self.experts(x if self.fc1_latent_proj is None else self.fc1_latent_proj(x), weights, experts)
        if self.fc2_latent_proj is not None:
            y = self.fc2_latent_proj(y)
        if self.shared_expert is None:
            return y
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid() * shared
        return torch.add(y, shared, alpha=self.spec.shared_scale)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: those of its parts, the latent experts' input and output, both factors of a
        gated shared expert, and for input noise the numbers and their product with x.
        """
        parts = unwrapped(self.router), unwrapped(self.experts)
        kept = sum(part.activation_bytes(level, itemsize) for part in parts)
        if self.spec.latent_size is not None:
            kept += 2 * itemsize * self.spec.latent_size
        if self.shared_expert is not None:
            kept += self.shared_expert.activation_bytes(level, itemsize)
        if self.shared_expert_gate is not None:
            kept += itemsize * (self.hidden_size + 1)
        if self.input_noise is not None:
            kept += 2 * itemsize * self.hidden_size
        return kept


class Router(nn.Module):
    """Chooses each token's experts and their weights.

    The optional correction bias is a float32 buffer, saved in checkpoints and untouched by gradients,
    optimizers and mixed precision: layers/experts/load_balance.py changes it between steps.

    Attributes:
        load: with a correction bias, the number of tokens per expert in training mode since load_balance last
            read it, [E] int64; None before the first. Not a buffer: DDP would overwrite it with the first
            rank's, and each rank has its own load.
    """

    correction_bias: Tensor | None
    load: Tensor | None = None

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.router_bias else None
        correction = torch.empty(spec.num_experts, dtype=torch.float32) if spec.correction_bias else None
        self.register_buffer("correction_bias", correction)
        self.scale = nn.Parameter(torch.empty(hidden_size)) if spec.router_norm_eps is not None else None
        self.per_expert_scale = nn.Parameter(torch.empty(spec.num_experts)) if spec.expert_scale else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the matrix from a normal distribution, biases with zeros, scales with ones."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        for bias in (self.bias, self.correction_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for scale in (self.scale, self.per_expert_scale):
            if scale is not None:
                nn.init.ones_(scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Apply as for `model.to(torch.bfloat16)`, but keep the correction bias in float32, since its steps
        vanish in bfloat16.
        """
        before = self.correction_bias
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.itemsize < before.itemsize:
            self.correction_bias = before.to(after.device)
        return self

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: logits, chosen experts and, in float32, their weights; with scales also the
        scales, the weights before scaling, and the choice again in 8 bytes; with a norm its statistic, and at
        `all` its output. (The block accounts for the input.)
        """
        spec = self.spec
        kept = spec.num_experts * (4 if spec.float32_router else itemsize) + 8 * spec.experts_per_token
        if spec.expert_scale:
            kept += 16 * spec.experts_per_token
        if spec.router_norm_eps is not None:
            kept += 4 + (itemsize * self.weight.shape[1] if level == "all" else 0)
        return kept

    @property
    def decision_bytes(self) -> int:
        """Bytes per token of the decision that a recomputed layer reuses."""
        return 4 * self.spec.experts_per_token

    def forward(self, x: Tensor, decisions: RoutingDecisions | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> logits [T, E], weights [T, k] in float32, experts [T, k] int32. When recomputing a call
        whose decisions are in `decisions`, the same experts are used.
        """
        spec = self.spec
        if self.scale is not None:
            x = carry_recipe(self._normed(x, self.scale), self._normed, x, self.scale)
        if spec.float32_router:
            logits = product_in_float32(x, self.weight)
            logits = logits if self.bias is None else logits + self.bias
        else:
            logits = project(x, self.weight, self.bias)
        made = None if decisions is None else decisions.made_by(self)
        weights, decision = self._choose(logits, made)
        if decisions is not None:
            decisions.note(self, *decision)
        experts = decision[0]
        if self.per_expert_scale is not None:
            weights = weights * _of_chosen(self.per_expert_scale.to(weights.dtype), experts)
        if self.training and self.correction_bias is not None:
            self._count(experts)
        return logits, weights, experts

    def _choose(self, logits: Tensor, made: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Weights [T, k], and the decision, or `made` if given: the experts [T, k] first."""
        spec = self.spec
        weights, experts = route(
            logits,
            spec.experts_per_token,
            score=spec.score,
            softmax_after_top_k=spec.softmax_after_top_k,
            renormalize=spec.renormalize,
            renormalize_eps=spec.renormalize_eps,
            correction_bias=self.correction_bias,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            group_score=spec.group_score,
            scale=spec.routed_scaling_factor,
            experts=None if made is None else made[0],
        )
        return weights, (experts,)

    def _normed(self, x: Tensor, scale: Tensor) -> Tensor:
        """Router input: x [T, H] normalised, times `scale` [H], divided by sqrt(H)."""
        assert self.spec.router_norm_eps is not None
        y = rms_norm(x, scale, self.spec.router_norm_eps)
        return (y * x.shape[-1] ** -0.5).to(x.dtype)

    def _count(self, experts: Tensor) -> None:
        """Add these choices to the load, except in recomputation."""
        if in_backward_pass():
            return
        chosen = experts.detach().flatten()
        if self.load is None or self.load.device != chosen.device:
            self.load = torch.zeros(self.spec.num_experts, dtype=torch.int64, device=chosen.device)
        self.load.index_add_(0, chosen, self.load.new_ones(1).expand(chosen.shape))

    def extra_repr(self) -> str:
        return f"{self.spec.experts_per_token} of {self.spec.num_experts}, score={self.spec.score!r}"


def _of_chosen(scales: Tensor, experts: Tensor) -> Tensor:
    """Values [E] of the experts in [T, k]. Gathered row by row, where experts are distinct, so that a
    column's gradient is a sum in a fixed order.
    """
    return scales.expand(len(experts), -1).gather(1, experts.long())


class SparseMixerRouter(Router):
    """A router with the two-expert choice of layers/experts/sparse_mixer.py.

    Raises:
        ValueError: the spec does not have two experts per token, or has options that this router does not
        support.
    """

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__(hidden_size, spec)
        plain = MoESpec(spec.num_experts, 2, spec.intermediate_size)
        unsupported = [name for name in _FOR_ROUTE if getattr(spec, name) != getattr(plain, name)]
        if unsupported or spec.num_experts < 2:
            found = ", ".join(f"{name}={getattr(spec, name)!r}" for name in unsupported) or spec.num_experts
            raise ValueError(f"sparse_mixer chooses two experts by its own rule; it does not support {found}")

    def _choose(self, logits: Tensor, made: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Weights [T, 2]; and experts [T, 2], factors h [T, 2], and near experts [T, 2, E]."""
        spec = self.spec.sparse_mixer
        assert spec is not None
        # Drawn even if `made` is given: later random operations in the layer must find the generator in the
        # same state as in the first run.
        draws = draw_noise(logits) if self.training else None
        scores = at_least_float32(logits)
        experts, factors, near = made or decide(scores.detach(), spec.jitter, draws)
        return weigh(scores, experts, factors, near), (experts, factors, near)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: twice the near experts' probabilities in float32, and their mask; the chosen
        experts in 8 bytes, if the experts are recomputed in 4 more, and their float32 weights.
        """
        return 2 * (4 + 1) * self.spec.num_experts + 2 * (8 + 4 + (4 if level == "mlp" else 0))

    @property
    def decision_bytes(self) -> int:
        return 2 * (4 + 4 + self.spec.num_experts)


_FOR_ROUTE = (
    *("experts_per_token", "score", "softmax_after_top_k", "renormalize", "correction_bias"),
    *("num_groups", "top_groups", "group_score", "routed_scaling_factor", "renormalize_eps"),
)


class Experts(nn.Module):
    """MLPs of one size, each computing the tokens routed to it.

    Saved for the backward pass: the input, the weights and the first product, [T k, 2 I] with gates and
    [T k, I] without. When recomputed in the backward pass (levels `mlp` and `checkpoint`), both matrix
    products are repeated. At level `mlp` the router is not recomputed: its decision is saved.

    Args:
        hidden_size: the width H of input and output.
        spec: number, size and activation of the experts.

    Attributes:
        first: name of the first matrices: gate_up_proj, or up_proj without gates.
        exchange: token exchange with other ranks under expert parallelism, see
        layers/experts/expert_parallel.py.
    """

    activation_memory: ActivationMemory = "lean"
    exchange: ExpertExchange | None = None
    stacked_vectors = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")  # of each expert
    down_proj_bias: Tensor | None

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        self.spec, inner = spec, spec.intermediate_size
        self.first, rows = ("gate_up_proj", 2 * inner) if spec.gated else ("up_proj", inner)
        matrices = torch.empty(spec.num_experts, rows, hidden_size)
        setattr(self, self.first, nn.Parameter(matrices))
        self.down_proj = nn.Parameter(torch.empty(spec.num_experts, hidden_size, inner))
        setattr(self, f"{self.first}_bias", None)
        self.down_proj_bias = None
        if spec.bias:
            setattr(self, f"{self.first}_bias", nn.Parameter(torch.empty(spec.num_experts, rows)))
            self.down_proj_bias = nn.Parameter(torch.empty(spec.num_experts, hidden_size))
        self.reset_parameters()

    @property
    def first_bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self, f"{self.first}_bias")
        return bias

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise matrices from a normal distribution, biases with zeros."""
        nn.init.normal_(getattr(self, self.first), 0.0, std, generator)
        nn.init.normal_(self.down_proj, 0.0, std, generator)
        for bias in (self.first_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def canonical_form(self, path: str, name: str) -> Expr:
        """Separate projections of each expert: `0.gate_proj.weight`, `0.gate_proj.bias`, and so on.

        Here a matrix has the projection's own name, and its bias that name plus `_bias`.
        """
        num_experts, rows, *rest = shape_of(self.get_parameter(name))
        projection = name.removesuffix("_bias")
        kind = "weight" if projection == name else "bias"

        def of_each(projection: str, rows: int) -> Expr:
            return Stack(
                tuple(Ref(f"{path}.{e}.{projection}.{kind}", (rows, *rest)) for e in range(num_experts))
            )

        if projection == "gate_up_proj":
            return Cat((of_each("gate_proj", rows // 2), of_each("up_proj", rows // 2)), dim=1)
        return of_each(projection, rows)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, H], weights [T, k], experts [T, k] -> [T, H]."""
        routes = None if self.exchange is None else self.exchange.plan(experts)
        if self.activation_memory == "mlp" and torch.is_grad_enabled():
            return recompute(self._forward, routes, x, weights, experts, *self._made_matrices())
        return self._forward(routes, x, weights, experts)

    def _made_matrices(self) -> tuple[Tensor, ...]:
        """Matrices computed by parametrizations, or nothing for plain ones. Adapters withdraw theirs when
        this call returns, before recomputation. Plain parameters are read on use, as sharding requires.
        """
        return (getattr(self, self.first), self.down_proj) if is_parametrized(self) else ()

    def _forward(
        self, routes: Routes | None, x: Tensor, weights: Tensor, experts: Tensor, *matrices: Tensor
    ) -> Tensor:
        first, down = matrices or (getattr(self, self.first), self.down_proj)
        biases = as_wide_as(first, self.first_bias), as_wide_as(down, self.down_proj_bias)
        spec, num_rows = self.spec, None
        if routes is not None:
            own = routes.exchange.parameter
            first, down, biases = own(first), own(down), (own(biases[0]), own(biases[1]))
            x, weights, experts = routes.there(x, weights, experts)
            num_rows = routes.num_slots
        operands = x, weights, experts, first, down
        y = moe_experts(*operands, spec.activation, *biases, weighted=spec.weighted, num_rows=num_rows)
        return y if routes is None else routes.back(y)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token, as on a GPU: the first product of each of its experts, and the permutation
        of rows sorted by expert, both ways. The tiles' offsets are negligible.
        """
        if level == "mlp" or level in RERUN:
            return 0
        spec, exchange = self.spec, self.exchange
        parts = 2 if spec.gated else 1
        kept = spec.experts_per_token * (parts * itemsize * spec.intermediate_size + 8)
        if exchange is not None:
            kept += exchange.kept_bytes(self.down_proj.shape[1], spec.experts_per_token, itemsize)
        return kept

    def extra_repr(self) -> str:
        num_experts, hidden, inner = shape_of(self.down_proj)
        return f"{num_experts} of {hidden} x {inner}, activation={self.spec.activation!r}"
