"""A corpus: tokenized documents in a folder, mapped into memory and never held in it.

    manifest.json       format, tokenizer, options, sources, counts, shards, and a digest of all the rest
    tokens-00000.bin    the tokens of whole documents, end to end: uint16 where the vocabulary allows, or
                        int32
    trained-00000.bin   a byte for each of them: 1 where the loss counts it (never a document's first:
                        nothing precedes it)
    starts.bin          int64 [documents + 1]: where each document begins, counted over all shards
    whole.bin           a byte for each document: 1 if it must not be cut at a row's end (an answer without
                        its prompt teaches nothing)
    groups.bin          only where each document is a group of two sequences: int64 [documents, 2], how many
                        of its tokens are those of the first, and whether that is a good answer
    branches.bin        only where examples share their beginning (trees.py): int64 [branches, 2], where each
                        branch begins, counted over all shards, and how many tokens of its document it
                        continues
    images-00000.bin    where there are images: of whole documents, what their processor gives of them, as
                        safetensors
    images.bin          int64 [documents + 1]: where each document's begin, counted over all shards

Numbers are little-endian. The folder is written beside its place and renamed when it is whole and on the
disk: there is no half of a corpus. Whoever opens one sees that its files have their sizes; their digest is
computed where one of them is younger than the manifest, which is written last, or on request (`verify`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load
from torch import Tensor

from liger_models.convert.checkpoints.atomic import atomic_folder, naming
from liger_models.convert.errors import CheckpointError, DataError
from liger_models.training.data.learned_tokens import LearnedTokens

MANIFEST = "manifest.json"
FORMAT = 3
SHARD_TOKENS = 1 << 28
SHARD_BYTES = 1 << 32  # of images
DTYPES = {"uint16": torch.uint16, "int32": torch.int32}
TYPECODES = {"uint16": "H", "int32": "i"}


@dataclass(frozen=True)
class Limits:
    """What a run can take: ids below `vocab_size`, and whole examples of up to `seq_len` inputs."""

    vocab_size: int
    seq_len: int
    of_what: str = ""  # the positions are


@dataclass(frozen=True)
class Extreme:
    """The largest of something in a corpus, and the record where it stands."""

    value: int = 0
    where: str = ""
    token: str = ""


class Corpus:
    """A corpus that was written, read-only.

    Attributes: `folder`, `manifest`, `learned` (its special tokens), `starts` [documents + 1] int64, `whole`
    [documents] bool, `groups` [documents, 2] int64 or None, `branches` [branches, 2] int64, and `reference`
    [documents, 2] float32, where somebody put it: the log-probabilities of a group's sequences under a
    reference model.

    Args:
        folder: where it is.
        verify: read all of it once, and compare its digest.

    Raises:
        DataError: the folder holds none, or its files are not those that its manifest names.
    """

    def __init__(self, folder: Path, verify: bool = False) -> None:
        self.folder = folder
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise DataError(f"{path} has format {manifest['format']!r:.20}; this program reads {FORMAT}")
            self.manifest: dict[str, Any] = manifest
            self.digest: str = manifest["digest"]
            self.counts = Counter(manifest["counts"])
            self.learned = LearnedTokens(**manifest["special tokens"])
            self.extremes = {name: Extreme(**found) for name, found in manifest["extremes"].items()}
            documents, dtype, shards = manifest["documents"], DTYPES[manifest["dtype"]], manifest["shards"]
            self.starts = _mapped(folder / "starts.bin", torch.int64, documents + 1)
            self.whole = _mapped(folder / "whole.bin", torch.bool, documents)
            self.groups: Tensor | None = None
            self.reference: Tensor | None = None
            if self.form is not None:
                self.groups = _mapped(folder / "groups.bin", torch.int64, 2 * documents).view(-1, 2)
            branches = manifest.get("branches", 0)
            self.branches = torch.empty(0, 2, dtype=torch.int64)
            if branches:
                self.branches = _mapped(folder / "branches.bin", torch.int64, 2 * branches).view(-1, 2)
            self._shards = [
                (
                    _mapped(folder / f"tokens-{number:05}.bin", dtype, tokens),
                    _mapped(folder / f"trained-{number:05}.bin", torch.bool, tokens),
                )
                for number, tokens in enumerate(shards)
            ]
            self._shard_starts = _starts(shards)
            sizes = manifest["images"]
            self.image_starts = (
                _mapped(folder / "images.bin", torch.int64, documents + 1)
                if sizes
                else torch.zeros(1, dtype=torch.int64).expand(documents + 1)
            )
            self._images = [
                _memory_of(folder / f"images-{number:05}.bin", size) for number, size in enumerate(sizes)
            ]
            self._image_shards = _starts(sizes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{folder} is no corpus that can be read ({type(error).__name__}: {error}); remove it and "
                "tokenize again"
            ) from error
        if verify or self._changed_since_it_was_written():
            self.verify()

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def has_images(self) -> bool:
        return bool(self._images)

    @property
    def form(self) -> str | None:
        """That of its records, if they make groups."""
        return self.manifest.get("form")

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(tokens, trained) of [start, stop), which lies within one document."""
        shard = bisect_right(self._shard_starts, start) - 1
        offset = self._shard_starts[shard]
        tokens, trained = self._shards[shard]
        return tokens[start - offset : stop - offset], trained[start - offset : stop - offset]

    def branches_of(self, start: int, stop: int) -> list[list[int]]:
        """The branches within these tokens, of one document: [where it begins, what it continues] each."""
        if not len(self.branches):
            return []
        within = torch.searchsorted(self.branches[:, 0].contiguous(), torch.tensor([start, stop]))
        return self.branches[slice(*within.tolist())].tolist()

    def longest_sequence(self) -> int:
        """The most tokens of a document, or of a branch with what it continues."""
        first, shared = self.branches.unbind(1)
        begins, order = torch.cat([self.starts[:-1], first]).sort()
        before = torch.cat([torch.zeros_like(self.starts[:-1]), shared])[order]
        return int((torch.cat([begins[1:], self.starts[-1:]]) - begins + before).max())

    def images_at(self, start: int) -> tuple[int, int] | None:
        """The bytes of the images of the document in which this token stands, if it has any."""
        if not self._images:
            return None
        number = int(torch.searchsorted(self.starts, start, right=True)) - 1
        begin, end = self.image_starts[number : number + 2].tolist()
        return None if begin == end else (begin, end)

    def images(self, start: int) -> dict[str, Tensor]:
        """What the processor gave of the images of the document in which this token stands, by the names of a
        call's keywords; of a group by those of `join_images`; empty where it has none.
        """
        place = self.images_at(start)
        return {} if place is None else load(self._image_bytes(*place))

    def image_names(self, start: int) -> list[str]:
        """The names of `images`, of which alone these are read."""
        place = self.images_at(start)
        if place is None:
            return []
        size = int.from_bytes(self._image_bytes(place[0], place[0] + 8), "little")
        return [*json.loads(self._image_bytes(place[0] + 8, place[0] + 8 + size))]

    def _image_bytes(self, begin: int, end: int) -> bytes:
        shard = bisect_right(self._image_shards, begin) - 1
        offset = self._image_shards[shard]
        return self._images[shard][begin - offset : end - offset]

    def verify(self) -> None:
        """Raises DataError where the digest of what is there is not that of what was written."""
        digests = []
        for files in self._files():
            digest = hashlib.sha256()
            for path in files:
                with path.open("rb") as file:
                    while block := file.read(1 << 22):
                        digest.update(block)
            digests.append(digest)
        if _joined(digests) != self.digest:
            raise DataError(
                f"{self.folder} does not hold what was written into it: its digest is not the manifest's. "
                "The disk or a program changed it; remove it and tokenize again"
            )
        with contextlib.suppress(OSError):  # a corpus of somebody else
            (self.folder / MANIFEST).touch()  # which spares reading a copy at every opening

    def _changed_since_it_was_written(self) -> bool:
        written = (self.folder / MANIFEST).stat().st_mtime_ns
        return any(path.stat().st_mtime_ns > written for files in self._files() for path in files)

    def _files(self) -> list[list[Path]]:
        """In the order in which they are digested."""
        counts = {"tokens": "shards", "trained": "shards", "images": "images"}
        tokens, trained, images = (
            [self.folder / f"{name}-{k:05}.bin" for k in range(len(self.manifest[key]))]
            for name, key in counts.items()
        )
        of_images = [images, [self.folder / "images.bin"]] if images else [[], []]
        groups = [[self.folder / "groups.bin"]] if self.form is not None else []
        branches = [[self.folder / "branches.bin"]] if len(self.branches) else []
        own = [[self.folder / "starts.bin"], [self.folder / "whole.bin"]]
        return [tokens, trained, *own, *of_images, *groups, *branches]

    def check(self, limits: Limits) -> None:
        """Raises DataError, which names the record, for what a run cannot take."""
        for name, extreme in self.extremes.items():
            _check(name, extreme, limits)


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def is_corpus(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _memory_of(path: Path, size: int, access: int = mmap.ACCESS_READ) -> mmap.mmap | bytes:
    if path.stat().st_size != size:
        raise DataError(f"{path} has {path.stat().st_size:,} bytes, expected {size:,}: it is damaged")
    if size == 0:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), size, access=access)


