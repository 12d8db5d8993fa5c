"""MLPs: gated (Shazeer, 2020, arXiv:2002.05202), and with a squared ReLU (So et al., 2021, arXiv:2109.08668).

    down(act(gate(x)) * up(x)) + b
    down(max(up(x), 0)^2) + b

One matrix product for gate and up; their weights lie below one another, gate first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from liger_models.kernels import geglu, relu2, swiglu
from liger_models.layers.activation_memory import carry_recipe, output_is_ours
from liger_models.layers.packed_linear import PackedLinear
from liger_models.layers.spec import MLPSpec

_GATED: dict[str, Callable[..., Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": functools.partial(geglu, approximate="tanh"),
    "gelu": functools.partial(geglu, approximate="none"),
}


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`.

    Args:
        hidden_size: the width H of input and output.
        spec: intermediate size, activation, bias.
    """

    def __init__(self, hidden_size: int, spec: MLPSpec):
        super().__init__()
        self.spec = spec
        self.gated_product = _GATED[spec.activation]
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = PackedLinear(hidden_size, parts, spec.bias)
        self.down_proj = nn.Linear(spec.intermediate_size, hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        gate_up = self.gate_up_proj(x)
        product = self.gated_product(gate_up, reuse_input=output_is_ours(self.gate_up_proj))
        return self.down_proj(carry_recipe(product, self.gated_product, gate_up))

    def extra_repr(self) -> str:
        return f"activation={self.spec.activation!r}"


class LigerSwiGLUMLP(GatedMLP):
    """The MLP of LLaMA and most of its kin: `down(silu(gate(x)) * up(x))`, for use in any model.

    Args:
        hidden_size, intermediate_size: the widths outside and inside.
        bias: whether the three projections have one.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__(hidden_size, MLPSpec(intermediate_size, "silu", bias))


class LigerGEGLUMLP(GatedMLP):
    """The MLP of Gemma: `down(gelu_tanh(gate(x)) * up(x))`, for use in any model.

    Args:
        hidden_size, intermediate_size: the widths outside and inside.
        bias: whether the three projections have one.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__(hidden_size, MLPSpec(intermediate_size, "gelu_tanh", bias))


class LigerReLUSquaredMLP(nn.Module):
    """The MLP of Nemotron: `down(max(up(x), 0)^2)`, for use in any model.

    Args:
        hidden_size, intermediate_size: the widths outside and inside.
        bias: whether the two projections have one.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        up = self.up_proj(x)
        return self.down_proj(carry_recipe(relu2(up), relu2, up))
