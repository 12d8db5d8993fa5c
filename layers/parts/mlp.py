"""MLPs: gated (Shazeer, 2020, arXiv:2002.05202), and plain with two projections (Vaswani et al., 2017,
arXiv:1706.03762).

    down(act(gate(x)) * up(x)) + b
    down(act(up(x))) + b

A norm of the input of `down` may precede it.

Gate and up are one matrix product with concatenated weights, gate first. The input of `down` carries a
recipe: inside a model only gate and up are saved for the backward pass, and at activation memory level `mlp`
not even those. At levels `tiled` and `offload` they exist for one tile of the sequence at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels import (
    CappedSwiGLU,
    ClampedSwiGLU,
    capped_swiglu,
    clamped_swiglu,
    geglu,
    relu2,
    relu2_gated,
    swiglu,
)
from liger_models.kernels._dispatch import autocasts, use_triton
from liger_models.kernels.activations.gated_linear import gated_linear
from liger_models.kernels.activations.sparse_gated import sparse_gated
from liger_models.kernels.float8.eight_bits import (
    eight_bits_bytes,
    gated_eight_bits,
    gated_from_eight_bits,
)
from liger_models.layers.parts.activations import XIELU
from liger_models.layers.parts.norm import LigerRMSNorm, make_norm
from liger_models.layers.projections.clipped_linear import ClippedLinear, ClippedProjections
from liger_models.layers.projections.float8 import Float8Settings
from liger_models.layers.projections.linear import (
    Linear,
    as_wide_as,
    float8_of,
    is_plain,
    project_scaled,
    saved_input_bytes,
    unwrapped,
)
from liger_models.layers.projections.packed_linear import PackedLinear, in_order
from liger_models.layers.recompute.activation_memory import (
    TILED,
    ActivationMemory,
    carry_float8_recipe,
    carry_recipe,
    output_is_ours,
    recipes_are_kept,
    recompute,
)
from liger_models.layers.recompute.tiles import mlp_in_tiles
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import MLPSpec

_GATED: dict[str, Callable[..., Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": functools.partial(geglu, approximate="tanh"),
    "gelu": functools.partial(geglu, approximate="none"),
    "relu2": relu2_gated,
}


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)` (Hendrycks and Gimpel, 2016, arXiv:1606.08415, section 2), as in CLIP."""
    return x * torch.sigmoid(1.702 * x)


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "silu": F.silu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": functools.partial(F.threshold, threshold=0.0, value=0.0),  # keeps its input, F.relu its output
    "relu2": relu2,
}


def make_mlp(hidden_size: int, spec: MLPSpec) -> GatedMLP | PlainMLP:
    """Create the MLP that the spec describes."""
    return GatedMLP(hidden_size, spec) if spec.gated else PlainMLP(hidden_size, spec)


def gated_product(activation: str | ClampedSwiGLU | CappedSwiGLU) -> Callable[..., Tensor]:
    """Kernel of `act(gate) * up`, for packed or separate gate and up.

    Raises:
        ValueError: no kernel for this activation.
    """
    if isinstance(activation, ClampedSwiGLU):
        return functools.partial(clamped_swiglu, **vars(activation))
    if isinstance(activation, CappedSwiGLU):
        return functools.partial(capped_swiglu, limit=activation.limit)
    return _chosen(_GATED, activation, "gated")


def plain_activation(activation: str | ClampedSwiGLU | CappedSwiGLU) -> Callable[..., Tensor]:
    """Function of an activation without a gate.

    Raises:
        ValueError: unknown name, or an activation with parameters.
    """
    return _chosen(_PLAIN, activation, "plain")


