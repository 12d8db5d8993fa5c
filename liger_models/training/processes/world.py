"""Processes of a run: how they share the model, and their communication outside of training."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_models.convert.errors import ConfigError
from liger_models.convert.progress import ProgressBar
from liger_models.layers.experts.expert_parallel import ExpertCommBackend
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.devices import default_device, parse_device

SHARDS = ("full", "hybrid", "none")
# Timeout of collectives; watch.py detects lost processes sooner.
TIMEOUT = timedelta(minutes=30)
# The first process computes the checksums of what all have written.
SAVING_TIMEOUT = timedelta(hours=4)

T = TypeVar("T")


class World:
    """The processes of this run: one, or torchrun's ranks.

    Args:
        device: of this process; "cuda": its own GPU; "auto": that, else MPS, else the CPU.
        shard: "full" (each process has a shard of the model), "hybrid" (each node has the whole model), or
            "none" (each process has the whole model, DDP).
        sequence: number of processes that share each row and exchange heads
            (layers/sequences/sequence_parallel.py).
        experts: number of processes that share the experts of each layer (layers/experts/expert_parallel.py).
        expert_comm_backend: what sends tokens between these, see `parallelize`.
        adapters: only adapters are trained. They are whole in each process, also if the model is sharded.

    Attributes:
        data_size, data_rank: number of rows read at a time, and this process's index among them; processes
            that share a row count as one.

    Raises:
        ConfigError: the sizes do not fit the number of processes.
    """

    def __init__(
        self,
        device: str,
        shard: str = "none",
        sequence: int = 1,
        experts: int = 1,
        expert_comm_backend: ExpertCommBackend = "standard",
        *,
        adapters: bool = False,
    ) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.shard = shard if self.size > 1 else "none"
        self.sequence, self.experts, self._expert_comm_backend = sequence, experts, expert_comm_backend
        self._trains_whole = self.shard == "none" or adapters
        if self.size % sequence or self.size % experts:
            raise ConfigError(
                f"sequence_parallel is {sequence} and expert_parallel {experts}, but there are {self.size} "
                "processes; expected divisors of this number (torchrun can start more)"
            )
        self.data_size, self.data_rank = self.size // sequence, self.rank // sequence
        if device == "auto":
            device = default_device()
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        parsed = parse_device(device)
        assert parsed is not None  # one was named
        if parsed.type == "mps" and self.size > 1:
            raise ConfigError(
                f"MPS has no communication between processes, and there are {self.size}; train in one "
                "process, or on CPUs (--device cpu)"
            )
        self.device = parsed
        self.main = self.rank == 0
        self._ours = False

    @staticmethod
    def is_main() -> bool:
        """Whether this process is the first rank, before a world exists."""
        return os.environ.get("RANK", "0") == "0"

    def __enter__(self) -> World:
        if self.size > 1 and not dist.is_initialized():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
            self._ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            dist.destroy_process_group()

    @property
    def divide(self) -> Callable[[LigerCausalLM], object] | None:
        """Function that shards a model without memory over the processes; None if each has the whole model.

        Raises:
            ConfigError: nodes of different sizes, or that cannot share rows or experts as requested.
        """
        if self.shard == "none" and self.sequence == 1:
            return None
        from liger_models.layers.sequences.sequence_parallel import divide_sequences
        from liger_models.parallel import ParallelDims, parallelize

        node = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        dims = ParallelDims(sequence=self.sequence, experts=self.experts)
        if self.shard == "hybrid":
            dims = replace(dims, data_replicate=self.size // node, data_shard=node // self.sequence)
        if self.shard == "none":
            sequence: Any = dims.meshes(self.device.type).sequence
            return lambda model: divide_sequences(model, sequence)
        backend = self._expert_comm_backend
        return lambda model: parallelize(model, dims, expert_comm_backend=backend)

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.size == 1 or not self._trains_whole:
            return model
        # Views into the buckets save a second copy of the gradients. Shards differ: there is nothing to send.
        return nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, init_sync=self.shard == "none"
        )

    @contextlib.contextmanager
    def micro_batch(self, wrapped: Any, last: bool) -> Iterator[None]:
        """Context for the passes of a micro-batch; after the last one, gradients are means over the
        processes.

        Shards are reduced after each micro-batch; otherwise every process would hold whole gradients.
        Replicas of shards are reduced after the last.
        """
        if not self._trains_whole:
            wrapped.set_requires_all_reduce(last)
            yield
        else:
            with contextlib.nullcontext() if last or self.size == 1 else wrapped.no_sync():
                yield

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

    def once(self, function: Callable[[], T]) -> T:
        """Run `function` in the first process; return its result, or raise its error, in all."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def once_and_all(self, here: Callable[[], tuple[T, Any]], there: Callable[[Any], T]) -> T:
        """Run `here()` in the first process; its message tells `there` how the others obtain their result."""
        made = here() if self.main else None
        message = [made[1] if made else None]
        if self.size > 1:
            dist.broadcast_object_list(message, src=0)
        return made[0] if made else there(message[0])

    def host_group(self) -> dist.ProcessGroup | None:
        """All processes, with host collectives that nothing else waits for; None for one process."""
        return None if self.size == 1 else dist.new_group(backend="gloo", timeout=SAVING_TIMEOUT)

    def say(self, text: str) -> None:
        """Print a line on stderr in the first process, above progress bars."""
        if self.main:
            ProgressBar.write(text, file=sys.stderr)
