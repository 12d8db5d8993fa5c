"""Groups of processes that run compositions one after another, and are replaced when one fails or hangs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.certificate.case import Case
from benchmarks.certificate.comparison import Outcome

SECONDS = 120.0  # for one composition


def run_cases(
    cases: Sequence[Case], fault: float = 1.0, device: str = "cpu"
) -> Iterator[tuple[Case, Outcome]]:
    """Run compositions, grouped by their number of processes; on "cuda" each has a GPU of its own."""
    for ranks in sorted({case.ranks for case in cases}):
        group = Group(ranks, device)
        try:
            for case in cases:
                if case.ranks == ranks:
                    yield case, group.run(case, fault)
        finally:
            group.stop()


class Group:
    """`ranks` processes with a process group (gloo, or NCCL on "cuda"), started when first needed."""

    def __init__(self, ranks: int, device: str = "cpu"):
        self.ranks, self.device = ranks, device
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch.distributed.fsdp", "liger_models.parallel", "benchmarks.certificate.comparison"]
        )
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, case: Case, fault: float = 1.0) -> Outcome:
        """Run a composition; return the first process's outcome, or the first error of any process."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, fault))
        outcomes = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                self.stop()
                return next(
                    (found for found in outcomes if not found.holds),
                    Outcome(False, worst=f"process {rank} did not answer in {SECONDS:.0f} s"),
                )
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                self.stop()
                return Outcome(False, worst=f"process {rank} died")
        failed = [outcome for outcome in outcomes if not outcome.holds]
        refusals = {bool(outcome.refused) for outcome in outcomes}
        if len(refusals) > 1 and not failed:
            failed = [Outcome(False, worst="only some of the processes refused")]
        if failed:
            self.stop()  # the others may wait for an exchange that does not come
        return failed[0] if failed else outcomes[0]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.ranks):
            own, other = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.ranks, str(store), other, self.device), daemon=True
            )
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(own)


def _serve(rank: int, ranks: int, store: str, pipe: Any, device: str) -> None:
    import warnings

    import torch

    from benchmarks.certificate.comparison import compare

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    if ranks > 1:
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=torch.distributed.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=SECONDS / 2),
        )
    while True:
        try:
            case, fault = pipe.recv()
        except EOFError:
            return
        try:
            outcome = compare(case, rank, fault, device)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            outcome = Outcome(False, worst=f"{type(error).__name__} at {where}: {error}"[:600])
        pipe.send(outcome)
