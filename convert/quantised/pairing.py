"""Pairing of the quantised tensors of a checkpoint with their scales, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.errors import CheckpointError, ConfigError, abbreviate
from liger_models.convert.quantised.codes import FLOAT8_DTYPES
from liger_models.convert.quantised.formats import CODES, SCALE, SECOND, Blocks, Format, QuantisedWeight

Shape = tuple[int, ...]

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of scales; uint8 are the bytes of float8_e8m0fnu."""
FLOAT_SCALES, EXPONENTS = SCALES[:3], SCALES[3:]

# Scales of activations and of the key/value cache, for servers that compute in eight bits.
OF_ACTIVATIONS = re.compile(
    r"\.(input_scale|output_scale|activation_scale|input_global_scale|input_scale_ub|[qkv]_scale|"
    r"[qkv]_zero_point|input_zero_point|output_zero_point)$|_(input|activation)_scale$|"
    r"_act_quant_(scale|zero_point)$"
)
OF_WEIGHTS = re.compile(
    r"(_scale_inv|weight_scale|weight_scale_2|_scales|_blocks|weight_packed|weight_zero_point|weight_shape|"
    r"weight_g_idx|weight_global_scale|\.absmax|quant_map|\.SCB|quant_state\.\w+|qweight|qzeros|g_idx|"
    r"pre_quant_scale|qscale_weight|_qdata|_zero_point)$"
)
NEVER_DENSE = (*FLOAT8_DTYPES, torch.float8_e8m0fnu, torch.uint8, torch.int8)


