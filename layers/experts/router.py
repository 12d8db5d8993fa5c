"""Routers: the choice of each token's experts, and their weights.

The choice is in kernels/experts/moe_routing.py or, for random routing, in layers/experts/sparse_mixer.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels import rms_norm, route
from liger_models.kernels._dispatch import at_least_float32
from liger_models.kernels.experts.moe_routing import route_plain
from liger_models.layers.experts.sparse_mixer import decide, draw_noise, weigh
from liger_models.layers.projections.float32_product import product_in_float32
from liger_models.layers.projections.linear import project
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.sequences.routing_decisions import RoutingDecisions, in_backward_pass
from liger_models.layers.specs import MoESpec


class Router(nn.Module):
    """Chooses each token's experts and their weights.

    The optional correction bias is a float32 buffer, saved in checkpoints and untouched by gradients,
    optimizers and mixed precision: layers/experts/load_balance.py changes it between steps.

    Attributes:
        wider_matrices: with logits in float32 the weight may have a wider dtype than other matrices.
        load: with a correction bias, the number of tokens per expert in training mode since load_balance last
            read it, [E] int64; None before the first. Not a buffer: DDP would overwrite it with the first
            rank's, and each rank has its own load.
    """

    correction_bias: Tensor | None
    tid2eid: Tensor | None
    load: Tensor | None = None
    _checked: tuple[int, int] | None = None

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        self.spec = spec
        self.wider_matrices = ("weight",) if spec.float32_router else ()
        self.weight = nn.Parameter(torch.empty(spec.num_logits, hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_logits)) if spec.router_bias else None
        correction = torch.empty(spec.num_choices, dtype=torch.float32) if spec.correction_bias else None
        self.register_buffer("correction_bias", correction)
        if spec.correct_logits and not spec.correction_bias:
            raise ValueError("correct_logits says what the correction bias is added to; there is none")
        table = None
        if spec.by_token_id is not None and (
            correction is not None or (spec.num_groups, spec.top_groups) != (1, 1)
        ):
            raise ValueError(
                "experts by token id are not chosen by scores: no correction bias, and one group"
            )
        if spec.by_token_id is not None:
            table = torch.empty(spec.by_token_id, spec.experts_per_token, dtype=torch.long)
        self.register_buffer("tid2eid", table)
        self.scale = nn.Parameter(torch.empty(hidden_size)) if spec.router_norm_eps is not None else None
        self.per_expert_scale = nn.Parameter(torch.empty(spec.num_choices)) if spec.expert_scale else None
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
        if self.tid2eid is not None:
            ids, k = torch.arange(len(self.tid2eid), device=self.tid2eid.device), self.tid2eid.shape[1]
            experts = ids[:, None] * k + torch.arange(k, device=ids.device)
            self.tid2eid.copy_(experts % self.spec.num_choices)

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
        kept = spec.num_logits * (4 if spec.float32_router else itemsize) + 8 * spec.experts_per_token
        if spec.expert_scale:
            kept += 16 * spec.experts_per_token
        if spec.router_norm_eps is not None:
            kept += 4 + (itemsize * self.weight.shape[1] if level == "all" else 0)
        return kept

    @property
    def decision_bytes(self) -> int:
        """Bytes per token of the decision that a recomputed layer reuses."""
        return 4 * self.spec.experts_per_token

    def forward(
        self, x: Tensor, decisions: RoutingDecisions | None = None, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> logits [T, E], weights [T, k] in float32, experts [T, k] int32. When recomputing a call
        whose decisions are in `decisions`, the same experts are used. A router with a table of experts needs
        the tokens' `ids` [T].
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
        given = None if decisions is None or made is not None else decisions.given.get(self)
        found = None if self.tid2eid is None or made is not None else (self._looked_up(ids),)
        if given is not None:  # detached: a layer that runs again must save as many tensors
            own = found or self._choose(logits.detach(), None)[1]
            made = (torch.where(given < 0, own[0], given),)
        weights, decision = self._choose(logits, made or found)
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
        # The kernel takes different experts of a token, and a table may repeat one.
        weights, experts = (route if self.tid2eid is None else route_plain)(
            logits,
            spec.experts_per_token,
            score=spec.score,
            softmax_after_top_k=spec.softmax_after_top_k,
            renormalize=spec.renormalize,
            renormalize_eps=spec.renormalize_eps,
            correction_bias=self.correction_bias,
            correct_logits=spec.correct_logits,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            group_score=spec.group_score,
            scale=spec.routed_scaling_factor,
            experts=None if made is None else made[0],
        )
        return weights, (experts,)

    def _looked_up(self, ids: Tensor | None) -> Tensor:
        """The experts [T, k] int32 of tokens [T].

        Raises:
            DataError: no ids, or a table of experts that there are not. It is read once, which waits for the
                device.
        """
        table = self.tid2eid
        assert table is not None
        if ids is None:
            raise DataError("this model chooses experts by token ids, and was called without: pass input_ids")
        state = table.data_ptr(), table._version
        if self._checked != state and not table.is_meta:
            low, high = torch.stack(table.aminmax()).tolist()
            if low < 0 or high >= self.spec.num_choices:
                raise DataError(
                    f"the table tid2eid names the expert {low if low < 0 else high}; expected 0 to "
                    f"{self.spec.num_choices - 1}"
                )
            self._checked = state
        return table[ids].int()

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
            self.load = torch.zeros(self.spec.num_choices, dtype=torch.int64, device=chosen.device)
        self.load.index_add_(0, chosen, self.load.new_ones(1).expand(chosen.shape))

    def extra_repr(self) -> str:
        return f"{self.spec.experts_per_token} of {self.spec.num_choices}, score={self.spec.score!r}"


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


class SinkRouter(Router):
    """A router that also weighs experts of every token, the sinks.

        w = softmax(log sigmoid(logits of chosen experts and sinks)) * scaling factor * learned scale

    The choice is as in `Router`. The sinks' logits and weights are the last ones, [T, E + S] and [T, k + S].
    """

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__(hidden_size, spec)
        own = spec.expert_scale or spec.identity_experts or spec.by_token_id is not None
        usual = spec.score == "sigmoid" and spec.renormalize and not spec.softmax_after_top_k
        if own or not usual or not spec.float32_router:
            raise ValueError(
                "sink_experts need logits in float32, and experts chosen by their sigmoids and weighted by "
                f"shares of these, without scales of their own and identity experts; found {spec}"
            )
        self.global_scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """As in `Router`, with a scale of one."""
        super().reset_parameters(std, generator)
        if hasattr(self, "global_scale"):
            nn.init.ones_(self.global_scale)

    def _choose(self, logits: Tensor, made: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Weights [T, k + S], and the decision: the experts [T, k]."""
        routed, of_sinks = logits.split([self.spec.num_choices, self.spec.sink_experts], dim=1)
        (experts,) = super()._choose(routed.detach(), None)[1] if made is None else made
        scores = torch.cat([routed.gather(1, experts.long()), of_sinks], dim=1)
        # By logarithms, since all sigmoids of a token may vanish.
        shares = at_least_float32(F.logsigmoid(scores)).softmax(-1)
        return shares * (self.spec.routed_scaling_factor * self.global_scale.to(shares.dtype)), (experts,)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: those of `Router`, for chosen experts and sinks their scores, shares and
        weights in float32, and the chosen experts in 8 bytes.
        """
        both = self.spec.experts_per_token + self.spec.sink_experts
        return super().activation_bytes(level, itemsize) + 12 * both + 8 * self.spec.experts_per_token


def make_router(hidden_size: int, spec: MoESpec) -> Router:
    """The router of a spec."""
    kind = SparseMixerRouter if spec.sparse_mixer else SinkRouter if spec.sink_experts else Router
    return kind(hidden_size, spec)


_FOR_ROUTE = (
    *("experts_per_token", "score", "softmax_after_top_k", "renormalize", "correction_bias"),
    "correct_logits",
    *("num_groups", "top_groups", "group_score", "routed_scaling_factor", "renormalize_eps"),
    "identity_experts",
    "sink_experts",
)
