"""Writing a checkpoint, one tensor at a time, into a folder that replaces the old one when it is whole."""

import errno
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints import tensor_bytes
from liger_models.convert.checkpoints.atomic import atomic_folder
from liger_models.convert.checkpoints.reading import INDEX_FILE, SINGLE_FILE, check_parameters
from liger_models.convert.checkpoints.safetensors_header import (
    build_header,
)
from liger_models.convert.checkpoints.source_layout import SourceLayout
from liger_models.convert.checkpoints.tensor_bytes import is_plain_memory, memory_of, pieces_of, stage_for
from liger_models.convert.checkpoints.weight_map import (
    Place,
    Ref,
    Shape,
    WeightMap,
    checkpoint_shapes,
    places_by_ref,
)
from liger_models.convert.errors import CheckpointError


def save_checkpoint(
    folder: str | Path,
    parameters: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    config: Mapping[str, Any],
    source: SourceLayout | None = None,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
    aux_files: Mapping[str, Path | bytes] | None = None,
) -> None:
    """Writes a checkpoint folder, which takes the place of an old one in one step when it is whole.

    With `source`, every tensor gets the dtype that it had there, and the files are divided as they were,
    unless `max_shard_size` is given; parameters that did not change then give the same files, byte for
    byte. What an existing folder holds beside its weights is kept.

    Args:
        config: the content of config.json. If `aux_files` has a config.json that says the same, its bytes
            are used.
        max_shard_size: bytes, or text such as `"5GB"` (10^9) or `"5GiB"` (2^30), of one file. Default: the
            source's division, or 5 GB.
        dtype: of all floating-point tensors. Default: the source's, or the parameters' own.
        aux_files: further files, by plain file name: bytes, or a path to copy from (see `find_aux_files`).

    Raises:
        ValueError: the names or shapes of `parameters` are not those of the map, or `max_shard_size` is not
            a size.
        CheckpointError: the disk is full or cannot be written to. An old checkpoint is then untouched.
    """
    folder = Path(folder)
    limit = parse_size("5GB" if max_shard_size is None else max_shard_size)
    tensors = _tensors_to_write(parameters, weight_map, source, dtype)
    index = None
    if source is not None and max_shard_size is None:
        files = {file: [info.name for info in header.tensors] for file, header in source.files.items()}
        if all(tensors[name].dtype == info.dtype for name, info in source.tensors.items()):
            index = source.index
    else:
        files = _divide(tensors, limit)
    total = sum(out.nbytes for out in tensors.values())
    if index is None and len(files) > 1:
        index = _index(files, tensors, total)
    for name in aux_files or {}:
        if not name or name != os.path.basename(name) or name in (".", ".."):
            raise ValueError(f"aux_files must be named by plain file names, found {name!r}")
    _check_free_space(folder, total)
    try:
        with atomic_folder(folder, replaces=_is_weight_file) as new:
            for file, names in files.items():
                _write_file(new / file, {name: tensors[name] for name in names}, source)
            if index is not None:
                (new / INDEX_FILE).write_bytes(index)
            _write_aux(new, config, aux_files or {})
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise CheckpointError(
            f"{folder}: could not write the checkpoint ({error.strerror or error}); it needs {total} bytes"
            f"{', so make room or choose another disk' if full else ''}. What was there before is untouched."
        ) from error


def find_aux_files(folder: str | Path) -> dict[str, Path | bytes]:
    """The files of a checkpoint folder that go with an export: config, generation config, tokenizer,
    templates."""
    return {
        path.name: path
        for path in sorted(Path(folder).iterdir())
        if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in _AUX_PATTERNS)
    }


_AUX_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.model",
]