def scaled_product(
    product: Callable[..., Tensor], scale: float, gate_up: Tensor, reuse_input: bool = False
) -> Tensor:
    """`product` of a gate multiplied by `scale`, and up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return product(gate * scale, up)


class _MLP(nn.Module):
    """Base of both MLPs: decides whether the input of `down` is saved or recomputed."""

    activation_memory: ActivationMemory = "lean"
    spec: MLPSpec
    down_proj: nn.Module
    down_norm: LigerRMSNorm | None

    def forward(
        self,
        x: Tensor,
        sequences: Sequences | None = None,
        added: nn.Module | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """x [..., H] -> [..., H], multiplied by `scale`. `sequences` is unused; MoE layers take it in the
        same position. The output of `added` for x is added to that of the first projection.
        """
        if added is not None:
            again = self.activation_memory == "mlp" or self.activation_memory in TILED
            return recompute(self._forward, x, added, scale) if again else self._forward(x, added, scale)
        if self.activation_memory == "mlp" and torch.is_grad_enabled():
            return recompute(self._forward, x, None, scale)
        if self.activation_memory in TILED:
            y = self._in_tiles(x)
            return y if scale == 1.0 else y * scale
        return self._forward(x, None, scale)

    def _forward(self, x: Tensor, added: nn.Module | None = None, scale: float = 1.0) -> Tensor:
        raise NotImplementedError

    def _in_tiles(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def makes_product_in_place(self) -> bool:
        """Whether the input of `down` is made again in the memory of its gradient, when recipes are kept: if
        a kernel does so, and down is a plain linear layer with a trained weight.
        """
        spec, down = self.spec, self.down_proj
        weight = down._parameters.get("weight") if is_plain(down) else None
        return type(weight) is nn.Parameter and weight.requires_grad and spec.joins_down

    def _make_norm(self) -> LigerRMSNorm | None:
        if self.spec.down_norm is None:
            return None
        norm = make_norm(self.spec.intermediate_size, self.spec.down_norm)
        assert isinstance(norm, LigerRMSNorm)
        norm.remakes_input = True
        return norm

    def _normed(self, product: Tensor) -> Tensor:
        """The input of `down`."""
        return product if self.down_norm is None else cast(Tensor, self.down_norm(product))

    def _then_norm(self, activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`activation`, and the norm of its output."""
        return activation if self.down_norm is None else _Normed(activation, self.down_norm)

    def _norm_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token of the norm: 1/rms in float32, and its output with `all`."""
        if self.down_norm is None or level not in ("all", "lean"):
            return 0
        return 4 + (itemsize * self.spec.intermediate_size if level == "all" else 0)

    def _down_in_place(self, inputs: Tensor, first: nn.Module, scale: float) -> Tensor | None:
        """The activation, `down` and `scale` as one operation on the output of `first`; None if they cannot
        be one.
        """
        if torch.compiler.is_compiling() or not recipes_are_kept() or not self.makes_product_in_place:
            return None
        down = cast(Linear, self.down_proj)
        alike = inputs.dtype == down.weight.dtype and not autocasts(inputs)
        if inputs.dim() != 2 or not alike or not use_triton(inputs, down.weight):
            return None
        weight, bias, reused = down.weight, as_wide_as(down.weight, down.bias), output_is_ours(first)
        if bias is not None and scale != 1.0:
            return None
        return gated_linear(inputs, weight, bias, self.spec.activation, reuse_input=reused, scale=scale)


class _Normed(nn.Module):
    """An activation, and the norm of its output."""

    def __init__(self, activation: Callable[[Tensor], Tensor], norm: LigerRMSNorm):
        super().__init__()
        self.activation, self.norm = activation, norm

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(self.activation(x)))


class GatedMLP(_MLP):
    """`down(act(gate(x)) * up(x))`.

    Args:
        hidden_size: the width H of input and output.
        spec: intermediate size, activation, bias.
    """

    def __init__(self, hidden_size: int, spec: MLPSpec):
        super().__init__()
        self.spec = spec
        if spec.sparsity and spec.gate_scale != 1.0:
            raise ValueError(f"an MLP has a sparsity, {spec.sparsity}, or a gate_scale, {spec.gate_scale}")
        self.gated_product = gated_product(spec.activation)
        if spec.gate_scale != 1.0:
            self.gated_product = functools.partial(scaled_product, self.gated_product, spec.gate_scale)
        elif spec.sparsity:
            share = torch.tensor(spec.sparsity, dtype=torch.float32, device="cpu")
            deviations = torch.special.ndtri(share).item()  # in float32, as in the reference
            self.gated_product = functools.partial(
                sparse_gated, activation=spec.activation, deviations=deviations
            )
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        projections, linear = (ClippedProjections, ClippedLinear) if spec.clipped else (PackedLinear, Linear)
        self.gate_up_proj = projections(hidden_size, parts, spec.bias)
        self.down_norm = self._make_norm()
        self.down_proj = linear(spec.intermediate_size, hidden_size, bias=spec.bias)

    def _forward(self, x: Tensor, added: nn.Module | None = None, scale: float = 1.0) -> Tensor:
        settings = float8_of(self.down_proj)
        plain = self.spec.joins_down and added is None
        if settings is not None and plain and not torch.compiler.is_compiling():
            y = self._forward_in_eight_bits(x, settings)
            return y if scale == 1.0 else y * scale
        first = in_order(self, "gate_up_proj")
        gate_up = first(x)
        gate_up = gate_up if added is None else gate_up + added(x)
        down = self._down_in_place(gate_up, first, scale)
        if down is not None:
            return down
        product = self.gated_product(gate_up, reuse_input=output_is_ours(first))
        product = self._normed(carry_recipe(product, self.gated_product, gate_up))
        return project_scaled(self.down_proj, product, scale)

    def _forward_in_eight_bits(self, x: Tensor, settings: Float8Settings) -> Tensor:
        """Keep gate and up in 8 bits, as the products that read them and their gradients have no more."""
        copies, act = not settings.one_scale, self.spec.activation
        gate_up = in_order(self, "gate_up_proj")(x)
        product, codes, scales = gated_eight_bits(
            gate_up.flatten(0, -2), act, float8=copies, float8_gradient=copies
        )
        again = functools.partial(gated_from_eight_bits, activation=act, dtype=product.dtype)
        carry_float8_recipe(product, functools.partial(again, float8=True), codes, scales)
        carry_recipe(product, again, codes, scales)
        lead = gate_up.shape[:-1]
        del gate_up  # nobody keeps it
        y = self.down_proj(product)
        return y if len(lead) == 1 else y.unflatten(0, lead)

    def _in_tiles(self, x: Tensor) -> Tensor:
        product = self._then_norm(functools.partial(self.gated_product, reuse_input=True))
        return mlp_in_tiles(self, x, in_order(self, "gate_up_proj"), product, self.down_proj, self._forward)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: gate, up and their product, depending on the level; a scaled gate; and two
        moments in float32 of a sparse one.
        """
        kept = {"all": 3.0, "lean": 2.0}.get(level, 0.0)
        if kept and self.spec.sparsity:
            return int(kept) * itemsize * self.spec.intermediate_size + 8
        if kept and self.spec.gate_scale != 1.0:
            kept += 1
        elif kept and float8_of(self.down_proj) is not None and self.spec.joins_down:
            product = saved_input_bytes(unwrapped(self.down_proj), itemsize)
            return int(kept - 2) * product + eight_bits_bytes(self.spec.intermediate_size)
        return int(kept) * itemsize * self.spec.intermediate_size + self._norm_bytes(level, itemsize)

    @property
    def float8_gradient_bytes(self) -> int:
        """Bytes per token of the gradients of the product, of gate and up, and of the latter in float8."""
        in_float8 = float8_of(self.down_proj) is not None and self.spec.joins_down
        return 8 * self.spec.intermediate_size if in_float8 else 0

    def extra_repr(self) -> str:
        sparse = f", sparsity={self.spec.sparsity}" if self.spec.sparsity else ""
        return f"activation={self.spec.activation!r}{sparse}"


