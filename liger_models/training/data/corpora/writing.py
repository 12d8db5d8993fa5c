"""Writing of a corpus in the format of corpus.py."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from liger_models.convert.checkpoints.atomic import atomic_folder, naming
from liger_models.convert.errors import CheckpointError, DataError
from liger_models.training.data.corpora.corpus import (
    FORMAT,
    MANIFEST,
    SHARD_BYTES,
    SHARD_TOKENS,
    TYPECODES,
    Extreme,
    Limits,
    check_extremes,
    joined_digest,
)
from liger_models.training.data.corpora.learned_tokens import LearnedTokens


@contextlib.contextmanager
def written_corpus(
    folder: Path, vocab_size: int, shard_tokens: int = SHARD_TOKENS, form: str | None = None
) -> Iterator[CorpusWriter]:
    """Yield a writer that creates `folder` when the block ends, or removes all output if it raises.

    `vocab_size` of the tokenizer determines the dtype; `form` is set for records that make groups.

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
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); free space, or "
            "choose another folder with --data-cache"
        ) from error


class CorpusWriter:
    """Appends documents. The manifest gets `counts`, `learned` and `about` (tokenizer, options, sources)."""

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
        self.start = self.stop = 0  # of the current document
        self._put("starts", self.starts, array("q", [0]))

    def extend(self, ids: list[int], trained: bytes) -> None:
        """Append to the current document, in one shard, until `end`. `trained` has a byte for each id, 0 for
        a document's first.
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
        """Begin a branch that continues the document's first `shared` tokens."""
        if not self.branches:
            self.digests["branches"] = hashlib.sha256()
            self.branch_file = self._open("branches.bin")
        self._put("branches", self.branch_file, array("q", [self.stop, shared]))
        self.branches += 1

    def end(self, whole: bool, images: bytes = b"", group: tuple[int, int] | None = None) -> None:
        """End the document. `images` are safetensors; `group` is (tokens of the first sequence, whether its
        answer is good).
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
        """Update a maximum; raise DataError if it exceeds the limits."""
        if found.value > self.extremes[name].value:
            check_extremes(name, found, limits)
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
            "digest": joined_digest(self.digests.values()),
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