def parse_size(size: int | str) -> int:
    """A number of bytes from an integer or from text such as `"5GB"` (10^9 bytes) or `"5GiB"` (2^30).

    Raises:
        ValueError: it is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(size).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size must be a number of bytes or text such as '5GB', found {size!r}")
    number, unit, binary = match.groups()
    bytes_ = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if bytes_ <= 0:
        raise ValueError(f"a size must be positive, found {size!r}")
    return bytes_


@dataclass(frozen=True)
class _Output:
    """One tensor to write: its places in native tensors, in the order of its elements, and the dtype that
    it is to have.
    """

    shape: Shape
    places: list[Place]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def _tensors_to_write(
    parameters: Mapping[str, Tensor],
    weight_map: WeightMap,
    source: SourceLayout | None,
    dtype: torch.dtype | None,
) -> dict[str, _Output]:
    check_parameters(parameters, weight_map)
    checkpoint_shapes(weight_map)
    places: dict[str, list[Place]] = {}
    for name, expr in weight_map.items():
        found = places_by_ref(expr, parameters[name].detach())
        places |= {ref.name: of_ref for ref, of_ref in found.items()}
    stated: dict[str, torch.dtype] = {}
    carried: Mapping[str, Tensor] = {}
    if source is not None:
        carried = source.carried
        places |= {name: places[original] for name, original in source.tied.items()}
        for name, tensor in carried.items():
            places |= {name: list(Ref(name, tuple(tensor.shape)).places(tensor))}
        stated = {name: info.dtype for name, info in source.tensors.items()}
        if places.keys() != stated.keys():
            differing = sorted(places.keys() ^ stated.keys())
            raise ValueError(
                f"the weight map is not that of the source's layout; they differ in {differing[:10]}"
            )
    out = {}
    for name, of_name in places.items():
        first = of_name[0]
        target = stated.get(name, first.view.dtype)
        if dtype is not None and target.is_floating_point and name not in carried:
            target = dtype
        out[name] = _Output(first.ref.shape, of_name, target)
    return out


def _divide(tensors: Mapping[str, _Output], limit: int) -> dict[str, list[str]]:
    """Names by file: consecutive tensors up to `limit` bytes a file, larger ones alone."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, out in tensors.items():
        if shards[-1] and size + out.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += out.nbytes
    for shard in shards:  # readers that map the file need every tensor aligned to its own dtype
        shard.sort(key=lambda name: (-tensors[name].dtype.itemsize, name))
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _index(files: Mapping[str, Sequence[str]], tensors: Mapping[str, _Output], total: int) -> bytes:
    metadata = {
        "total_parameters": sum(out.numel for out in tensors.values()),
        "total_size": total,
    }
    placed = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": metadata, "weight_map": placed}, indent=2, sort_keys=True) + "\n"
    return text.encode()


def _write_file(path: Path, tensors: Mapping[str, _Output], source: SourceLayout | None) -> None:
    entries = [(name, out.dtype, out.shape) for name, out in tensors.items()]
    old = source.files.get(path.name) if source is not None else None
    if old is not None and entries == [(info.name, info.dtype, info.shape) for info in old.tensors]:
        header = old.raw
    else:
        header = build_header(entries, old.metadata if old is not None else {"format": "pt"})
    staging = threading.local()
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for out in tensors.values():
            for place in out.places:
                if place.view.numel() == 0:
                    continue
                if is_plain_memory(place.view, out.dtype):
                    _write_all(file.fileno(), memory_of(place.view))
                    continue
                for _, piece in pieces_of(place.view, out.dtype.itemsize):
                    stage = stage_for(staging, piece, out.dtype)
                    stage.copy_(piece)
                    _write_all(file.fileno(), memory_of(stage))


def _write_all(fd: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.write(fd, memory[done : done + tensor_bytes.PIECE_BYTES])


def _write_aux(new: Path, config: Mapping[str, Any], aux_files: Mapping[str, Path | bytes]) -> None:
    for name, content in aux_files.items():
        if isinstance(content, bytes):
            (new / name).write_bytes(content)
        else:
            shutil.copyfile(content, new / name)
    path = new / "config.json"
    if not path.exists() or json.loads(path.read_bytes()) != dict(config):
        path.write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")


def _is_weight_file(name: str) -> bool:
    return (
        name in (SINGLE_FILE, INDEX_FILE) or re.fullmatch(r".+-\d{5}-of-\d{5}\.safetensors", name) is not None
    )


def _check_free_space(folder: Path, needed: int) -> None:
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: the checkpoint needs {needed} bytes, and only {free} are free on its disk; the "
            "old one stays until the new one is whole, so make room or choose another disk"
        )
