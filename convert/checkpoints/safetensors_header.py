"""The header of a safetensors file: validated reading, and writing.

    8 bytes: n, little endian | n bytes: JSON | the tensors' bytes, without gaps

The JSON maps each tensor's name to `{"dtype": ..., "shape": ..., "data_offsets": [begin, end]}`, with offsets
from the end of the header, and `__metadata__` to a map of strings. A header that passes `parse_header`
describes every byte of the file exactly once, so no later read can be out of bounds or ambiguous.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liger_models.convert.errors import CheckpointError, abbreviate
from liger_models.convert.json_file import parse_json
from liger_models.convert.regular_file import open_regular

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The format allows 100 MB, which can expand to gigabytes of Python objects. This limit fits 150,000 tensors
# per file; larger checkpoints are sharded.
MAX_HEADER_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Location of a checkpoint tensor: `nbytes` bytes from byte `offset` of the file named `file`."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileHeader:
    """A parsed header: its bytes in the file, the metadata, and the tensors in the order of their bytes."""

    raw: bytes
    metadata: dict[str, str]
    tensors: tuple[TensorInfo, ...]


def open_file(path: Path) -> int:
    """Opens a regular file for reading, refusing anything that could block or never end.

    Raises:
        CheckpointError: it cannot be opened, or is a folder, a named pipe, a socket or a device.
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); download it again") from error


def parse_header(fd: int, path: Path) -> FileHeader:
    """Reads and checks the header of the file `path`, open as `fd`.

    Raises:
        CheckpointError: the header is damaged, or does not describe the file's bytes exactly.
    """
    size = os.fstat(fd).st_size
    try:
        prefix = os.pread(fd, 8, 0)
        raw = prefix + os.pread(fd, _header_length(prefix, size, path), 8)
    except OSError as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error.strerror})") from error
    header = parse_json(raw[8:], f"{path}: its header")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ of its header must map strings to strings")
    tensors = [_parse_entry(name, entry, path, len(raw)) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_coverage(tensors, path, len(raw), size)
    return FileHeader(raw, metadata, tuple(tensors))


def _header_length(prefix: bytes, size: int, path: Path) -> int:
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path}: is {size} bytes long, too short for a safetensors file; download it again"
        )
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(
            f"{path}: its header claims {length} bytes, but the file has {size} and a header at most "
            f"{MAX_HEADER_BYTES}; the file is truncated or not safetensors; download it again"
        )
    return int(length)


def build_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Header bytes of a safetensors file with these tensors, in this order, without gaps.

    Raises:
        CheckpointError: too many tensors for `parse_header` to accept the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a file of {len(header)} tensors would need a header of {len(text)} bytes, more than "
            f"{MAX_HEADER_BYTES}; choose a smaller max_shard_size"
        )
    return struct.pack("<Q", len(text)) + text


def _parse_entry(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path}: the header's entry for {name!r} must hold dtype, shape and data_offsets, found "
            f"{abbreviate(entry)}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {abbreviate(dtype)}, which is not supported; expected one of "
            f"{', '.join(DTYPES)}"
        )
    # torch counts elements and bytes in 64 bits, and computes strides as if empty dimensions had size 1.
    if not _is_natural(shape) or math.prod(max(1, n) for n in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise CheckpointError(
            f"{path}: tensor {name!r} has the shape {abbreviate(shape)}, expected a list of sizes with fewer "
            "than 2^63 bytes in total"
        )
    if not _is_natural(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{path}: tensor {name!r} has the data_offsets {abbreviate(offsets)}, expected [begin, end]"
        )
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {tuple(shape)} and dtype {dtype} needs {expected} bytes, "
            f"but its data_offsets are {abbreviate(offsets)}"
        )
    return TensorInfo(name, path.name, DTYPES[dtype], tuple(shape), data_start + begin, expected)


def _check_coverage(tensors: list[TensorInfo], path: Path, data_start: int, size: int) -> None:
    """Checks that the tensors, sorted by offset, cover the bytes [data_start, size) exactly once."""
    expected, previous = data_start, "the header"
    for info in tensors:
        if info.offset != expected:
            what = "overlaps" if info.offset < expected else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {info.name!r} begins at byte {info.offset} and {what} {previous}, which "
                f"ends at byte {expected}"
            )
        expected, previous = info.offset + info.nbytes, repr(info.name)
        if expected > size:
            raise CheckpointError(
                f"{path}: is truncated: tensor {info.name!r} ends at byte {expected}, the file at byte "
                f"{size}; download it again"
            )
    if expected != size:
        raise CheckpointError(
            f"{path}: has {size - expected} bytes after its last tensor, {previous}; the file does not "
            "match its header"
        )


def _is_natural(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
