"""Self-check of a run: a peer's step takes as long as measured, within 2%, in a process that never imports
this package.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.training.step import Job, Result, count_job_tokens, make_job_batch
from liger_models.architectures import find_architecture

TOLERANCE = 0.02
Rows = Sequence[tuple[Job, Result]]


def check_alone(rows: Rows, device: str, time_limit: float, within: float = math.inf) -> list[str]:
    """A sentence per model on the step of its first peer, as far as `within` seconds allow. Empty if no peer
    was measured.
    """
    end = time.monotonic() + within
    firsts: dict[str, tuple[Job, Result]] = {}
    for job, result in rows:
        if not job.ours and not job.under_compile and "step_ms" in result:
            firsts.setdefault(job.model, (job, result))
    found = []
    for job, result in firsts.values():
        limit = min(time_limit, end - time.monotonic())
        late = {"note": "no time was left for it"}
        alone = run_alone(_PEER, _asked(job, device), limit) if limit > 0 else late
        found.append(compare(_name(job), result["step_ms"], alone))
    return found


def compare(name: str, measured: float, alone: dict[str, Any]) -> str:
    """A sentence on whether a peer's milliseconds agree with those in a process without ours."""
    if "step_ms" not in alone:
        return f"Check of {name} in a process without liger_models: {alone['note']}."
    apart = measured / alone["step_ms"] - 1
    verdict = "they agree" if abs(apart) <= TOLERANCE else "THEY DIFFER: do not trust the ratios above"
    times = f"{alone['step_ms']:.1f} ms, as measured {measured:.1f} ms ({apart:+.1%})"
    return f"Check of {name} in a process without liger_models: {times}; {verdict}."


def run_alone(peer: Path, asked: dict[str, Any], time_limit: float) -> dict[str, Any]:
    """Call `measure_alone` of a peer's file in a process that never imports this package.

    Returns:
        Its result, or a note on why there is none.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "asked.pt"
        torch.save({"peer": str(peer), **asked}, file)
        command = [sys.executable, str(Path(__file__).with_name("alone.py")), str(file)]
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        environment["PYTHONPATH"] = os.pathsep.join(
            path for path in sys.path if Path(path or ".").resolve() != ROOT
        )
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=time_limit
            )
        except subprocess.TimeoutExpired:
            return {"note": f"stopped after {time_limit:.3g} s"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
        return {"note": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:160]}"}
    return json.loads(done.stdout.splitlines()[-1])


_PEER = Path(__file__).with_name("peer.py")


def _name(job: Job) -> str:
    size = f"{job.batch} x {job.seq}" if job.data == "full" else f"{job.batch} {job.data}"
    return f"{job.model}, {job.provider} {job.memory}, {size}"


def _asked(job: Job, device: str) -> dict[str, Any]:
    return {
        "config": dict(job.config),
        "reference": find_architecture(job.config["model_type"]).reference,
        "options": sorted(job.options),
        "memory": job.memory,
        "batch": make_job_batch(job, torch.device("cpu")),
        "tokens": count_job_tokens(job),
        "warmup": job.warmup,
        "steps": job.steps,
        "device": device,
    }
