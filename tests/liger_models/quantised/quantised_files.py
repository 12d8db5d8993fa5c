"""Tiny quantised checkpoints, with their dequantised values by independent formulas.

    checkpoint = QuantisedCheckpoint.make(tmp_path / "fp8", "qwen3", float8_blocks((8, 16)), settings)
    checkpoint.dense                     # float32 values by name, as a dense checkpoint has them
    checkpoint.write(without="model.layers.0.mlp.up_proj.weight_scale_inv")

Each maker takes the shape of a weight [..., rows, columns], and returns its parts, by the suffixes of their
names, and its values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import liger_models
from liger_models.architectures import find_architecture

Parts = dict[str, Tensor]
Maker = Callable[[tuple[int, ...]], tuple[Parts, Tensor]]


def float8(shape: tuple[int, ...]) -> Tensor:
    """Random codes of float8, as a quantiser gives: the largest of a block has the largest code."""
    return (torch.randn(shape) * 150).clamp(-448, 448).to(torch.float8_e4m3fn)


def scales(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random scales, so that values are of order 0.1; exponents for uint8 and float8_e8m0fnu."""
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.randint(115, 120, shape, dtype=torch.uint8).view(dtype)
    return (torch.rand(shape) * 9e-4 + 1e-4).to(dtype)


def numbers(scale: Tensor) -> Tensor:
    """Scales as float32 numbers; one-byte scales are exponents."""
    if scale.element_size() > 1:
        return scale.float()
    exponents = scale.view(torch.uint8).view(-1).tolist()
    return torch.tensor([2.0 ** (byte - 127) for byte in exponents]).view(scale.shape)


def spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """The number of each element's block: the Kronecker product with ones, cut to the shape."""
    return torch.kron(grid, torch.ones(block))[..., : shape[-2], : shape[-1]]


