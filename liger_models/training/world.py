"""The processes of a run, and the little that they tell one another."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_models.loading import parse_device


class World:
    """The processes of this run: one, or torchrun's ranks with DDP between them."""

    def __init__(self, device: str) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        parsed = parse_device(device)
        assert parsed is not None  # since one was named
        self.device = parsed
        self.main = self.rank == 0
        self._ours = False

    @staticmethod
    def is_main() -> bool:
        """Whether this process is the first rank, before there is a world."""
        return os.environ.get("RANK", "0") == "0"

    def __enter__(self) -> World:
        if self.size > 1 and not dist.is_initialized():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            dist.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.size == 1:
            return model
        # Views into the buckets spare a second copy of the gradients.
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def no_sync(self, wrapped: nn.Module) -> contextlib.AbstractContextManager[None]:
        return wrapped.no_sync() if self.size > 1 else contextlib.nullcontext()  # type: ignore[operator]

    def sum(self, value: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, mine: bool) -> bool:
        if self.size == 1:
            return mine
        return bool(self.sum(torch.tensor(float(mine), device=self.device)).item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def say(self, text: str) -> None:
        if self.main:
            print(text, file=sys.stderr)

    @contextlib.contextmanager
    def bar(self, total: int, done: int) -> Iterator[Any]:
        from tqdm import tqdm

        terminal: TextIO = sys.stderr
        # In a log file every redraw is a line: let them come seldom.
        interval = 0.2 if terminal.isatty() else 10.0
        with tqdm(
            total=total,
            initial=done,
            unit="step",
            disable=not self.main,
            mininterval=interval,
            dynamic_ncols=True,
        ) as bar:
            yield bar
