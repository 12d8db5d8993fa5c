"""Streaming reads of sharded safetensors checkpoints.

    with CheckpointReader(folder) as reader:
        source = match_layout(reader, {layout: weight_map})  # source_layout.py
        load_parameters(parameters, weight_map, reader)
    save_checkpoint(out, parameters, weight_map, source=source, config=config)  # writing.py

Nothing is trusted: every header, and the index, is checked before any data is read. Bytes go from the file
directly into the parameters' memory. Peak memory is therefore the parameters plus a small buffer per thread,
used for conversion to another dtype, a strided view, or a GPU.
"""

import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from liger_models.convert.checkpoints import tensor_bytes
from liger_models.convert.checkpoints.expressions import Expr
from liger_models.convert.checkpoints.rows import slabs
from liger_models.convert.checkpoints.safetensors_header import (
    MAX_HEADER_BYTES,
    FileHeader,
    TensorInfo,
    open_file,
    parse_header,
)
from liger_models.convert.checkpoints.shards import local_part, shape_of
from liger_models.convert.checkpoints.tensor_bytes import (
    is_plain_memory,
    memory_of,
    pieces_of,
    stage_for,
)
from liger_models.convert.checkpoints.weight_map import WeightMap
from liger_models.convert.errors import CheckpointError, abbreviate
from liger_models.convert.json_file import parse_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

READING_THREADS = 4
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_INDEX_BYTES = 2 * MAX_HEADER_BYTES  # room for the names of some 300,000 tensors in any number of files


