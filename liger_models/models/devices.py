"""Devices that models can be on."""

from __future__ import annotations

import torch

from liger_models.convert.errors import ConfigError


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """A device that is there; None for torch's default.

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
