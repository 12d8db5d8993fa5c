"""Safetensors files whose tensors are written piece by piece, by one process or by many together.

    files.lay_out(folder)                       # one process: headers, and room for the values
    with files.open(folder) as write:           # each process, once that is done
        for place in expr.places(tensor):       # whole, or `Rows` of it
            write(place)

Where an element belongs follows from the headers alone: processes that hold parts of a tensor write them to
the one file that holds it whole, and need not know of one another. The folder must then lie on a filesystem
that all of them share, and that keeps writes to different bytes of a file apart.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from liger_models.convert.checkpoints import tensor_bytes
from liger_models.convert.checkpoints.atomic import naming
from liger_models.convert.checkpoints.safetensors_header import build_header
from liger_models.convert.checkpoints.tensor_bytes import is_plain_memory, memory_of, pieces_of, stage_for
from liger_models.convert.checkpoints.weight_map import Place


@dataclass(frozen=True)
class Output:
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFiles:
    """Files as they will be.

    Attributes:
        headers: their first bytes, by file name.
        files: what follows in each, by name and in order.
        copies: further names of a tensor, whose values are its own.
    """

    headers: Mapping[str, bytes]
    files: Mapping[str, Mapping[str, Output]]
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def single(cls, file: str, tensors: Mapping[str, Tensor]) -> TensorFiles:
        """One file of tensors, each under its own name, in its own shape (as a whole) and dtype."""
        outputs = {name: Output(tuple(x.shape), x.dtype) for name, x in tensors.items()}
        header = build_header([(name, out.dtype, out.shape) for name, out in outputs.items()], {})
        return cls({file: header}, {file: outputs})

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for tensors in self.files.values() for out in tensors.values())

    def lay_out(self, folder: Path) -> None:
        """Make the files, with their headers and without values."""
        for file, tensors in self.files.items():
            with FileIO(folder / file, "w") as opened, naming(folder / file):
                _write_all(opened, memoryview(self.headers[file]), 0)
                opened.truncate(len(self.headers[file]) + sum(out.nbytes for out in tensors.values()))

    @contextmanager
    def open(self, folder: Path, sync: bool = False) -> Iterator[Callable[[Place], None]]:
        """Yields what writes a place, of any device and dtype, into the files that `lay_out` made; with
        `sync` they are on the disk when the block ends.
        """
        with ExitStack() as stack:
            targets: dict[str, tuple[FileIO, int, torch.dtype]] = {}
            opened: list[FileIO] = []
            for file, tensors in self.files.items():
                opened.append(stack.enter_context(FileIO(folder / file, "r+")))
                offset = len(self.headers[file])
                for name, out in tensors.items():
                    targets[name] = (opened[-1], offset, out.dtype)
                    offset += out.nbytes
            staging = threading.local()

            def write(place: Place) -> None:
                for name in (place.ref.name, *self.copies.get(place.ref.name, ())):
                    _write_tensor(*targets[name], place.start, place.view, staging)

            yield write
            for file_io in opened if sync else ():
                with naming(Path(str(file_io.name))):
                    os.fsync(file_io.fileno())


def _write_tensor(
    file: FileIO, offset: int, dtype: torch.dtype, start: int, view: Tensor, staging: threading.local
) -> None:
    """`view` as the elements from `start` of the tensor that begins at `offset`."""
    offset += start * dtype.itemsize
    if view.numel() and is_plain_memory(view, dtype):
        _write_all(file, memory_of(view), offset)
    elif view.numel():
        for first, piece in pieces_of(view, dtype.itemsize):
            stage = stage_for(staging, piece, dtype)
            stage.copy_(piece)
            _write_all(file, memory_of(stage), offset + first * dtype.itemsize)


def _write_all(file: FileIO, memory: memoryview, offset: int) -> None:
    done = 0
    with naming(Path(str(file.name))):
        while done < len(memory):
            piece = memory[done : done + tensor_bytes.PIECE_BYTES]
            done += os.pwrite(file.fileno(), piece, offset + done)