class CheckpointReader:
    """The validated tensors of a checkpoint folder. Use it in a `with` statement; it keeps the files open.

    Attributes:
        tensors: location of each tensor, by name, in the order of the files and of their bytes.
        files: the header of each file, by file name.
        index: the bytes of the index file, or None for a single-file checkpoint.

    Raises:
        CheckpointError: no safetensors checkpoint in the folder, a damaged file, or files that contradict
            their index.
    """

    is_quantised = False

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self.files: dict[str, FileHeader] = {}
        self.index: bytes | None = None
        self._fds: dict[str, int] = {}
        self._staging = threading.local()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    @property
    def nbytes(self) -> int:
        """The size of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor."""
        return {name: info.dtype for name, info in self.tensors.items()}

    def rename(self, new_name: Callable[[str], str | None]) -> list[TensorInfo]:
        """Rename tensors from now on by applying `new_name` to their names in the files. Those with None are
        dropped; returns these.

        Raises:
            CheckpointError: two tensors would have the same name.
        """
        kept: dict[str, TensorInfo] = {}
        left_out = []
        for old, info in self.tensors.items():
            new = new_name(old)
            if new is None:
                left_out.append(info)
            elif new in kept:
                raise CheckpointError(
                    f"{self.folder / info.file}: both {old!r} and another tensor of the checkpoint map to "
                    f"{new!r}; remove the one that is wrong"
                )
            else:
                kept[new] = replace(info, name=new)
        self.tensors = kept
        return left_out

    def cut(self, name: str, rows: int) -> TensorInfo:
        """Keep only a tensor's first `rows` rows from now on; returns the rest."""
        info = self.tensors[name]
        kept = info.nbytes // info.shape[0] * rows
        self.tensors[name] = replace(info, shape=(rows, *info.shape[1:]), nbytes=kept)
        rest = (info.shape[0] - rows, *info.shape[1:])
        return replace(
            info,
            name=f"{name}[{rows}:]",
            shape=rest,
            offset=info.offset + kept,
            nbytes=info.nbytes - kept,
        )

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU, in the file's dtype."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, out)
        return out

    def as_stored(self, weight_map: WeightMap) -> WeightMap:
        """The same native tensors, as expressions over tensors in the order in which they are read."""
        return weight_map

    def read_into(self, name: str, dest: Tensor, start: int = 0, stop: int | None = None) -> None:
        """Fills `dest` with the elements [start, stop) of a tensor, in memory order; all by default.

        `dest` may have any shape, strides, device and dtype; a contiguous one on the CPU of the file's
        dtype is filled without a copy. May be called from several threads.

        Raises:
            ValueError: `dest` holds another number of elements.
            CheckpointError: the file ends too early or cannot be read.
        """
        info = self.tensors[name]
        self.read_elements(info, dest, start, math.prod(info.shape) if stop is None else stop)

    def read_elements(self, info: TensorInfo, dest: Tensor, start: int, stop: int) -> None:
        """As `read_into`, for a tensor in the files that need not be among `tensors`."""
        check_range(info, dest, start, stop)
        dest = dest.detach()
        if dest.numel() == 0:
            return
        itemsize = info.dtype.itemsize
        offset = info.offset + start * itemsize
        if is_plain_memory(dest, info.dtype):
            self._read_bytes(info, dest, offset)
            return
        for first, piece in pieces_of(dest, itemsize):
            stage = stage_for(self._staging, piece, info.dtype)
            self._read_bytes(info, stage, offset + first * itemsize)
            piece.copy_(stage)

    def _read_bytes(self, info: TensorInfo, dest: Tensor, offset: int) -> None:
        memory = memory_of(dest)
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(
                    self._fds[info.file], [memory[done : done + tensor_bytes.PIECE_BYTES]], offset + done
                )
            except OSError as error:
                raise CheckpointError(
                    f"{self.folder / info.file}: cannot read tensor {info.name!r} ({error.strerror})"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.folder / info.file}: ended at byte {offset + done}, inside tensor "
                    f"{info.name!r}; the file was changed while it was read"
                )
            done += count

    def _open(self) -> None:
        placed = self._find_files()
        for file in sorted(set(placed.values())) if placed else [self._only_file()]:
            path = self.folder / file
            self._fds[file] = open_file(path)
            header = self.files[file] = parse_header(self._fds[file], path)
            for info in header.tensors:
                if info.name in self.tensors:
                    raise CheckpointError(
                        f"{path}: holds tensor {info.name!r}, which {self.tensors[info.name].file} holds too"
                    )
                if placed and info.name not in placed:
                    raise CheckpointError(
                        f"{path}: holds tensor {info.name!r}, which {INDEX_FILE} does not list"
                    )
                self.tensors[info.name] = info
        for name, file in placed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(
                    f"{self.folder / INDEX_FILE}: places tensor {name!r} in {file}, which does not hold it"
                )

    def _find_files(self) -> dict[str, str]:
        """The index's map from tensor to file; {} for a single file without an index."""
        path = self.folder / INDEX_FILE
        if (self.folder / SINGLE_FILE).exists() or not path.exists():
            return {}
        self.index = _read_small(path)
        placed = parse_json(self.index, f"{path}:").get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{path}: has no weight_map, a non-empty object from tensor to file name")
        for name, file in placed.items():
            if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
                raise CheckpointError(
                    f"{path}: places tensor {name!r} in {abbreviate(file)}; expected the plain name of a "
                    ".safetensors file in the same folder"
                )
        return placed

    def _only_file(self) -> str:
        if (self.folder / SINGLE_FILE).exists():
            return SINGLE_FILE
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: is not a folder; expected the folder of a checkpoint")
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(
                f"{self.folder}: holds {len(found)} safetensors files ({', '.join(found[:3])}...) but no "
                f"{INDEX_FILE} listing which belong together; download the index too"
            )
        pickles = sorted(
            p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
        )
        if pickles:
            raise CheckpointError(
                f"{self.folder}: holds weights only as pickles ({pickles[0]}), which can run any code "
                "when opened and are not read here; if you trust them, load the folder with transformers' "
                "AutoModelForCausalLM.from_pretrained and save it as safetensors with save_pretrained"
            )
        raise CheckpointError(
            f"{self.folder}: holds no safetensors file; expected {SINGLE_FILE} or {INDEX_FILE}"
        )


def check_range(info: TensorInfo, dest: Tensor, start: int, stop: int) -> None:
    """Raise ValueError unless the elements [start, stop) of a tensor fill `dest`."""
    if not 0 <= start <= stop <= math.prod(info.shape) or dest.numel() != stop - start:
        raise ValueError(
            f"elements [{start}, {stop}) of tensor {info.name!r} of shape {info.shape} do not fill a "
            f"destination of shape {tuple(dest.shape)}"
        )


