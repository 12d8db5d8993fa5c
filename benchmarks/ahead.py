"""Parallel compilation on all cores before measurements.

A compilation takes from half a second (one of our kernels) to ten (FlexAttention), and a run needs more than
a hundred. Separate processes create every case and call every compiling provider once, at the shapes of the
run. They leave the compilers' results on disk for the measuring process. Failures and unfinished compilations
are compiled when measured.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.bound import Bound
from benchmarks.operations import REGISTRY, Unavailable
from benchmarks.operations.core import liger_function

# The longest first, so that no core starts a long one last.
COMPILING = ("FlexAttention", "torch.compile", "ours", "liger-kernel")
_SPAWN = multiprocessing.get_context("spawn")  # a GPU's context does not survive a fork
_FEWEST = 16  # below, starting processes takes longer than compiling
_MOST_PROCESSES = 14  # each takes half a GiB of a GPU, and a core
_SECONDS = 75.0

Job = tuple[str, tuple[int, ...], str]  # operation, shape, provider


def jobs_of(work: Sequence[tuple[str, tuple[int, ...]]], providers: Sequence[str]) -> list[Job]:
    """Calls of these operations and shapes that compile something."""
    return [
        (name, shape, provider)
        for provider in COMPILING
        if provider in providers
        for name, shape in work
        if provider in REGISTRY[name].providers
    ]


def compile_ahead(
    jobs: Sequence[Job], dtype: torch.dtype, device: torch.device, seconds: float = _SECONDS
) -> str:
    """Compile the jobs' calls, within a time limit in seconds; returns a one-line summary."""
    start = time.monotonic()
    processes = min(len(os.sched_getaffinity(0)) - 1, _MOST_PROCESSES)
    if len(jobs) < _FEWEST or processes < 2:
        return "nothing compiled in advance"
    done, late, errors = 0, 0, []
    # `benchmarks.__main__` must have no global name `torch`: the
    # keys of torch.compile's cache would begin with `__mp_main__.torch` here, and never be found.
    with _SPAWN.Pool(processes, _prepare) as pool:  # terminated at its end, whatever still runs
        results = [pool.apply_async(_call_once, (*job, dtype, str(device))) for job in jobs]
        _import_peers()  # they take seconds as well
        for result in results:
            try:
                error = result.get(max(0.0, start + seconds - time.monotonic()))
            except multiprocessing.TimeoutError:
                late += 1
                continue  # those after it may be ready
            done += not error
            errors += [error] if error else []
        if not late:
            pool.close()
            pool.join()
    summary = f"{done} of {len(jobs)} calls compiled in advance in {time.monotonic() - start:.0f} s"
    return summary + (f"; {len(errors)} failed, the first with {errors[0]}" if errors else "")


def _prepare() -> None:
    """In each process: silent, and without further processes of torch's compiler."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    # Timings of a kernel's configurations are repeated later, without other load.
    inductor.autotune_local_cache = False
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
        os.dup2(nothing.fileno(), sys.stderr.fileno())


def _call_once(name: str, shape: tuple[int, ...], provider: str, dtype: torch.dtype, device: str) -> str:
    """Returns an empty string, or the error in one line."""
    try:
        case = REGISTRY[name].build(shape, dtype, torch.device(device))
        Bound(case, case.provider(provider)).train()
    except (Unavailable, ImportError, AttributeError):
        return ""  # a note, when it is measured
    except Exception as error:
        return f"{name} {provider}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    finally:
        case = None
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # for the other processes
    return ""


def _import_peers() -> None:
    import torch._inductor.compile_fx  # noqa: F401

    with contextlib.suppress(ImportError, AttributeError):
        liger_function("LigerRMSNormFunction")