class PlainMLP(_MLP):
    """`down(act(up(x)))`.

    Args:
        hidden_size: the width H of input and output.
        spec: intermediate size, activation, bias.
    """

    def __init__(self, hidden_size: int, spec: MLPSpec):
        super().__init__()
        if not spec.plain_gate:
            raise ValueError(
                f"gate_scale is {spec.gate_scale} and sparsity {spec.sparsity}, but a plain MLP has no gate"
            )
        self.spec = spec
        if spec.activation == "xielu":
            self.act_fn = XIELU()
        else:
            self.activation = plain_activation(spec.activation)
        linear = ClippedLinear if spec.clipped else Linear
        self.up_proj = linear(hidden_size, spec.intermediate_size, bias=spec.bias)
        self.down_norm = self._make_norm()
        self.down_proj = linear(spec.intermediate_size, hidden_size, bias=spec.bias)

    def _forward(self, x: Tensor, added: nn.Module | None = None, scale: float = 1.0) -> Tensor:
        up = self.up_proj(x)
        up = up if added is None else up + added(x)
        if self.spec.activation == "xielu":
            return project_scaled(self.down_proj, self._normed(self.act_fn(up)), scale)
        down = self._down_in_place(up, self.up_proj, scale)
        if down is not None:
            return down
        product = self._normed(carry_recipe(self.activation(up), self.activation, up))
        return project_scaled(self.down_proj, product, scale)

    def _in_tiles(self, x: Tensor) -> Tensor:
        activation = self.act_fn if self.spec.activation == "xielu" else self.activation
        return mlp_in_tiles(self, x, self.up_proj, self._then_norm(activation), self.down_proj, self._forward)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: the projection and its activation, depending on the level; for quick_gelu
        also the sigmoid.
        """
        kept = {"all": 2, "lean": 1}.get(level, 0)
        if kept and self.spec.activation == "quick_gelu":
            kept += 1
        return kept * itemsize * self.spec.intermediate_size + self._norm_bytes(level, itemsize)

    def extra_repr(self) -> str:
        return f"activation={self.spec.activation!r}"


class LigerSwiGLUMLP(GatedMLP):
    """MLP of LLaMA and most similar models: `down(silu(gate(x)) * up(x))`, for use in any model.

    Args:
        hidden_size, intermediate_size: the widths outside and inside.
        bias: whether the three projections have biases.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__(hidden_size, MLPSpec(intermediate_size, "silu", bias))


class LigerGEGLUMLP(GatedMLP):
    """The MLP of Gemma: `down(gelu_tanh(gate(x)) * up(x))`, for use in any model.

    Args:
        hidden_size, intermediate_size: the widths outside and inside.
        bias: whether the three projections have biases.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__(hidden_size, MLPSpec(intermediate_size, "gelu_tanh", bias))


class LigerReLUSquaredMLP(PlainMLP):
    """The MLP of Nemotron: `down(max(up(x), 0)^2)`, for use in any model.

    Args:
        hidden_size, intermediate_size: the widths outside and inside.
        bias: whether the two projections have biases.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__(hidden_size, MLPSpec(intermediate_size, "relu2", bias, gated=False))


def _chosen(table: dict[str, Callable[..., Tensor]], activation: object, kind: str) -> Callable[..., Tensor]:
    if not isinstance(activation, str) or activation not in table:
        raise ValueError(f"a {kind} MLP has no activation {activation!r}; expected one of {', '.join(table)}")
    return table[activation]
