"""What a step of the optimizer reads, of which a process has its micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from liger_models.training.data.documents import Counts
from liger_models.training.data.groups import Groups
from liger_models.training.data.stream import Position, Stream


class StepData(NamedTuple):
    """What the rows of a step hold, over all processes, and the micro-batches of this one, as
    `Documents.batch` makes them.
    """

    batches: list[Any]
    counts: Counts
    images: bool  # whether there are any
    position: Position  # behind it


def read_steps(
    stream: Stream, batch_size: int, accumulation: int, rank: int, size: int, device: torch.device
) -> Iterator[StepData]:
    """Steps without end, each of `size * accumulation` micro-batches of `batch_size` rows: `rank` has every
    `size`-th. For a GPU they lie in memory that it copies from by itself.
    """
    documents = stream.documents
    while True:
        # A thread of its own begins on the first GPU, where pinning would make it a context. It is another
        # thread that closes this: the choice must not outlast the work.
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            rows = stream.take(size * accumulation * batch_size)
            mine = [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)][rank::size]
            batches = [documents.batch(part) for part in mine]
            if device.type == "cuda":
                batches = [batch.pinned() for batch in batches]
        counts = documents.count(rows)
        if isinstance(documents, Groups):
            parts = (rows[first : first + batch_size] for first in range(0, len(rows), batch_size))
            shared = [n for part in parts for n in documents.shared(part) if n]
            counts = counts._replace(shared=torch.tensor(shared, dtype=torch.int64))
        yield StepData(batches, counts, documents.have_images(rows), stream.position)
