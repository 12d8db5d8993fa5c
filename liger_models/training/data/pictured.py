"""Conversations with images to ids, marks and pixels, in processes of their own where they are many."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from safetensors.torch import save

from liger_models.convert.errors import DataError
from liger_models.images import Preprocessor, find_image
from liger_models.images.files import ImageSource
from liger_models.images.processor import Span
from liger_models.training.data.records import Record, check_text
from liger_models.training.data.sources import Source
from liger_models.training.tokenizer import TextTokenizer

ALONE = 32  # so many conversations are done before other processes would have begun
MOST_PROCESSES = 16


class Made(NamedTuple):
    """What becomes of a conversation: its ids, a byte for each that says whether it is trained, its images as
    safetensors, and how many of the ids there must be for all images to be whole.
    """

    ids: list[int]
    trained: bytes
    images: bytes
    needed: int


class Work(NamedTuple):
    """A conversation as the chat template wrote it."""

    where: str
    text: str
    spans: list[Span]
    sources: list[ImageSource]


class PicturedEncoder:
    """Makes them in their order; to be used as a context.

    Args:
        tokenizer: whose chat template is used.
        images: None for a model that sees none.
    """

    def __init__(self, tokenizer: TextTokenizer, images: Preprocessor | None) -> None:
        self.tokenizer, self.images = tokenizer, images
        self.done = 0
        self.seen: dict[Path, dict[str, Any]] = {}
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> PicturedEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def files(self) -> list[dict[str, Any]]:
        """What tells of each image file whether it is as it was."""
        return list(self.seen.values())

    def encode(self, records: list[Record]) -> Iterator[Made]:
        """What becomes of each.

        Raises:
            DataError: an image cannot be had, or does not fit its text; it names file and line.
        """
        if records and self.images is None:
            raise DataError(
                f"{records[0].where}: the conversation has images, and this model sees none; train one that "
                "does (`liger-models list`), without --text-only, from a checkpoint with its processor"
            )
        work = [self._work(record) for record in records]
        cores = len(os.sched_getaffinity(0))
        alone = self.done < ALONE or cores == 1
        self.done += len(records)
        if alone:
            yield from (_made(self.images, one) for one in work)
            return
        if self.pool is None:
            # Neither torch's threads nor the tokenizer's survive a fork.
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(
                min(cores, MOST_PROCESSES), mp_context=context, initializer=_begin, initargs=(self.images,)
            )
        try:
            yield from self.pool.map(_made_there, work)
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that reads images ended ({error}) at {work[0].where} or soon behind it; did the "
                "machine run out of memory?"
            ) from error

    def _work(self, record: Record) -> Work:
        messages, named = record.content
        try:
            text, spans = self._rendered(messages)
            check_text(record.where, text)
            sources = [find_image(given, record.folder) for given in named]
            for source in sources:
                if isinstance(source, Path) and source not in self.seen and source.is_file():
                    self.seen[source] = Source(str(source), source).identity()
        except DataError as error:
            raise located(record.where, error) from error
        return Work(record.where, text, spans, sources)

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
        """As the chat template writes it. Some templates pass over what is text and not a list of parts."""
        text, spans = self.tokenizer.render(messages)
        lost = [m for m in messages if isinstance(m.get("content"), str) and m["content"].strip() not in text]
        if lost:
            parts = [
                {**m, "content": [{"type": "text", "text": m["content"]}]}
                if isinstance(m.get("content"), str)
                else m
                for m in messages
            ]
            text, spans = self.tokenizer.render(parts)
        return text, spans


def located(where: str, error: DataError) -> DataError:
    """The error with the place where it is, if it does not name it."""
    return error if str(error).startswith(where) else DataError(f"{where}: {error}")


def _made(images: Preprocessor | None, work: Work) -> Made:
    assert images is not None
    try:
        shown = images(work.text, work.spans, work.sources)
        places = images.image_places(shown.ids)
        needed = 1 + int(places[-1]) if len(places) else 0
        if needed == len(shown.ids):
            raise DataError("nothing follows the last image, so that nothing is learned from it")
    except DataError as error:
        raise located(work.where, error) from error
    trained = shown.trained.clone()
    trained[0] = False
    trained[places] = False
    return Made(shown.ids.tolist(), bytes(trained.tolist()), save(shown.images), needed)


# Of a process that makes them.
_own: list[Preprocessor] = []


def _begin(images: Any) -> None:
    import torch

    torch.set_num_threads(1)  # the processes are as many as there are cores
    _own[:] = [images]


def _made_there(work: Work) -> Made:
    return _made(_own[0], work)
