"""Devices that models can be on, and models that are laid out without initial values."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from liger_models.convert.errors import ConfigError
from liger_models.kernels._dispatch import has_matrix_units

_UNTRIED = (
    "liger_models has never run on MPS, where torch has had silent errors: compare the first losses with a "
    "CPU's (--device cpu), and please tell us how it goes"
)


def default_device() -> str:
    """Device of programs in which none is named: "cuda", "mps" or "cpu", the first that is there."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """Parse a device and check that it exists; None is torch's default.

    Raises:
        ConfigError: torch does not know the device, or has none of it.
    """
    if device is None:
        return None
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {str(device)!r} cannot be used ({reason}); 'cpu' always can") from error
    return parsed


def device_for(dtype: torch.dtype, device: str | torch.device | None) -> torch.device | None:
    """Parse a device for weights of this dtype: see `parse_device`.

    Raises:
        ConfigError: also for weights in bfloat16 on a GPU that does not compute in it.
    """
    parsed = parse_device(device)
    if parsed is not None and parsed.type == "mps":
        warnings.warn(_UNTRIED, stacklevel=2)
    if parsed is None or parsed.type != "cuda" or has_matrix_units(parsed):
        return parsed
    name = torch.cuda.get_device_name(parsed)
    if dtype == torch.bfloat16:
        raise ConfigError(
            f"the weights are in bfloat16, which {name} does not support (NVIDIA's GPUs do from Ampere on, "
            "such as A100, RTX 3060 and L4); to train, pass dtype='float32' (--dtype float32), which is "
            "slower; to generate, dtype='float16'"
        )
    warnings.warn(
        f"{name} is older than the GPUs that Triton compiles matrix products for (Ampere and later): every "
        "operation runs in its plain PyTorch form, which is slower and takes more memory",
        stacklevel=2,
    )
    return parsed


class WithoutInitialisation(TorchFunctionMode):
    """Skip the random initialisation of parameters that are about to be overwritten.

    On the meta device it would cost nothing in itself, but torch imports its compiler for it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)
