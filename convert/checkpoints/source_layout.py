"""Matching a checkpoint to one of its family's known layouts, and the facts needed to export it again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints import tensor_bytes
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.checkpoints.safetensors_header import FileHeader, TensorInfo
from liger_models.convert.checkpoints.tensor_bytes import same_bits
from liger_models.convert.checkpoints.weight_map import WeightMap, checkpoint_shapes
from liger_models.convert.errors import CheckpointError


@dataclass(frozen=True)
class SourceLayout:
    """Properties of a checkpoint, for writing another one like it.

    Attributes:
        layout: the matching layout.
        files: the header of each file, by file name.
        index: the bytes of the index file, if there was one.
        carried: tensors that the model does not use, to be written unchanged.
        tied: tensors that duplicate another one, by name; the value is the other one's name.
        quantised: whether some weights were. `files` then has their dense forms.
        added: names of tensors that the checkpoint did not have, and which are to be written, too.
    """

    layout: Any
    files: Mapping[str, FileHeader]
    index: bytes | None
    carried: Mapping[str, Tensor]
    tied: Mapping[str, str]
    quantised: bool = False
    added: frozenset[str] = frozenset()

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {info.name: info for header in self.files.values() for info in header.tensors}


def match_layout(
    reader: CheckpointReader,
    layouts: Mapping[Any, WeightMap],
    *,
    carried: Sequence[str] = (),
    tied_duplicates: Mapping[str, str] | None = None,
) -> SourceLayout:
    """Finds the layout with exactly the checkpoint's tensors, in the right shapes.

    Args:
        layouts: the family's weight maps, by layout.
        carried: patterns (`*` and `?`) of tensors that may be present and are only copied to exports.
        tied_duplicates: tensors that may be present if bitwise equal to the tensor named as the value, such
            as a tied model's `lm_head.weight`.

    Raises:
        CheckpointError: no layout matches; shows the missing and unknown tensors of the nearest one, or the
            wrong shapes. Or a duplicate differs from its original.
    """
    found = reader.tensors.keys()
    tied = {name: original for name, original in (tied_duplicates or {}).items() if name in found}
    extra = {name for name in found if any(fnmatchcase(name, pattern) for pattern in carried)}
    best: tuple[int, list[str], list[str]] | None = None
    misshapen: list[str] = []
    for layout, weight_map in layouts.items():
        shapes = checkpoint_shapes(reader.as_stored(weight_map))
        missing = [name for name in shapes if name not in found]
        unexpected = [name for name in found if name not in shapes and name not in extra and name not in tied]
        if not missing and not unexpected:
            if wrong := _other_shapes(reader, shapes):  # a layout with the same names may be transposed
                misshapen = misshapen or wrong
                continue
            source_tied = {name: original for name, original in tied.items() if name not in shapes}
            for name, original in source_tied.items():
                _check_duplicate(reader, name, original)
            kept = {name: reader.read(name) for name in found if name in extra and name not in shapes}
            files, quantised = dict(reader.files), reader.is_quantised
            return SourceLayout(layout, files, reader.index, kept, source_tied, quantised)
        if best is None or len(missing) + len(unexpected) < best[0]:
            best = (len(missing) + len(unexpected), missing, unexpected)
    if misshapen:
        raise CheckpointError(
            f"{reader.folder}: {len(misshapen)} of its tensors have other shapes than config.json demands:"
            "\n  " + "\n  ".join(misshapen[:10])
        )
    assert best is not None, "at least one layout is needed"
    _, missing, unexpected = best
    nearest = f" (the nearest of {len(layouts)} known layouts)" if len(layouts) > 1 else ""
    raise CheckpointError(
        f"{reader.folder}: its tensors are not those of this model{nearest}\n"
        f"  missing from the checkpoint: {_listing(missing)}\n"
        f"  unknown to the model: {_listing(unexpected)}\n"
        "Either config.json belongs to another checkpoint, or this variant of the architecture is not "
        "supported."
    )


def _other_shapes(reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} in {reader.tensors[name].file} is {reader.tensors[name].shape}, expected {shape}"
        for name, shape in shapes.items()
        if reader.tensors[name].shape != shape
    ]


def _check_duplicate(reader: CheckpointReader, name: str, original: str) -> None:
    if not repeats(reader, name, original):
        file = reader.tensors[name].file
        raise CheckpointError(
            f"{reader.folder / file}: {name!r} must repeat {original!r}, with which this model shares it, "
            "but the file has different values for it. If that is intended, set tie_word_embeddings to "
            "false in config.json for a head, and load without mtp for a tensor of a prediction module"
        )


def repeats(reader: CheckpointReader, name: str, original: str) -> bool:
    """Whether a tensor is bitwise equal to another one."""
    a, b = reader.tensors[name], reader.tensors.get(original)
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    count, step = math.prod(a.shape), max(1, tensor_bytes.PIECE_BYTES // a.dtype.itemsize)
    for start in range(0, count, step):
        stop = min(start + step, count)
        pieces = []
        for info in (a, b):
            pieces.append(torch.empty(stop - start, dtype=info.dtype))
            reader.read_into(info.name, pieces[-1], start, stop)
        if not same_bits(*pieces):
            return False
    return True


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return f"{len(names)} tensors: {shown}{', ...' * (len(names) > 10)}" if names else "none"
