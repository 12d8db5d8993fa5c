"""Mixture of experts: MLPs, a few per token (Shazeer et al., 2017, arXiv:1701.06538).

    y = sum over the chosen experts e of weight_e * down_e(act(gate_e(x)) * up_e(x)),   or with weight_e * x
    y = y + scale * shared(x),   or   y + sigmoid(gate(x)) * shared(x)
    y = norm(y), with an output norm

Plain experts compute down_e(act(up_e(x))). Latent experts (LatentMoE: Elango et al., 2026, arXiv:2601.18089)
work in a narrower space. Two matrices, the same for all experts, project into it and out of it:

    y = fc2(sum of weight_e * down_e(act(up_e(fc1(x))))) + shared(x)

layers/experts/router.py chooses experts and their weights. Native weights are stacked: gate_up_proj
[E, 2 I, H], the gate's rows first, or up_proj [E, I, H] of plain experts, and down_proj [E, H, I].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref, Stack
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.kernels import ExpertPath, StoredMatrices, moe_experts
from liger_models.kernels.experts.moe_experts import SPARE
from liger_models.layers.experts.deepep_tokens import DeepEPRoutes
from liger_models.layers.experts.expert_parallel import ExpertExchange, Routes
from liger_models.layers.experts.gathered_tokens import GatheredRoutes
from liger_models.layers.experts.input_noise import InputNoise
from liger_models.layers.experts.router import make_router
from liger_models.layers.parts.mlp import make_mlp
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.float8 import Float8Settings, check_float8
from liger_models.layers.projections.linear import Linear, as_wide_as, unwrapped
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory, recompute
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import MoESpec


class MixtureOfExperts(nn.Module):
    """A router, its experts, and optionally a shared expert.

    Args:
        hidden_size: the width H of input and output.
        spec: the experts, the routing, the shared expert.

    Raises:
        ValueError: a gate or a scale without a shared expert, biases of latent projections without these, or
            experts of pictures, which `ModalExperts` has.
    """

    has_image_experts = False

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        if spec.shared_expert is None and (spec.shared_gate or spec.shared_scale != 1.0):
            raise ValueError(
                "shared_gate and shared_scale belong to a shared expert, but shared_expert is None"
            )
        if spec.latent_bias and spec.latent_size is None:
            raise ValueError("latent_bias is that of the latent projections, but latent_size is None")
        if (spec.image_size is not None) != self.has_image_experts:
            raise ValueError(f"image_size is {spec.image_size}, of a {type(self).__name__}")
        self.spec, self.hidden_size = spec, hidden_size
        self.input_noise = InputNoise(spec.input_noise) if spec.input_noise else None
        self.router = make_router(hidden_size, spec)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if spec.latent_size is not None:
            self.fc1_latent_proj = Linear(hidden_size, spec.latent_size, bias=spec.latent_bias)
            self.fc2_latent_proj = Linear(spec.latent_size, hidden_size, bias=spec.latent_bias)
        self.experts = Experts(spec.input_size(hidden_size), spec)
        self.shared_expert = None if spec.shared_expert is None else make_mlp(hidden_size, spec.shared_expert)
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if spec.shared_gate else None
        self.output_norm = None if spec.output_norm is None else make_norm(hidden_size, spec.output_norm)

    def forward(
        self,
        x: Tensor,
        sequences: Sequences | None = None,
        routed_by: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H]. The router stores its decisions in `sequences`, and its logits if it has losses
        or they are requested. `routed_by` [T, H] is the router's input, if not x; `ids` [T] are the tokens'
        ids, if they determine the experts.
        """
        if self.input_noise is not None:
            x = self.input_noise(x)
        shared = None
        if self.shared_expert is not None and getattr(unwrapped(self.experts), "exchange", None) is not None:
            shared = functools.cache(functools.partial(self._shared, x))
        y, logits = self.routed(x, sequences, x if routed_by is None else routed_by, shared, ids)
        self._note(logits, sequences)
        return self._with_shared(x, y, shared)

    def routed(
        self,
        x: Tensor,
        sequences: Sequences | None,
        routed_by: Tensor,
        meanwhile: Callable[[], object] | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output of the routed experts for x [T, H], and the router's logits [T, E]."""
        notes = None if sequences is None else sequences.notes.routing
        logits, weights, experts = self.router(routed_by, notes, ids)
        share = None
        if self.spec.identity_experts:
            weights, experts, share = _without_identity(weights, experts, self.spec.num_experts)
        latent = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        y: Tensor = self.experts(latent, weights, experts, sequences, meanwhile)
        if self.fc2_latent_proj is not None:
            y = self.fc2_latent_proj(y)
        if share is not None:
            y = (y + x * share).to(y.dtype)
        return y, logits

    def _note(self, logits: Tensor, sequences: Sequences | None) -> None:
        if sequences is not None and (self.spec.has_router_loss or sequences.notes.router_logits.asked_for):
            sequences.notes.router_logits.note(logits)

    def _with_shared(self, x: Tensor, y: Tensor, shared: Callable[[], Tensor] | None = None) -> Tensor:
        """The mixture's output, from that of the routed experts, y [T, H]."""
        if self.shared_expert is not None:
            alpha = self.spec.shared_scale
            y = torch.add(y, self._shared(x) if shared is None else shared(), alpha=alpha)
        return y if self.output_norm is None else self.output_norm(y)

    def _shared(self, x: Tensor) -> Tensor:
        """The shared expert's output [T, H]."""
        assert self.shared_expert is not None
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid() * shared
        return shared

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: those of its parts, the latent experts' input and output, both factors of a
        gated shared expert, and for input noise the numbers and their product with x; with identity experts
        which slots are theirs, the sum of their weights, and if the others are recomputed, the weights again.
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
        if self.output_norm is not None:
            kept += self.output_norm.activation_bytes(level, itemsize)
        if self.spec.identity_experts:
            kept += (5 if level == "mlp" else 1) * self.spec.experts_per_token + 4
        return kept


def _without_identity(weights: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and experts [T, k] of the MLPs, and the sum of the identity experts' weights, [T, 1]. An
    identity expert's slot goes to an MLP with the weight 0: leaving slots out would need their number on the
    host.
    """
    identity = experts >= num_experts
    share = weights.where(identity, 0).sum(-1, keepdim=True)
    return weights.masked_fill(identity, 0), experts % num_experts, share


# Rows of an expert from which its float8 products save clearly more time than quantising its matrices takes.
# On an H100, at Qwen3-30B-A3B's shape, products of 1024 rows of each expert save 1.1 ms of a layer's 3.4, and
# quantising takes 1.8 ms, nearly all of it for the matrices.
FLOAT8_ROWS = 2048

Matrices = Tensor | StoredMatrices
Paths = Mapping[str, Sequence[ExpertPath]]  # of each stack, by its parameter's name
NO_PATHS: Paths = MappingProxyType({})


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
        exchange: of tokens with other ranks, see layers/experts/expert_parallel.py.
        float8: run the products with the matrices in float8, forward and for the gradients of their inputs,
            if an expert has `FLOAT8_ROWS` rows on average; None: in their own dtype. Not with low-rank
            paths, and not under torch.compile. See `set_float8`.
        first_number: of the experts in names of checkpoints, where others come before them.
    """

    activation_memory: ActivationMemory = "lean"
    exchange: ExpertExchange | None = None
    float8: Float8Settings | None = None
    first_number = 0
    stacked_vectors: tuple[str, ...] = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")  # of each one
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
        numbers = range(self.first_number, self.first_number + num_experts)
        projection = name.removesuffix("_bias")
        kind = "weight" if projection == name else "bias"

        def of_each(projection: str, rows: int) -> Expr:
            return Stack(tuple(Ref(f"{path}.{e}.{projection}.{kind}", (rows, *rest)) for e in numbers))

        if projection == "gate_up_proj":
            return Cat((of_each("gate_proj", rows // 2), of_each("up_proj", rows // 2)), dim=1)
        return of_each(projection, rows)

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        sequences: Sequences | None = None,
        meanwhile: Callable[[], object] | None = None,
        paths: Paths = NO_PATHS,
    ) -> Tensor:
        """x [T, H], weights [T, k], experts [T, k] -> [T, H]. `paths` are low-rank paths of the matrices, by
        their names, `first` and down_proj. Ranks that share experts exchange their numbers of tokens once
        per `sequences`, and may call `meanwhile` while tokens travel.
        """
        if self.exchange is not None:
            return self._exchanged(x, weights, experts, sequences, meanwhile, paths)
        return self._run(None, paths, x, weights, experts)

    @torch._disable_dynamo  # the public decorator imports the compiler, which takes seconds
    def _exchanged(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        sequences: Sequences | None,
        meanwhile: Callable[[], object] | None,
        paths: Paths,
    ) -> Tensor:
        assert self.exchange is not None
        routes = self.exchange.plan(x, experts, sequences)
        if not self._runs_again(x):
            routes.meanwhile = meanwhile
        return self._run(routes, paths, x, weights, experts)

    def _run(
        self,
        routes: Routes | GatheredRoutes | DeepEPRoutes | None,
        paths: Paths,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
    ) -> Tensor:
        if self._runs_again(x) and torch.is_grad_enabled():
            return recompute(self._forward, routes, paths, x, weights, experts, *self._made_matrices())
        return self._forward(routes, paths, x, weights, experts)

    def _made_matrices(self) -> tuple[Tensor, ...]:
        """Matrices of parametrizations, which adapters withdraw when this call returns."""
        return (getattr(self, self.first), self.down_proj) if is_parametrized(self) else ()

    def _runs_again(self, x: Tensor) -> bool:
        return self.activation_memory == "mlp"

    def _matrices(self, x: Tensor) -> tuple[Matrices, Matrices]:
        return getattr(self, self.first), self.down_proj

    def _forward(
        self,
        routes: Routes | GatheredRoutes | DeepEPRoutes | None,
        paths: Paths,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *matrices: Tensor,
    ) -> Tensor:
        first, down = matrices or self._matrices(x)
        biases = as_wide_as(first, self.first_bias), as_wide_as(down, self.down_proj_bias)
        spec, num_rows, exchange = self.spec, None, None
        if routes is not None:
            own = routes.exchange.parameter
            counted = self.float8 is not None or isinstance(first, StoredMatrices)
            x, weights, experts = routes.there(x, weights, experts, counted)
            split = functools.partial(routes.exchange.path, num_experts=spec.num_experts)
            paths = {name: [*map(split, of_stack)] for name, of_stack in paths.items()}
            num_rows, exchange = routes.num_slots, routes.rows
            divides = exchange is None or any(paths.values()) or not exchange.divides(x, first, down)
            first, down = own(first, divides), own(down, divides)
            biases = own(biases[0]), own(biases[1])
        # With rows of all ranks' tokens, the host may not know yet how many are of this rank's experts.
        mean = experts.numel() / spec.num_experts if num_rows is None else num_rows / first.shape[0]
        y = moe_experts(
            *(x, weights, experts, first, down, spec.activation, *biases),
            weighted=spec.weighted,
            num_rows=num_rows,
            gate_up_paths=paths.get(self.first, ()),
            down_paths=paths.get("down_proj", ()),
            exchange=exchange,
            float8=not any(paths.values()) and self._gains_from_float8(x, first, mean),
        )
        return y if routes is None else routes.back(y)

    @property
    def float8_copies(self) -> dict[str, int]:
        """Bytes of a stack's copy in float8, which exists during a product, by the parameter's name."""
        names = () if self.float8 is None else (self.first, "down_proj")
        return {name: math.prod(shape_of(self.get_parameter(name))) for name in names}

    def _gains_from_float8(self, x: Tensor, first: Matrices, rows: float) -> bool:
        """Whether the products run in float8: if an expert's `rows` make up for quantising its matrices."""
        settings = self.float8
        if settings is None or isinstance(first, StoredMatrices) or torch.compiler.is_compiling():
            return False
        if not settings.emulate and rows < FLOAT8_ROWS:
            return False
        device, dtypes = x.device, (x.dtype, first.dtype)
        if torch.is_autocast_enabled(device.type):
            dtypes = (torch.get_autocast_dtype(device.type),) * 2
        check_float8(device, *dtypes, settings)
        return True

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token, as on a GPU: the first product of each of its experts, and the permutation
        of rows sorted by expert, both ways. The tiles' offsets are negligible.
        """
        if level == "mlp" or level in RERUN:
            return 0
        spec, exchange = self.spec, self.exchange
        parts = 2 if spec.gated else 1
        rows, order = parts * itemsize * spec.intermediate_size, 8
        if exchange is None:
            return spec.experts_per_token * (rows + order)
        if exchange.ranks <= spec.experts_per_token:  # rows of a window, and the order of all ranks' slots
            rows, order = rows + rows // SPARE, order * exchange.ranks
        kept = spec.experts_per_token * (rows + order)
        return kept + exchange.kept_bytes(self.down_proj.shape[1], spec.experts_per_token, itemsize)

    def extra_repr(self) -> str:
        num_experts, hidden, inner = shape_of(self.down_proj)
        return f"{num_experts} of {hidden} x {inner}, activation={self.spec.activation!r}"
