"""Safetensors files written piece by piece, by one process or by many together.

    files.lay_out(folder)                       # one process: headers, and space for the values
    with files.open(folder) as write:           # each process, afterwards
        for place in expr.places(tensor):       # whole, or `Rows` of it
            write(place)

The headers determine the place of every element: processes with parts of a tensor write them to the same file
independently. The folder must be on a filesystem shared by all of them that supports concurrent writes to
different parts of a file.
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
from liger_models.convert.checkpoints.expressions import Place
from liger_models.convert.checkpoints.safetensors_header import build_header
from liger_models.convert.checkpoints.tensor_bytes import is_plain_memory, memory_of, pieces_of, stage_for


@dataclass(frozen=True)
class Output:
    """A tensor in a file."""

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
    """Layout of files to be written.

    Attributes:
        headers: their first bytes, by file name.
        files: the tensors in each, by name and in order.
        copies: tensors that duplicate the values of another one.
    """

    headers: Mapping[str, bytes]
    files: Mapping[str, Mapping[str, Output]]
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def single(cls, file: str, tensors: Mapping[str, Tensor]) -> TensorFiles:
        """A single file of tensors, each with its own name, (whole) shape and dtype."""
        outputs = {name: Output(tuple(x.shape), x.dtype) for name, x in tensors.items()}
        header = build_header([(name, out.dtype, out.shape) for name, out in outputs.items()], {})
        return cls({file: header}, {file: outputs})

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for tensors in self.files.values() for out in tensors.values())

    def lay_out(self, folder: Path) -> None:
        """Create the files with headers, without values."""
        for file, tensors in self.files.items():
            with FileIO(folder / file, "w") as opened, naming(folder / file):
                _write_all(opened, memoryview(self.headers[file]), 0)
                opened.truncate(len(self.headers[file]) + sum(out.nbytes for out in tensors.values()))

    @contextmanager
    def open(self, folder: Path, sync: bool = False) -> Iterator[Callable[[Place], None]]:
        """Yields a function that writes a place, of any device and dtype, to the files created by `lay_out`;
        with `sync` they are on disk when the block ends.
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
    """Write `view` as the elements from `start` of the tensor at `offset`."""
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
