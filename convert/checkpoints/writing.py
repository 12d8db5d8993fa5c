"""Writing a checkpoint, one tensor at a time, to a folder that atomically replaces the old one."""

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from liger_models.convert.checkpoints.atomic import atomic_folder, naming
from liger_models.convert.checkpoints.expressions import Expr, Place, Ref
from liger_models.convert.checkpoints.expressions import write as in_checkpoint
from liger_models.convert.checkpoints.hub import CHAT_TEMPLATES, MODULES, belongs_to
from liger_models.convert.checkpoints.reading import INDEX_FILE, SINGLE_FILE, check_parameters
from liger_models.convert.checkpoints.safetensors_header import build_header
from liger_models.convert.checkpoints.shards import write_together
from liger_models.convert.checkpoints.source_layout import SourceLayout
from liger_models.convert.checkpoints.tensor_files import Output, TensorFiles
from liger_models.convert.checkpoints.weight_map import WeightMap, check_whole, connected
from liger_models.convert.errors import CheckpointError
from liger_models.convert.sizes import parse_size


class Encoder(Protocol):
    """Form of a checkpoint's tensors in its files, if it is not the dense one.

    Attributes:
        extras: further tensors of the files, by name.
        metadata: of each file; None: that of the source, or the usual one.
    """

    extras: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None

    def outputs(self, outputs: Mapping[str, Output]) -> dict[str, Output]:
        """All tensors of the files, given the tensors of the dense checkpoint."""
        ...

    def encode(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Convert a tensor of the dense checkpoint to the tensors of the files."""
        ...


def save_checkpoint(
    folder: str | Path,
    parameters: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    encoder: Encoder | None = None,
    **options: Any,
) -> None:
    """Writes a checkpoint folder, which atomically replaces an old one when complete.

    An existing folder's entries other than weights are kept. Sharded tensors are gathered one at a time, and
    the first process writes; all of them must call this. Among processes with replicas that call this for one
    folder at the same time, one writes and the others wait.

    Args:
        encoder: of tensors that are not dense in the files.
        options: and their errors: as for `plan_checkpoint`.

    Raises:
        CheckpointError: the disk is full or cannot be written to. An old checkpoint is then untouched.
    """
    folder = Path(folder)
    plan = plan_checkpoint(parameters, weight_map, encoder=encoder, **options)
    groups = connected(weight_map)

    def write(tensors: Iterator[Tensor]) -> None:
        try:
            with atomic_folder(folder, replaces=_is_weight_file) as new:
                check_free_space(folder, plan.nbytes)  # after removal of a killed save's remains
                plan.lay_out(new)
                with plan.files.open(new) as write_place:
                    for group in groups:
                        natives = [(expr, next(tensors)) for expr in group.values()]
                        for place in _places(natives, encoder):
                            write_place(place)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise CheckpointError(
                f"{folder}: could not write {os.path.basename(error.filename or 'the checkpoint')} "
                f"({error.strerror or error}); the checkpoint needs {plan.nbytes} bytes"
                f"{', so free space or choose another disk' if full else ''}. Previous contents are "
                "untouched."
            ) from error

    write_together([parameters[name] for group in groups for name in group], write, folder)


def _places(natives: Sequence[tuple[Expr, Tensor]], encoder: Encoder | None) -> Iterator[Place]:
    """The values of native tensors, as they are written."""
    if encoder is None:
        for expr, native in natives:
            yield from expr.places(native)
        return
    for name, tensor in in_checkpoint(natives).items():
        for stored, values in encoder.encode(name, tensor):
            yield Place(Ref(stored, tuple(values.shape)), 0, values.numel(), values)


@dataclass(frozen=True)
class CheckpointPlan:
    """Plan of a checkpoint: its tensor files, and the files next to them.

    Attributes:
        files: of the tensors.
        index: the bytes of the index file, or None.
        carried: tensors without a native counterpart, by name.
        config: the content of config.json.
        aux_files: other files, by plain file name: bytes, or a path to copy from.
    """

    files: TensorFiles
    index: bytes | None
    carried: Mapping[str, Tensor]
    config: Mapping[str, Any]
    aux_files: Mapping[str, Path | bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.files.nbytes

    def lay_out(self, folder: Path) -> None:
        """Create all files, without the values of native tensors."""
        self.files.lay_out(folder)
        with self.files.open(folder) as write:
            for name, tensor in self.carried.items():
                write(Place(Ref(name, tuple(tensor.shape)), 0, tensor.numel(), tensor))
        if self.index is not None:
            _write_bytes(folder / INDEX_FILE, self.index)
        _write_aux(folder, self.config, self.aux_files)


def plan_checkpoint(
    parameters: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    config: Mapping[str, Any],
    source: SourceLayout | None = None,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | Literal["parameters"] | None = None,
    fixed: Collection[str] = (),
    aux_files: Mapping[str, Path | bytes] | None = None,
    encoder: Encoder | None = None,
) -> CheckpointPlan:
    """Plan a checkpoint of these parameters.

    With `source`, every tensor gets its dtype there, and the files are divided as there, unless
    `max_shard_size` is given; unchanged parameters then give the same files, byte for byte.

    Args:
        config: the content of config.json. If `aux_files` has an equivalent config.json, its bytes are used.
        max_shard_size: maximum size of a file in bytes, or text such as `"5GB"` (10^9) or `"5GiB"` (2^30).
            Default: the source's files, or 5 GB.
        dtype: of all floating-point tensors; "parameters": the parameters' own. Default: the source's, or the
            parameters' own.
        fixed: native names of tensors that keep their dtype in any case.
        aux_files: other files, by plain file name or as `additional_chat_templates/NAME.jinja`: bytes, or a
            path to copy from (see `find_aux_files`).
        encoder: of tensors that are not dense in the files. They are then not divided as in the source.

    Raises:
        ValueError: the names or shapes of `parameters` do not match the map, or `max_shard_size` is not a
            size.
    """
    for name in aux_files or {}:
        within, _, plain = name.rpartition("/")
        of_module = "/" not in within and fnmatchcase(within, MODULES)
        known = name == plain or within == CHAT_TEMPLATES or of_module
        if not known or plain != os.path.basename(plain) or plain in ("", ".", ".."):
            raise ValueError(
                f"aux_files must be named by plain file names, or by one in {CHAT_TEMPLATES} or in a "
                f"module's folder such as 1_Pooling, found {name!r}"
            )
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    check_parameters(parameters, weight_map)
    check_whole(weight_map)
    outputs = _outputs(parameters, weight_map, source, dtype, fixed)
    carried: Mapping[str, Tensor] = {} if source is None else source.carried
    if encoder is not None:
        outputs = encoder.outputs(outputs)
        carried = dict(pair for name, tensor in carried.items() for pair in encoder.encode(name, tensor))
        carried |= encoder.extras
    index = None
    as_read = source is not None and not source.quantised and not source.added
    if source is not None and as_read and limit is None and encoder is None:
        names = {file: [info.name for info in header.tensors] for file, header in source.files.items()}
        stated = {name: (info.dtype, info.shape) for name, info in source.tensors.items()}
        if all((outputs[name].dtype, outputs[name].shape) == both for name, both in stated.items()):
            index = source.index
    else:
        names = _divide(outputs, parse_size("5GB") if limit is None else limit)
    files = {file: {name: outputs[name] for name in within} for file, within in names.items()}
    if index is None and len(files) > 1:
        index = _index(names, outputs, sum(out.nbytes for out in outputs.values()))
    metadata = None if encoder is None else encoder.metadata
    headers = {file: _header(file, within, source, metadata) for file, within in files.items()}
    tied = {} if source is None else source.tied
    copies: dict[str, list[str]] = {}
    for name, original in tied.items():
        copies.setdefault(original, []).append(name)
    return CheckpointPlan(TensorFiles(headers, files, copies), index, carried, config, aux_files or {})


def find_aux_files(folder: str | Path) -> dict[str, Path | bytes]:
    """Files of a checkpoint folder to export: config, generation config, tokenizer, templates, and
    sentence-transformers' modules that follow the model.
    """
    folder = Path(folder)
    named = {
        path.name: path
        for path in sorted(folder.iterdir())
        if any(fnmatchcase(path.name, pattern) for pattern in _AUX_PATTERNS)
    }
    named |= {f"{CHAT_TEMPLATES}/{p.name}": p for p in sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))}
    if (folder / "modules.json").is_file():
        modules = [p for p in sorted(folder.glob(f"{MODULES}/*")) if p.suffix in (".json", ".safetensors")]
        named |= {f"{path.parent.name}/{path.name}": path for path in modules}
    return {name: path for name, path in named.items() if path.is_file() and belongs_to(path, folder)}


_AUX_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*processor_config.json",
    "*.model",
    "modules.json",
    "*sentence_*config.json",
    "config_sentence_transformers.json",
]


def _outputs(
    parameters: Mapping[str, Tensor],
    weight_map: WeightMap,
    source: SourceLayout | None,
    dtype: torch.dtype | Literal["parameters"] | None,
    fixed: Collection[str],
) -> dict[str, Output]:
    """Every tensor of the checkpoint by name."""
    outputs = {
        ref.name: Output(ref.shape, parameters[native].dtype)
        for native, expr in weight_map.items()
        for ref in expr.refs()
    }
    keep = {ref.name for native in fixed for ref in weight_map[native].refs()}
    if source is not None:
        keep |= source.carried.keys()
        outputs |= {name: outputs[original] for name, original in source.tied.items()}
        outputs |= {name: Output(tuple(kept.shape), kept.dtype) for name, kept in source.carried.items()}
        stated = {name: info.dtype for name, info in source.tensors.items()}
        if outputs.keys() != stated.keys() | source.added:
            differing = sorted(outputs.keys() ^ (stated.keys() | source.added))
            raise ValueError(
                f"the weight map is not that of the source's layout; they differ in {differing[:10]}"
            )
        if dtype != "parameters":
            outputs = {name: replace(out, dtype=stated.get(name, out.dtype)) for name, out in outputs.items()}
    if not isinstance(dtype, torch.dtype):
        return outputs
    change = {name for name, out in outputs.items() if out.dtype.is_floating_point} - keep
    return {name: replace(out, dtype=dtype) if name in change else out for name, out in outputs.items()}


def _divide(tensors: Mapping[str, Output], limit: int) -> dict[str, list[str]]:
    """Names by file: consecutive tensors up to `limit` bytes per file, larger ones alone."""
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


def _index(files: Mapping[str, Sequence[str]], tensors: Mapping[str, Output], total: int) -> bytes:
    metadata = {
        "total_parameters": sum(out.numel for out in tensors.values()),
        "total_size": total,
    }
    placed = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": metadata, "weight_map": placed}, indent=2, sort_keys=True) + "\n"
    return text.encode()


def _header(
    file: str,
    tensors: Mapping[str, Output],
    source: SourceLayout | None,
    metadata: Mapping[str, str] | None,
) -> bytes:
    entries = [(name, out.dtype, out.shape) for name, out in tensors.items()]
    if metadata is not None:
        return build_header(entries, metadata)
    old = source.files.get(file) if source is not None else None
    if old is not None and entries == [(info.name, info.dtype, info.shape) for info in old.tensors]:
        return old.raw
    return build_header(entries, old.metadata if old is not None else {"format": "pt"})


def _write_aux(new: Path, config: Mapping[str, Any], aux_files: Mapping[str, Path | bytes]) -> None:
    for name, content in aux_files.items():
        (new / name).parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            _write_bytes(new / name, content)
        else:
            with naming(new / name):
                shutil.copyfile(content, new / name)
    path = new / "config.json"
    if not path.exists() or json.loads(path.read_bytes()) != dict(config):
        _write_bytes(path, (json.dumps(dict(config), indent=2, sort_keys=True) + "\n").encode())


def _write_bytes(path: Path, content: bytes) -> None:
    with naming(path):
        path.write_bytes(content)


def _is_weight_file(name: str) -> bool:
    return (
        name in (SINGLE_FILE, INDEX_FILE) or re.fullmatch(r".+-\d{5}-of-\d{5}\.safetensors", name) is not None
    )


def check_free_space(folder: Path, needed: int) -> None:
    """Check that the disk has space for a checkpoint.

    Raises:
        CheckpointError: fewer bytes than `needed` are free on the disk of `folder`.
    """
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: the checkpoint needs {needed} bytes, but only {free} are free on its disk; the old "
            "one is kept until the new one is complete, so free space or choose another disk"
        )
