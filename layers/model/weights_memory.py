"""Where a model's weights are: on its device, or in host memory (layers/recompute/host_weights.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_models.layers.recompute.host_weights import HostWeights


class WeightsMemory(nn.Module):
    """A decoder whose frozen weights can be in host memory.

    Attributes:
        host_weights: those weights; None if all are on the device.
    """

    host_weights: HostWeights | None = None

    def keep_weights_on_host(self, device: torch.device | str | None = None) -> None:
        """Move the frozen weights of the layers, the embedding and the head to host memory. From now on they
        are copied to the device one layer ahead of their use, in both passes. Everything else, such as norms
        and adapters, moves to the device. Results have the same bits.

        Call it again after adding modules, such as adapters; `liger_models.train` does so.

        Args:
            device: where the layers run. Default: where the model is.

        Raises:
            ValueError: no weight is frozen; or they are sharded, or quantised in a form that is tied to a
                device (int8).
        """
        own: Any = self
        found = self.host_weights.device if self.host_weights else own.embed_tokens.weight.device
        device = torch.device(found if device is None else device)
        _check(self)
        if self.host_weights is None:
            head = getattr(self, "lm_head", None)
            units = [own.embed_tokens, *own.layers, *([] if head is None else [head])]
            self.host_weights = HostWeights(units, device)
        weights = self.host_weights
        weights.take([p for unit in weights.units for p in unit.parameters() if not p.requires_grad])
        for module in self.modules():
            for p in module._parameters.values():
                if p is not None and not weights.has(p):
                    p.data = p.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.host_weights is not None:
            raise RuntimeError(
                "the weights are in host memory (weights_memory='host'), so the model cannot be moved or "
                "cast; load it with the device and the dtype that it should have"
            )
        return super()._apply(fn, recurse)


def _check(model: nn.Module) -> None:
    if all(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "weights_memory='host' is for frozen weights, and all of this model's are trained; freeze them "
            "(model.requires_grad_(False)) and add adapters"
        )
    for name, p in model.named_parameters():
        if hasattr(p, "to_local"):
            raise ValueError(
                f"{name} is sharded; weights_memory='host' supports one process only (FSDP2 has its own)"
            )
        if type(p).__name__ == "Int8Params":
            raise ValueError(
                f"{name} is int8 of bitsandbytes, whose layers keep their weights on the GPU; quantise to "
                "nf4, or keep the bits of a quantised checkpoint"
            )
