"""Every kernel, compiled for GPUs that need not be here, and refused where it exceeds their limits.

Operations at the sizes of real models run forward and backward on tensors without data; the project's own
dispatch chooses kernels and tiles for each GPU, and every launch is compiled and not run. A launch fails if
it does not compile; takes more shared memory, tensor memory or threads than a program has; spills more than
`--spills` bytes a thread without an entry in `KNOWN_SPILLS`; becomes plain multiplications in 16 bits; or, if
it starts before the previous kernel ends, touches memory before it has waited for it.

A second run takes the compiled kernels from --cache, by their sources, Triton's version and the GPU.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.compiled.gpus import MOST_TENSOR_MEMORY, MOST_THREADS, TARGETS
from benchmarks.report import markdown_table, publish

SUMMARY = "every kernel compiled for twelve GPUs, without having them"
Launch = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", action="append", metavar="GPU", help=f"repeatable: {', '.join(TARGETS)} (default: all)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="operations whose names contain a word"
    )
    parser.add_argument(
        "--spills", type=int, default=64, help="bytes a thread that any launch may spill (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="GPUs at once (%(default)s)")
    parser.add_argument("--cache", default="build/devices", help="folder (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="list every launch")


def run(args: argparse.Namespace) -> int:
    """Compile for all GPUs; exit code 1 if a launch fails."""
    names = args.gpu or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        sys.exit(f"no GPU {unknown[0]!r}; choose from {', '.join(TARGETS)}")
    cache = Path(args.cache).resolve()
    cache.mkdir(parents=True, exist_ok=True)
    rows, faults = [], []
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, launches in zip(
            names, pool.map(lambda n: _compile(n, args.only, cache), names), strict=True
        ):
            found = [(launch, fault_of(launch, name, args.spills)) for launch in launches]
            faults += [f"{name}: {describe(launch)}: {fault}" for launch, fault in found if fault]
            if args.verbose:
                print(*(f"{name}: {describe(launch)}: {measured(launch)}" for launch in launches), sep="\n")
            rows.append(_row(name, found))
    print("\n".join(faults), flush=True)
    publish(args.out, "devices", markdown_table(rows[0].keys(), [list(row.values()) for row in rows]), rows)
    return int(bool(faults))


def _compile(name: str, words: list[str], cache: Path) -> list[Launch]:
    """The distinct launches of the operations for one GPU, in a process of its own."""
    journal = cache / f"{name}.jsonl"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache / "triton")
    command = [sys.executable, "-m", "benchmarks.compiled.launches", name, str(journal), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    launches = [entry for entry in entries if not entry.get("begins")]
    if done.returncode:
        last = entries[-1] if entries else {"case": "the first operation"}
        lines = done.stderr.strip().splitlines() or ["no message"]
        launches.append({"case": last["case"], "raises": f"the process ended with {lines[-1][:200]}"})
    return launches


def fault_of(launch: Launch, name: str, spills: int) -> str | None:
    """Why a launch cannot run on this GPU, or should not; None if it can."""
    for key, says in (("raises", "raises"), ("error", "does not compile")):
        if key in launch:
            return f"{says}: {launch[key]}"
    target = TARGETS[name]
    if launch["shared"] > target.shared_memory:
        return f"takes {launch['shared']} bytes of shared memory, and a program has {target.shared_memory}"
    if launch["tensor_memory"] > MOST_TENSOR_MEMORY:
        return f"takes {launch['tensor_memory']} columns of tensor memory, and there are {MOST_TENSOR_MEMORY}"
    if launch["threads"] > MOST_THREADS:
        return f"has {launch['threads']} threads, and a program has at most {MOST_THREADS}"
    if launch["starts_too_early"]:
        return "touches memory before it waits for the previous kernel"
    if launch["plain_products"]:
        return "multiplies matrices in 16 bits without the matrix units"
    known = max((limit for *of, limit, _ in KNOWN_SPILLS if _matches(launch, name, *of)), default=spills)
    return f"spills {launch['spilled']} bytes a thread" if launch["spilled"] > max(spills, known) else None


def _matches(launch: Launch, name: str, gpus: str, kernel: str, case: str) -> bool:
    """Whether an entry of `KNOWN_SPILLS` is about this launch on this GPU."""
    pairs = (launch["kernel"], kernel), (launch["case"], case)
    named = any(fnmatch.fnmatch(name, gpu) for gpu in gpus.split())
    return named and all(fnmatch.fnmatch(text, pattern) for text, pattern in pairs)


def describe(launch: Launch) -> str:
    blocks = ", ".join(f"{key}={value}" for key, value in launch.get("blocks", {}).items())
    options = ", ".join(f"{launch[key]} {key[4:]}" for key in ("num_warps", "num_stages") if key in launch)
    return f"{launch['case']}: {launch.get('kernel', 'the operation')} ({options}; {blocks})"


def measured(launch: Launch) -> str:
    if "error" in launch or "raises" in launch:
        return launch.get("error") or launch["raises"]
    return f"{launch['registers']} registers, {launch['spilled']} spilled, {launch['shared']} bytes shared"


def _row(name: str, found: list[tuple[Launch, str | None]]) -> dict[str, str]:
    compiled = [launch for launch, _ in found if "registers" in launch]
    kinds = collections.Counter(fault.split()[0] for _, fault in found if fault)
    worst = max((launch["spilled"] for launch in compiled), default=0)
    return {
        "GPU": name,
        "for example": TARGETS[name].example,
        "launches": str(len(found)) if found else "none: plain PyTorch runs",
        "fail to compile": str(kinds["does"] + kinds["raises"]),
        "exceed a limit": str(kinds["takes"] + kinds["has"]),
        "spill too much": str(kinds["spills"]),
        "other faults": str(kinds["touches"] + kinds["multiplies"]),
        "most shared memory": str(max((launch["shared"] for launch in compiled), default=0)),
        "most spilled": str(worst),
    }


_FULL = "the state or rows, their operands and gradients fill the registers: with fewer, all take longer"
_FASTER = "tiles that do not spill are slower"

# GPUs, kernel, operation (as patterns), bytes a thread, reason.
KNOWN_SPILLS: tuple[tuple[str, str, str, int, str], ...] = (
    ("sm_*", "_backward_kernel", "norms, 16384", 256, "rows of 16384 wait in the cache, once a row"),
    ("*", "_backward_kernel", "layer norm in float32, 5", 1024, "rows of five numbers, which no model has"),
    ("*", "_backward_kernel", "norms in float32, 1", 256, "rows of one number, which no model has"),
    ("sm_*", "compressed_*_gradient_kernel", "*compressed keys*V4", 1024, _FASTER),
    (
        "*",
        "compressed_*_kernel",
        "*compressed keys in float32",
        16384,
        "operands of its products fill the registers",
    ),
    ("*", "*", "gated delta rule*", 1024, _FULL),
    ("*", "*", "channel delta rule*", 1024, _FULL),
    ("*", "*", "SSD*", 1024, _FULL),
    ("sm_*", "attention_key_value_gradient_kernel", "attention*", 256, _FASTER),
    ("sm_*", "attention_forward_kernel", "attention, Gemma 4", 768, "heads of 512: " + _FASTER),
)