def _mapped(path: Path, dtype: torch.dtype, count: int) -> Tensor:
    """The file as a tensor, without numpy."""
    # torch warns of memory that cannot be written; nobody writes, and what were written would be a copy.
    memory = _memory_of(path, count * dtype.itemsize, mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)


# ------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def written_corpus(
    folder: Path, vocab_size: int, shard_tokens: int = SHARD_TOKENS, form: str | None = None
) -> Iterator[CorpusWriter]:
    """Yields a writer, whose corpus is `folder` when the block ends; nothing is left of it if that raises.

    `vocab_size` is the tokenizer's, from which the dtype follows; `form` that of records that make groups.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        with atomic_folder(folder) as new:
            writer = CorpusWriter(new, "uint16" if vocab_size <= 1 << 16 else "int32", shard_tokens, form)
            with writer.files:
                yield writer
                writer.close()
            with naming(new / MANIFEST):
                (new / MANIFEST).write_text(json.dumps(writer.manifest, indent=1) + "\n", encoding="utf-8")
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); make room, or name "
            "another folder with --data-cache"
        ) from error


class CorpusWriter:
    """Appends documents. `counts`, `learned` and `about` (tokenizer, options, sources) go into the
    manifest.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, form: str | None = None) -> None:
        self.folder, self.dtype, self.shard_tokens, self.form = folder, dtype, shard_tokens, form
        self.counts: Counter[str] = Counter()
        self.about: dict[str, Any] = {}
        self.learned = LearnedTokens()
        self.extremes = {"token": Extreme(), "example": Extreme()}
        self.files = contextlib.ExitStack()
        names = ("tokens", "trained", "starts", "whole", "images", "image starts")
        self.digests = {name: hashlib.sha256() for name in names}
        self.starts, self.whole = self._open("starts.bin"), self._open("whole.bin")
        if form is not None:
            self.digests["groups"] = hashlib.sha256()
            self.groups = self._open("groups.bin")
        self.shards: list[int] = []
        self.image_shards: list[int] = []
        self.documents = self.labels = self.branches = 0
        self.start = self.stop = 0  # of the document that is written
        self._put("starts", self.starts, array("q", [0]))

    def extend(self, ids: list[int], trained: bytes) -> None:
        """More of a document, which `end` ends: `trained` has a byte for each id, 0 for a document's first.
        All of it is in one shard.
        """
        new = self.start == self.stop
        if not self.shards or (new and self.shards[-1] + len(ids) > self.shard_tokens):
            number = len(self.shards)
            self.tokens = self._open(f"tokens-{number:05}.bin")
            self.trained = self._open(f"trained-{number:05}.bin")
            self.shards.append(0)
        self._put("tokens", self.tokens, array(TYPECODES[self.dtype], ids))
        self._put("trained", self.trained, array("B", trained))
        self.stop += len(ids)
        self.shards[-1] += len(ids)
        self.labels += trained.count(1)

    def branch(self, shared: int) -> None:
        """A branch of the document begins, which continues so many of its tokens."""
        if not self.branches:
            self.digests["branches"] = hashlib.sha256()
            self.branch_file = self._open("branches.bin")
        self._put("branches", self.branch_file, array("q", [self.stop, shared]))
        self.branches += 1

    def end(self, whole: bool, images: bytes = b"", group: tuple[int, int] | None = None) -> None:
        """The document is done, and these are its images, as safetensors; of a `group`, the tokens of its
        first sequence and whether it is good.
        """
        assert (group is None) == (self.form is None)
        if group is not None:
            self._put("groups", self.groups, array("q", group))
        self.start = self.stop
        if images:
            self._put_images(images)
        self._put("starts", self.starts, array("q", [self.start]))
        self._put("whole", self.whole, array("B", [whole]))
        self.documents += 1
        if self.image_shards:
            self._put("image starts", self.image_starts, array("q", [sum(self.image_shards)]))

    def _put_images(self, images: bytes) -> None:
        if not self.image_shards:
            self.image_starts = self._open("images.bin")
            self._put("image starts", self.image_starts, array("q", [0] * (self.documents + 1)))
        if not self.image_shards or self.image_shards[-1] + len(images) > SHARD_BYTES:
            self.images = self._open(f"images-{len(self.image_shards):05}.bin")
            self.image_shards.append(0)
        self._put("images", self.images, array("B", images))
        self.image_shards[-1] += len(images)

    def note(self, name: str, found: Extreme, limits: Limits) -> None:
        """Keep the largest; raises DataError where it is beyond the limits."""
        if found.value > self.extremes[name].value:
            _check(name, found, limits)
            self.extremes[name] = found

    def close(self) -> None:
        self.counts.update(documents=self.documents, tokens=self.start, labels=self.labels)
        self.manifest = {
            "format": FORMAT,
            **self.about,
            "counts": self.counts,
            "special tokens": self.learned.to_dict(),
            "extremes": {name: asdict(found) for name, found in self.extremes.items()},
            "documents": self.documents,
            "tokens": self.start,
            "dtype": self.dtype,
            "shards": self.shards,
            "images": self.image_shards,
            **({} if self.form is None else {"form": self.form}),
            **({"branches": self.branches} if self.branches else {}),
            "digest": _joined(self.digests.values()),
        }

    def _open(self, name: str) -> BinaryIO:
        return self.files.enter_context((self.folder / name).open("wb", buffering=1 << 18))

    def _put(self, name: str, file: BinaryIO, numbers: array[int]) -> None:
        if sys.byteorder == "big":
            numbers.byteswap()
        data = numbers.tobytes()
        self.digests[name].update(data)
        with naming(Path(file.name)):
            file.write(data)


def _joined(digests: Iterable[hashlib._Hash]) -> str:
    return hashlib.sha256("".join(digest.hexdigest() for digest in digests).encode()).hexdigest()


def _check(name: str, found: Extreme, limits: Limits) -> None:
    if name == "token" and found.value >= limits.vocab_size:
        raise DataError(
            f"{found.where}: token {found.token!r} has id {found.value} and the model's vocabulary has "
            f"{limits.vocab_size} entries; use the tokenizer that belongs to the model"
        )
    if name == "example" and found.value > limits.seq_len:
        raise DataError(
            f"{found.where}: the example has {found.value} positions{limits.of_what} and seq_len is "
            f"{limits.seq_len}; raise --seq-len, shorten it, or cut such examples with --truncate"
        )
