"""Checkpoints with quantised weights, as they are written: `Encoder` of checkpoints/writing.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from liger_models.convert.checkpoints.tensor_bytes import same_bits
from liger_models.convert.checkpoints.tensor_files import Output
from liger_models.convert.errors import CheckpointError
from liger_models.convert.quantised.codes import FLOAT4, FLOAT8
from liger_models.convert.quantised.encoding import encode
from liger_models.convert.quantised.formats import CODES, SCALE, SECOND, Blocks
from liger_models.convert.quantised.reader import ModelReader


class AsLoaded:
    """Writes a checkpoint in the format of the one that was read. Weights that did not change keep their
    bits; others are quantised anew.

    Raises:
        CheckpointError: the checkpoint that was read is not quantised, or is gone.
    """

    def __init__(self, folder: Path):
        self._reader = ModelReader(folder)
        if (found := self._reader.quantisation) is None or not found.weights:
            self._reader.close()
            raise CheckpointError(f"{folder}: its weights are not quantised; omit quantization='as_loaded'")
        self._found = found
        self.settings, self.metadata = found.settings, found.metadata or None
        self.extras = {name: self._reader.read_stored(name) for name in (*found.ignored, *found.described_by)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._reader.close()

    def outputs(self, outputs: Mapping[str, Output]) -> dict[str, Output]:
        stored, found = self._reader.stored, {}
        for name, output in outputs.items():
            if (weight := self._found.weights.get(name)) is None:
                found[name] = output
                continue
            for info in weight.parts.values():
                found[info.name] = Output(stored[info.name].shape, stored[info.name].dtype)
        return found | {name: Output(tuple(x.shape), x.dtype) for name, x in self.extras.items()}

    def encode(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        weight = self._found.weights.get(name)
        if weight is None:
            yield name, tensor
            return
        tensor, old = tensor.cpu(), self._reader.read_dense(name, tensor.dtype)
        if old.shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has the shape {tuple(tensor.shape)}, but {tuple(old.shape)} in "
                f"{self._reader.folder}; omit quantization='as_loaded'"
            )
        if same_bits(old.contiguous(), tensor.contiguous()):
            yield from ((info.name, self._reader.read_stored(info.name)) for info in weight.parts.values())
            return
        if weight.transposed:
            tensor = tensor.transpose(-1, -2)
        for role, part in encode(weight.format, tensor, weight.parts[SCALE].dtype).items():
            info = weight.parts[role]
            yield info.name, part.reshape(info.shape).view(info.dtype)


@dataclass(frozen=True)
class Target:
    """A format for servers.

    Attributes:
        format: of every weight.
        scale_dtype: of the scales of blocks.
        endings: of the names of the parts, after the weight's.
        stacked: whether experts are stacked, inputs by outputs, and stored transposed.
    """

    format: Blocks
    scale_dtype: torch.dtype
    endings: Mapping[str, str]
    stacked: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether readers take a weight of this shape in this format."""
        if self.stacked:
            return len(shape) == 3 and shape[1] % 32 == 0
        rows, columns = (self.format.block[0] or 1, self.format.block[1] or 1)
        return len(shape) == 2 and shape[0] % max(rows, 16) == 0 and shape[1] % columns == 0

    def parts(self, shape: tuple[int, ...]) -> dict[str, Output]:
        """Shapes and dtypes of the parts of a weight."""
        if self.stacked:
            experts, inputs, outputs = shape
            grid = (experts, outputs, inputs // 32)
            return {CODES: Output((*grid, 16), torch.uint8), SCALE: Output(grid, self.scale_dtype)}
        codes = self.format.codes
        found = {
            CODES: Output((shape[0], codes.words(shape[1])), codes.dtypes[0]),
            SCALE: Output(self.format.grid(shape), self.scale_dtype),
        }
        return found | ({SECOND: Output((1,), torch.float32)} if self.format.second else {})


TARGETS = {
    "fp8-block": Target(Blocks(FLOAT8, (128, 128)), torch.float32, {CODES: "", SCALE: "_scale_inv"}),
    "nvfp4": Target(
        Blocks(FLOAT4, (1, 16), second="divided by"),
        torch.float8_e4m3fn,
        {CODES: "_packed", SCALE: "_scale", SECOND: "_global_scale"},
    ),
    "mxfp4": Target(Blocks(FLOAT4, (1, 32)), torch.uint8, {CODES: "_blocks", SCALE: "_scales"}, stacked=True),
}


class Quantiser:
    """Writes a dense model in a format for servers.

    Args:
        kind: a name in `TARGETS`.
        weights: names of the weights of a checkpoint to be quantised, all of a shape that readers accept.
        others: names of its other matrices.
    """

    extras: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None = None

    def __init__(self, kind: str, weights: set[str], others: set[str]):
        self._target, self._weights = TARGETS[kind], weights
        self.settings = _settings(kind, sorted(name.removesuffix(".weight") for name in others))
        self.extras = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def outputs(self, outputs: Mapping[str, Output]) -> dict[str, Output]:
        found: dict[str, Output] = {}
        for name, output in outputs.items():
            if name in self._weights:
                parts = self._target.parts(output.shape)
                found |= {f"{name}{self._target.endings[role]}": part for role, part in parts.items()}
            else:
                found[name] = output
        return found

    def encode(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name not in self._weights:
            yield name, tensor
            return
        target, shapes = self._target, self._target.parts(tuple(tensor.shape))
        dense = tensor.transpose(-1, -2) if target.stacked else tensor
        for role, part in encode(target.format, dense, target.scale_dtype).items():
            yield f"{name}{target.endings[role]}", part.reshape(shapes[role].shape)


def _settings(kind: str, dense: list[str]) -> dict[str, Any]:
    """The quantization_config that transformers and vLLM read."""
    if kind == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": dense}
    if kind == "fp8-block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": dense,
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": dense,
    }