class Pairing:
    """The quantised weights of a checkpoint, as they are found.

    Attributes:
        settings: the content of `quantization_config`.
        tensors: the tensors in the files, by name.
        metadata: of the files.
        weights: the quantised weights found, by the name of the dense weight.
        ignored: names of scales of activations.
        described_by: names of further tensors that describe weights.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        folder: Path,
        read: Callable[[TensorInfo], Tensor] | None,
        metadata: Mapping[str, str],
    ):
        self.settings = settings
        self.tensors = tensors
        self.metadata = metadata
        self.weights: dict[str, QuantisedWeight] = {}
        self.ignored: list[str] = []
        self.described_by: list[str] = []
        self._folder = folder
        self._read = read
        self._owned: set[str] = set()  # parts and descriptions of weights

    @property
    def folder_name(self) -> str:
        """The checkpoint's folder, for messages."""
        return str(self._folder)

    def where(self, info: TensorInfo) -> str:
        return str(self._folder / info.file)

    def named(self, *endings: str) -> Iterator[tuple[str, TensorInfo]]:
        """Iterate over the tensors whose names have one of these endings: (the name without it, tensor)."""
        for name, info in self.tensors.items():
            if ending := next((ending for ending in endings if name.endswith(ending)), None):
                yield name.removesuffix(ending), info

    def values(self, info: TensorInfo) -> Tensor | None:
        """Read a small tensor; None if only the headers of the files are known."""
        return None if self._read is None else self._read(info)

    def own(self, info: TensorInfo) -> None:
        """Record a tensor that describes a weight."""
        self.described_by.append(info.name)
        self._owned.add(info.name)

    def get(self, *names: str) -> TensorInfo | None:
        """The tensor with one of these alternative names.

        Raises:
            CheckpointError: there are two.
        """
        found = [self.tensors[name] for name in names if name in self.tensors]
        if len(found) > 1:
            raise CheckpointError(
                f"{self.where(found[0])}: both {found[0].name!r} and {found[1].name!r} are scales of one "
                "weight; remove the one that is wrong"
            )
        return found[0] if found else None

    def companion(self, codes: TensorInfo, *names: str) -> TensorInfo:
        """The tensor with one of these alternative names, which belongs to a quantised one.

        Raises:
            CheckpointError: there is none, or there are two.
        """
        found = self.get(*names)
        if found is None:
            raise CheckpointError(
                f"{self.where(codes)}: tensor {codes.name!r} is quantised ({_name(codes.dtype)}), but "
                f"{' or '.join(map(repr, names))} is not in the checkpoint; without it the weight would be "
                "wrong by a large factor. Download the checkpoint again"
            )
        return found

    def check(
        self, info: TensorInfo, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], weight: Shape
    ) -> None:
        """Check the shape and the dtype of a part of a weight.

        Raises:
            CheckpointError: it has others.
        """
        if info.shape not in shapes or info.dtype not in dtypes:
            raise CheckpointError(
                f"{self.where(info)}: tensor {info.name!r} is {_name(info.dtype)} of shape {info.shape}, "
                f"expected {' or '.join(map(_name, dtypes))} of shape "
                f"{' or '.join(map(str, dict.fromkeys(shapes)))} for a weight of shape {weight} in this "
                "format; config.json or the file belongs to another checkpoint"
            )

    def is_part(self, info: TensorInfo) -> bool:
        """Whether a tensor is a part of a weight that was found."""
        return info.name in self._owned

    def check_matrix(self, codes: TensorInfo, shape: Shape | None = None) -> None:
        """Raise CheckpointError unless a weight, of the shape of its codes by default, is a matrix or a stack
        of them, and not empty.
        """
        shape = codes.shape if shape is None else shape
        if len(shape) < 2 or not math.prod(shape):
            raise CheckpointError(
                f"{self.where(codes)}: tensor {codes.name!r} of shape {shape} is quantised "
                f"({_name(codes.dtype)}), but only matrices and stacks of them can be"
            )

    def add(
        self, name: str, shape: Shape, format: Format, parts: Mapping[str, TensorInfo | None], **options: Any
    ) -> None:
        """Record a quantised weight, whose parts were checked.

        Raises:
            CheckpointError: it is not a matrix, or the checkpoint has the weight in another form, too.
        """
        found = {role: info for role, info in parts.items() if info is not None}
        codes = found[CODES]
        self.check_matrix(codes, shape)
        if name in self.weights or (name in self.tensors and name != codes.name):
            raise CheckpointError(
                f"{self.where(codes)}: tensor {codes.name!r} holds the weight {name!r}, which the checkpoint "
                "has in another form, too; remove the one that is wrong"
            )
        self.weights[name] = QuantisedWeight(name, shape, format, found, **options)
        self._owned |= {info.name for info in found.values()}

    def add_blocks(
        self,
        name: str,
        shape: Shape,
        format: Blocks,
        parts: Mapping[str, TensorInfo | None],
        scales: Sequence[torch.dtype] = SCALES,
    ) -> None:
        """Record a weight in blocks, whose codes and scales are checked here.

        Args:
            scales: dtypes that its scales may have.
        """
        codes, scale = parts[CODES], parts[SCALE]
        assert codes is not None
        assert scale is not None
        self.check(codes, [(*shape[:-1], format.codes.words(shape[-1]))], format.codes.dtypes, shape)
        self.check(scale, format.scale_shapes(shape), scales, shape)
        if (second := parts.get(SECOND)) is not None:
            self.check(second, [(*shape[:-2], 1), shape[:-2]], [torch.float32], shape)
        self.add(name, shape, format, parts)

    def finish(self) -> None:
        """Check that no tensor was overlooked.

        Raises:
            CheckpointError: a scale belongs to no quantised weight, or a tensor in a dtype of quantised
                weights has no scale.
        """
        for name, info in self.tensors.items():
            if name in self._owned:
                continue
            if OF_ACTIVATIONS.search(name):
                self.ignored.append(name)
            elif name.endswith("pre_quant_scale"):
                raise CheckpointError(
                    f"{self.where(info)}: tensor {name!r} scales the inputs of a layer before its quantised "
                    "weight, which is not supported; use the original weights"
                )
            elif OF_WEIGHTS.search(name):
                raise CheckpointError(
                    f"{self.where(info)}: tensor {name!r} belongs to no weight that is quantised as "
                    f"config.json says ({abbreviate(dict(self.settings))}); the weight is missing, or is "
                    "dense already: download the checkpoint again, or remove this tensor if you know that "
                    "the weight is dense"
                )
            elif info.dtype in NEVER_DENSE and info.shape:
                raise CheckpointError(
                    f"{self.where(info)}: tensor {name!r} is {_name(info.dtype)}, and no scale of it is in "
                    "the checkpoint; without it the weight would be wrong by a large factor. Download the "
                    "checkpoint again"
                )

    def check_excluded(self, patterns: Sequence[str], matches: Callable[[str, str], bool]) -> None:
        """Check that no quantised weight is excluded by the config.

        Args:
            patterns: names of modules that are not quantised.
            matches: whether the full name of a module is the one of a pattern.

        Raises:
            CheckpointError: one is; the config or the files belong to another checkpoint.
        """
        for name, weight in self.weights.items():
            module = name.rpartition(".")[0]
            for pattern in patterns:
                if matches(module, pattern):
                    codes = weight.parts[CODES]
                    raise CheckpointError(
                        f"{self.where(codes)}: tensor {codes.name!r} is quantised ({_name(codes.dtype)}), "
                        f"but config.json excludes it from quantisation ({pattern!r}); config.json or the "
                        "file belongs to another checkpoint"
                    )

    def setting(self, key: str, *expected: Any, default: Any = None) -> Any:
        """A setting that has one of the `expected` values, or is missing or null.

        Raises:
            ConfigError: it has another one.
        """
        value = self.settings.get(key)
        if value is None:
            return default
        if value not in expected:
            raise self.bad_setting(key, value, " or ".join(map(repr, expected)))
        return value

    def modules(self, *keys: str) -> list[str]:
        """The names of modules in settings that are lists of them, or missing, or null.

        Raises:
            ConfigError: one is not a list of names.
        """
        found: list[str] = []
        for key in keys:
            value = self.settings.get(key) or []
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.bad_setting(key, value, "a list of names of modules")
            found += value
        return found

    def bad_setting(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(
            f"{self._folder}: quantization_config has {key} = {abbreviate(value)}, expected {expected}; use "
            "the original weights, or a newer version of liger_models"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
