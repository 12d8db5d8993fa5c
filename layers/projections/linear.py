"""A projection: `x @ W^T + b`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _of_all_modules

from liger_models.kernels import StoredMatrices
from liger_models.kernels._dispatch import autocasts
from liger_models.kernels.scaled_linear import scaled_linear
from liger_models.layers.projections.float8 import Float8Settings, float8_linear
from liger_models.layers.projections.ternary import is_ternary, ternary_linear
from liger_models.layers.specs.ternary import TernarySpec


class Linear(nn.Linear):
    """torch's linear layer, with a bias that may have a wider dtype than the weight, as in some
    checkpoints.

    Attributes:
        float8: how its products run in float8; None: in the weight's dtype. See `set_float8`.
        float8_largest: of a weight that is gathered in float8 with one scale: its largest magnitude, and the
            event after which it is known (layers/projections/gathered.py).
        ternary: its products are of rounded operands; None: they are not. See `round_operands`.
        passes_adapters: transformers multiplies by the weight without calling the layer, so an adapter has no
            effect there.
    """

    passes_adapters: bool = False
    float8: Float8Settings | None = None
    float8_largest: tuple[Tensor, Any] | None = None
    ternary: TernarySpec | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if self.ternary is not None:
            return ternary_linear(x, self.weight, self.whole_bias(), self.ternary, self.heights)
        if self.float8 is not None:
            return float8_linear(x, self.weight, self.whole_bias(), self.float8)
        return project(x, self.weight, self.whole_bias())

    def whole_bias(self) -> Tensor | None:
        """The bias of each output, [out_features]."""
        return self.bias

    @property
    def heights(self) -> tuple[int, ...]:
        """Outputs of each projection that checkpoints hold by itself."""
        return (self.out_features,)


def round_operands(module: nn.Module, spec: TernarySpec | None) -> None:
    """Let the linear layers of a module, at any depth, multiply rounded operands, or plain ones if None.
    Weights that have three values already are frozen.
    """
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.ternary = spec
            if spec is not None and not spec.rounds_weights:
                layer.weight.requires_grad_(False)


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight^T + bias` for x [..., in], weight [out, in] and bias [out]."""
    return F.linear(x, weight, as_wide_as(weight, bias))


def project_scaled(linear: nn.Module, x: Tensor, scale: float) -> Tensor:
    """`linear(x) * scale`; as one matrix product, if this is a plain linear layer."""
    if scale == 1.0:
        return linear(x)
    weight = linear._parameters.get("weight") if is_plain(linear) else None
    as_one = type(weight) is nn.Parameter and linear.bias is None and x.dim() == 2
    if weight is not None and as_one and x.dtype == weight.dtype and not autocasts(x):
        return scaled_linear(x, weight, scale)
    return linear(x) * scale


def is_plain(linear: nn.Module) -> bool:
    """Whether it is our linear layer itself, without hooks, adapters, float8 or rounded operands."""
    plain = type(linear) is Linear and linear.float8 is None and not is_ternary(linear)
    return plain and not has_hooks(linear)


def as_wide_as(weight: Tensor | StoredMatrices, bias: Tensor | None) -> Tensor | None:
    """The bias in the dtype of the weight."""
    return None if bias is None else bias.to(weight.dtype)


def one_below_another(tensors: Sequence[Tensor]) -> Tensor | None:
    """Join tensors that are contiguous in memory along the first dimension; None if they are not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        alike = tensor.dtype == first.dtype and tensor.is_contiguous() and not tensor.is_meta
        if tensor.data_ptr() != end or not alike:
            return None
        end += tensor.numel() * tensor.element_size()
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # adjacent by chance
        return None
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride())


def unwrapped(module: nn.Module) -> Any:
    """Return the layer inside wrappers of adapters, which call it `base_layer`."""
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        module = base
    return module


def float8_of(module: nn.Module) -> Float8Settings | None:
    """How a layer runs in float8, also inside of wrappers of adapters; None: it does not."""
    return getattr(unwrapped(module), "float8", None)


def saved_input_bytes(layer: nn.Linear, itemsize: int) -> int:
    """Bytes per row that a layer saves of its input for the gradient of its weight: in float8 by rows one for
    each element, and a scale.
    """
    settings = float8_of(layer)
    in_rows = settings is not None and settings.recipe == "rowwise" and layer.weight.requires_grad
    return layer.in_features + 4 if in_rows else itemsize * layer.in_features


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module's forward is replaced, or hooks observe its inputs, outputs or gradients."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return "forward" in vars(module) or any(own) or any(hooks_everywhere())


def hooks_everywhere() -> tuple[dict[int, Any], ...]:
    """Hooks of all modules of the process, by kind."""
    return (
        _of_all_modules._global_forward_hooks,
        _of_all_modules._global_forward_pre_hooks,
        _of_all_modules._global_backward_hooks,
        _of_all_modules._global_backward_pre_hooks,
    )
