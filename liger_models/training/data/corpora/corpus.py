"""Corpus of tokenized documents in a folder, memory-mapped.

    manifest.json       format, tokenizer, options, sources, counts, shards, and a digest of all the rest
    tokens-00000.bin    the tokens of whole documents, end to end: uint16 where the vocabulary allows, or
                        int32
    trained-00000.bin   a byte for each token: 1 if it is trained (never a document's first token)
    starts.bin          int64 [documents + 1]: where each document begins, counted over all shards
    whole.bin           a byte for each document: 1 if it must not be cut at a row's end (an answer needs its
                        prompt)
    groups.bin          if documents are groups of two sequences: int64 [documents, 2], tokens of the first
                        sequence, and whether its answer is good
    branches.bin        if examples share their beginning (trees.py): int64 [branches, 2], start of each
                        branch, counted over all shards, and tokens of its document that it continues
    images-00000.bin    if there are images: processed images of whole documents, as safetensors
    images.bin          int64 [documents + 1]: start of each document's images, counted over all shards

Numbers are little-endian. A corpus is written to a temporary folder and renamed once it is complete and
synced, so no partial corpus exists. Opening checks file sizes. The digest is checked on request (`verify`),
or if a file is newer than the manifest, which is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.training.data.corpora.learned_tokens import LearnedTokens

MANIFEST = "manifest.json"
FORMAT = 3
SHARD_TOKENS = 1 << 28
SHARD_BYTES = 1 << 32  # of images
DTYPES = {"uint16": torch.uint16, "int32": torch.int32}
TYPECODES = {"uint16": "H", "int32": "i"}


@dataclass(frozen=True)
class Limits:
    """Limits of a run: ids below `vocab_size`, whole examples of up to `seq_len` inputs."""

    vocab_size: int
    seq_len: int
    of_what: str = ""  # the positions are


@dataclass(frozen=True)
class Extreme:
    """Largest value of a kind in a corpus, and its record."""

    value: int = 0
    where: str = ""
    token: str = ""


class Corpus:
    """Read-only corpus.

    Attributes: `folder`, `manifest`, `learned` (its special tokens), `starts` [documents + 1] int64, `whole`
    [documents] bool, `groups` [documents, 2] int64 or None, `branches` [branches, 2] int64, and `reference`
    [documents, 2] float32, if set: log-probabilities of a group's sequences under a reference model.

    Args:
        folder: of the corpus.
        verify: read all files and compare the digest.

    Raises:
        DataError: the folder holds no corpus, or its files do not match the manifest.
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
        """Form of its records, if they make groups."""
        return self.manifest.get("form")

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, trained) of [start, stop) within one document."""
        shard = bisect_right(self._shard_starts, start) - 1
        offset = self._shard_starts[shard]
        tokens, trained = self._shards[shard]
        return tokens[start - offset : stop - offset], trained[start - offset : stop - offset]

    def branches_of(self, start: int, stop: int) -> list[list[int]]:
        """Return the branches within these tokens of one document, each [start, tokens continued]."""
        if not len(self.branches):
            return []
        within = torch.searchsorted(self.branches[:, 0].contiguous(), torch.tensor([start, stop]))
        return self.branches[slice(*within.tolist())].tolist()

    def longest_sequence(self) -> int:
        """Length of the longest document, or branch including the tokens that it continues."""
        first, shared = self.branches.unbind(1)
        begins, order = torch.cat([self.starts[:-1], first]).sort()
        before = torch.cat([torch.zeros_like(self.starts[:-1]), shared])[order]
        return int((torch.cat([begins[1:], self.starts[-1:]]) - begins + before).max())

    def images_at(self, start: int) -> tuple[int, int] | None:
        """Return the byte range of the images of this token's document, if any."""
        if not self._images:
            return None
        number = int(torch.searchsorted(self.starts, start, right=True)) - 1
        begin, end = self.image_starts[number : number + 2].tolist()
        return None if begin == end else (begin, end)

    def images(self, start: int) -> dict[str, Tensor]:
        """Return the processed images of this token's document as forward keywords, for a group under the
        names of `join_images`; empty without images.
        """
        place = self.images_at(start)
        return {} if place is None else load(self._image_bytes(*place))

    def image_names(self, start: int) -> list[str]:
        """Return the keys of `images` without reading the tensors."""
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
        """Raise DataError if the files' digest differs from the manifest's."""
        digests = []
        for files in self._files():
            digest = hashlib.sha256()
            for path in files:
                with path.open("rb") as file:
                    while block := file.read(1 << 22):
                        digest.update(block)
            digests.append(digest)
        if joined_digest(digests) != self.digest:
            raise DataError(
                f"{self.folder} has changed since it was written, by a program or a failing disk: its digest "
                "differs from its manifest's; remove it and tokenize again"
            )
        with contextlib.suppress(OSError):  # no permission for another user's corpus
            (self.folder / MANIFEST).touch()  # a copied corpus is then read only once

    def _changed_since_it_was_written(self) -> bool:
        written = (self.folder / MANIFEST).stat().st_mtime_ns
        return any(path.stat().st_mtime_ns > written for files in self._files() for path in files)

    def _files(self) -> list[list[Path]]:
        """Return the files in the order of the digest."""
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
        """Raise DataError, naming the record, if the corpus exceeds a run's limits."""
        for name, extreme in self.extremes.items():
            check_extremes(name, extreme, limits)


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
    """Memory-map a file as a tensor, without numpy."""
    # torch warns about read-only memory; the tensor is never written, and a write would go to a private copy.
    memory = _memory_of(path, count * dtype.itemsize, mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)


def joined_digest(digests: Iterable[hashlib._Hash]) -> str:
    return hashlib.sha256("".join(digest.hexdigest() for digest in digests).encode()).hexdigest()


def check_extremes(name: str, found: Extreme, limits: Limits) -> None:
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