def _read_small(path: Path) -> bytes:
    """The bytes of a JSON file next to the weights, with a size limit."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{path}: is {size} bytes long, but an index has at most {MAX_INDEX_BYTES}; download it again"
            )
        return file.read()


# ---------------------------------------------------------------------------------------------------- loading


def load_parameters(
    parameters: Mapping[str, Tensor],
    weight_map: WeightMap,
    reader: CheckpointReader,
    *,
    progress: bool = False,
) -> None:
    """Fills native tensors from a checkpoint, reading each byte once and in file order. Shards that lie in
    many pieces are cut from whole rows (`slabs`).

    Args:
        parameters: the tensors to fill, by native name; on any device, of any dtype. For sharded tensors,
            each process reads its own part.
        progress: show a progress bar in bytes, unless loading takes less than a second.

    Raises:
        ValueError: the names or shapes of `parameters` do not match the map.
        CheckpointError: a file cannot be read, or holds integers or 8-bit values for a floating point
            parameter.
    """
    check_parameters(parameters, weight_map)
    weight_map = reader.as_stored(weight_map)
    jobs: list[_ReadJob | _SlabJob] = []

    def check(info: TensorInfo, dest: Tensor) -> None:
        if dest.is_floating_point() and info.dtype not in (*WEIGHT_DTYPES, dest.dtype):
            raise CheckpointError(
                f"{reader.folder / info.file}: tensor {info.name!r} is in {info.dtype}, but weights must be "
                f"in {', '.join(map(str, WEIGHT_DTYPES))}. Quantised weights are useless without their "
                "scales: use the original checkpoint"
            )

    def plan(name: str, dest: Tensor, start: int, stop: int) -> None:
        info = reader.tensors[name]
        check(info, dest)
        for first, piece in pieces_of(dest, info.dtype.itemsize):
            begin, count = start + first, piece.numel()
            jobs.append(_ReadJob(info, count * info.dtype.itemsize, piece, begin, begin + count))

    for name, expr in weight_map.items():
        dest, part = local_part(parameters[name].detach(), expr)
        cut = slabs(part)
        for row, (slab, dim, along) in enumerate(cut):
            infos = [reader.tensors[ref.name] for ref in slab.refs()]
            for info in infos:
                check(info, dest)
            nbytes = math.prod(slab.shape) * infos[0].dtype.itemsize
            jobs.append(_SlabJob(infos[0], nbytes, dest[row : row + 1], row, slab, dim, along))
        if not cut:
            part.read_into(dest, plan)
    jobs.sort(key=lambda job: (job.info.file, job.info.offset, job.start))

    total = sum(job.nbytes for job in jobs)
    with _progress_bar(total, progress) as bar, ThreadPoolExecutor(READING_THREADS) as pool:
        pending = {pool.submit(job.run, reader): job for job in jobs}
        try:
            for future in as_completed(pending):
                future.result()
                bar.update(pending[future].nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _ReadJob(NamedTuple):
    info: TensorInfo
    nbytes: int
    dest: Tensor
    start: int
    stop: int

    def run(self, reader: CheckpointReader) -> None:
        reader.read_into(self.info.name, self.dest, self.start, self.stop)


class _SlabJob(NamedTuple):
    """A whole row, if only `along` in one dimension is wanted."""

    info: TensorInfo
    nbytes: int
    dest: Tensor
    start: int
    slab: Expr
    dim: int
    along: slice

    def run(self, reader: CheckpointReader) -> None:
        whole = torch.empty(self.slab.shape, dtype=self.dest.dtype, device="cpu")
        self.slab.read_into(whole, reader.read_into)
        self.dest.copy_(whole[(slice(None),) * self.dim + (self.along,)])


def check_parameters(parameters: Mapping[str, Tensor], weight_map: WeightMap) -> None:
    """Raises ValueError unless `parameters` has the names and the shapes of the map."""
    if parameters.keys() != weight_map.keys():
        raise ValueError(
            "parameters without an entry in the weight map: "
            f"{sorted(parameters.keys() - weight_map.keys())}; entries without a parameter: "
            f"{sorted(weight_map.keys() - parameters.keys())}"
        )
    for name, tensor in parameters.items():
        if shape_of(tensor) != weight_map[name].shape:
            raise ValueError(
                f"parameter {name!r} has shape {shape_of(tensor)}, its weight map {weight_map[name].shape}"
            )


def _progress_bar(total: int, enabled: bool) -> Any:
    from liger_models.convert.progress import ProgressBar

    options = {"unit": "B", "unit_scale": True, "desc": "loading", "delay": 1.0}
    return ProgressBar(total=total, disable=not enabled, **options)