def float8_blocks(
    block: tuple[int, int], dtype: torch.dtype = torch.float32, ending: str = "_scale_inv"
) -> Maker:
    def make(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
        codes, (height, width) = float8(shape), block
        grid = (*shape[:-2], math.ceil(shape[-2] / height), math.ceil(shape[-1] / width))
        scale = scales(grid, dtype)
        return {"": codes, ending: scale}, codes.float() * spread(numbers(scale), block, shape)

    return make


def float8_of(
    scale_shape: Callable[[tuple[int, ...]], tuple[int, ...]],
    dtype: torch.dtype,
    ending: str,
    **further: Tensor,
) -> Maker:
    """float8 with a scale that broadcasts, and tensors that readers ignore."""

    def make(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
        codes, scale = float8(shape), scales(scale_shape(shape), dtype)
        return {"": codes, ending: scale, **further}, codes.float() * scale.float()

    return make


def float4(codes: Tensor) -> Tensor:
    """Values of codes of four bits: a sign, two bits of exponent with bias 1, and one of mantissa."""
    sign, exponent, mantissa = codes // 8, codes // 2 % 4, codes % 2
    normal = 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return torch.where(exponent == 0, mantissa / 2, normal) * (1 - 2 * sign)


def mxfp4(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
    """gpt-oss: [experts, inputs, outputs] stored as [experts, outputs, inputs / 32, 16]."""
    experts, inputs, outputs = shape
    codes = torch.randint(0, 16, (experts, outputs, inputs))
    exponents = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    low, high = codes[..., 0::2], codes[..., 1::2]
    blocks = (low + 16 * high).to(torch.uint8).view(experts, outputs, inputs // 32, 16)
    values = float4(codes) * spread(numbers(exponents), (1, 32), (outputs, inputs))
    return {"_blocks": blocks, "_scales": exponents}, values.transpose(1, 2)


def packed(numbers: Tensor) -> Tensor:
    """Numbers 0 to 15 [rows, columns] in words of 32 bits, the first in the lowest bits."""
    words = torch.zeros(numbers.shape[0], math.ceil(numbers.shape[1] / 8), dtype=torch.int64)
    for column in range(numbers.shape[1]):
        words[:, column // 8] += numbers[:, column] << 4 * (column % 8)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


def int4(group: int | None, asymmetric: bool = False, ordered: bool = False) -> Maker:
    """compressed-tensors' pack-quantized: groups of columns, or one scale a row."""

    def make(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
        rows, columns = shape
        width = group or columns
        numbers = torch.randint(-8, 8, shape)
        scale = (torch.rand(rows, math.ceil(columns / width)) * 0.03 + 0.01).bfloat16()
        zero = torch.randint(-3, 4, scale.shape) * asymmetric
        parts = {"_packed": packed(numbers + 8), "_scale": scale, "_shape": torch.tensor(shape)}
        if asymmetric:
            parts["_zero_point"] = packed(zero.t() + 8).t().contiguous()
        groups = torch.arange(columns) // width
        if ordered:
            groups = groups[torch.randperm(columns)]
            parts["_g_idx"] = groups.int()
        return parts, (numbers - zero[:, groups]).float() * scale.float()[:, groups]

    return make


def int8(asymmetric: bool) -> Maker:
    def make(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
        numbers = torch.randint(-128, 128, shape, dtype=torch.int8)
        scale, zero = (torch.rand(shape[0], 1) * 1e-3 + 1e-4).bfloat16(), torch.zeros(shape[0], 1)
        parts = {"": numbers, "_scale": scale}
        if asymmetric:
            zero = torch.randint(-20, 20, (shape[0], 1), dtype=torch.int8)
            parts["_zero_point"] = zero
        return parts, (numbers.float() - zero.float()) * scale.float()

    return make


def pairs(codes: Tensor) -> Tensor:
    """Codes of four bits in bytes, the first in the low half."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def nvfp4(ending: str, divides: bool) -> Maker:
    """Groups of 16 with a scale in float8, and a second one, which divides those (compressed-tensors) or
    multiplies them (Model Optimizer).
    """

    def make(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
        rows, columns = shape
        codes = torch.randint(0, 16, shape)
        scale = (torch.rand(rows, columns // 16) * 400).to(torch.float8_e4m3fn)
        second = torch.rand(1) * 1e4 + 1e4 if divides else torch.rand(()) * 1e-4 + 1e-4
        whole = scale.float() / second if divides else scale.float() * second
        values = float4(codes) * spread(whole, (1, 16), shape)
        return {"_packed" if divides else "": pairs(codes), "_scale": scale, ending: second}, values

    return make


def mxfp4_packed(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
    codes = torch.randint(0, 16, shape)
    exponents = torch.randint(118, 124, (shape[0], math.ceil(shape[1] / 32)), dtype=torch.uint8)
    values = float4(codes) * spread(numbers(exponents), (1, 32), shape)
    return {"_packed": pairs(codes), "_scale": exponents}, values


def deepseek_v4_experts(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
    parts, values = mxfp4_packed(shape)
    codes, exponents = parts.values()
    return {"": codes.view(torch.int8), "!.scale": exponents.view(torch.float8_e8m0fnu)}, values


def bnb_four_bits(kind: str, nested: bool, storage: torch.dtype = torch.uint8) -> Maker:
    """bitsandbytes: blocks of 64 elements of the flattened matrix, by tables in the file."""

    def make(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
        count = math.prod(shape)
        codes, table = torch.randint(0, 16, (count,)), torch.rand(16) * 2 - 1
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": list(shape),
        }
        stored = (16 * codes[0::2] + codes[1::2]).to(torch.uint8)
        parts = {"": stored.view(storage).view(-1, 1), ".quant_map": table}
        blocks = math.ceil(count / 64)
        scale = stored_scale = torch.rand(blocks) * 0.1
        if nested:
            stored_scale, names = torch.randint(0, 256, (blocks,), dtype=torch.uint8), torch.rand(256)
            above, offset = torch.rand(math.ceil(blocks / 16)) * 0.1, float(torch.rand(1) * 0.1)
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {".nested_absmax": above, ".nested_quant_map": names}
            scale = names[stored_scale.long()] * above[torch.arange(blocks) // 16] + torch.tensor(offset)
        parts[".absmax"] = stored_scale
        text = json.dumps(state).encode()
        parts[f".quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        values = table[codes] * scale[torch.arange(count) // 64]
        return parts, values.view(shape)

    return make


def bnb_int8(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
    numbers, scale = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]) * 3
    values = numbers.float() * scale[:, None] * torch.tensor(7.874015718698502e-3)
    return {"": numbers, "!.SCB": scale, "!.weight_format": torch.zeros((), dtype=torch.uint8)}, values


def torchao(kind: str, block: tuple[int, int]) -> Maker:
    """torchao's parts of a weight: a "Float8Tensor", or integers of 8 bits with zero points."""

    def make(shape: tuple[int, ...]) -> tuple[Parts, Tensor]:
        is_float8 = kind == "Float8Tensor"
        codes = float8(shape) if is_float8 else torch.randint(-128, 128, shape, dtype=torch.int8)
        grid = math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
        scale = scales(grid, torch.float32 if is_float8 else torch.bfloat16)
        parts = {"!._weight_qdata": codes, "!._weight_scale": scale}
        zero = torch.zeros(grid)
        if not is_float8:
            parts["!._weight_zero_point"] = zero = torch.randint(-8, 8, grid, dtype=torch.int8)
        numbers = codes.float() - spread(zero.float(), block, shape)
        return parts, numbers * spread(scale.float(), block, shape)

    return make


def torchao_metadata(kind: str, block: tuple[int, int]) -> Callable[[list[str]], dict[str, str]]:
    """torchao's descriptions of quantised weights, and one of a dense tensor."""

    def describe(names: list[str]) -> dict[str, str]:
        roles = ["qdata", "scale"] + ["zero_point"] * (kind != "Float8Tensor")
        of_weight = {"_type": kind, "_data": {"block_size": list(block)}, "_tensor_data_names": roles}
        found = {name: json.dumps(of_weight) for name in names}
        found["model.norm.weight"] = json.dumps({"_type": "Tensor"})
        return {**found, "tensor_names": json.dumps([*found])}

    return describe


@dataclass
class QuantisedCheckpoint:
    """A quantised checkpoint, and its dense twin.

    Attributes:
        folder: of the checkpoint.
        config: the content of its config.json.
        tensors: in its files.
        dense: what a dense checkpoint of the same values has, float32 where it is quantised here.
        quantised: names of the quantised weights.
        metadata: of its files.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dense: dict[str, Tensor]
    quantised: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})

    @classmethod
    def make(
        cls,
        folder: Path,
        config: Mapping[str, Any],
        maker: Maker | Mapping[str, Maker],
        settings: Mapping[str, Any] | None,
        weights: str = "*_proj.weight",
        stacked: bool = False,
        describe: Callable[[list[str]], dict[str, str]] | None = None,
    ) -> QuantisedCheckpoint:
        """Write a checkpoint with random weights; the ones named like `weights` are quantised.

        Args:
            maker: of all of them, or by patterns of their names.
            settings: the quantization_config.
            stacked: experts in one tensor, if the family has both forms.
            describe: the metadata of the files, by the names of the quantised weights.
        """
        torch.manual_seed(0)
        model = liger_models.from_config(config, dtype="bfloat16", device="cpu")
        model.layout = model.architecture.layouts[-1 if stacked else 0]
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.1)
        model.save_pretrained(folder)
        tensors: dict[str, Tensor] = {}
        dense = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        raw = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
        if settings is not None:
            raw["quantization_config"] = dict(settings)
        quantised = []
        makers = maker if isinstance(maker, Mapping) else {weights: maker}
        for name in list(dense):
            chosen = next((m for pattern, m in makers.items() if fnmatchcase(name, pattern)), None)
            if chosen is None or dense[name].dim() < 2:
                tensors[name] = dense[name]
                continue
            parts, values = chosen(tuple(dense[name].shape))
            dense[name] = values
            quantised.append(name)
            for ending, part in parts.items():
                stem = name if not ending.startswith("!") else name.rpartition(".")[0]
                tensors[stem + ending.removeprefix("!")] = part
        checkpoint = cls(folder, raw, tensors, dense, quantised)
        if describe is not None:
            checkpoint.metadata |= describe(quantised)
        checkpoint.write()
        return checkpoint

    def write(self, without: str = "", settings: Any = ..., **changed: Tensor) -> Path:
        """Write the files: the tensors in two of them, by turns, so that parts of a weight are apart.

        Args:
            without: the name of a tensor to leave out.
            settings: another quantization_config; None for none.
            changed: tensors instead of those of the same name, or further ones.
        """
        config = dict(self.config)
        if settings is not ...:
            config.pop("quantization_config", None)
            config |= {} if settings is None else {"quantization_config": settings}
        (self.folder / "config.json").write_text(json.dumps(config))
        tensors = {name: x for name, x in (self.tensors | changed).items() if name != without}
        names, placed = sorted(tensors), {}
        for number in range(2):
            file = f"model-{number + 1:05d}-of-00002.safetensors"
            held = {name: tensors[name].contiguous().clone() for name in names[number::2]}
            save_file(held, self.folder / file, metadata=self.metadata)
            placed |= dict.fromkeys(held, file)
        index = {"metadata": {}, "weight_map": placed}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return self.folder

    def expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The dense tensors in a dtype, rounded once."""
        return {name: x.to(dtype) for name, x in self.dense.items()}


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    return {**find_architecture(family).tiny, **changes}
