"""Data of optimizer steps, divided into micro-batches for each process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from liger_models.training.data.documents import Counts
from liger_models.training.data.groups import Groups
from liger_models.training.data.stream import Position, Stream


class StepData(NamedTuple):
    """Counts of a step over all processes, and this process's micro-batches from `Documents.batch`."""

    batches: list[Any]
    counts: Counts
    images: bool  # whether any row of the step has images
    position: Position  # after the step


def read_steps(
    stream: Stream, batch_size: int, accumulation: int, rank: int, size: int, device: torch.device
) -> Iterator[StepData]:
    """Yield steps forever, each of `size * accumulation` micro-batches of `batch_size` rows; `rank` gets
    every `size`-th. Batches for a GPU are pinned.
    """
    documents = stream.documents
    while True:
        # This may run in a new thread, whose device is the first GPU; pinning would create a context there.
        # Another thread may close the generator, so the device is reset before each yield.
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
