"""Run the suite with other CPUs' instructions: python tests/matrix.py [SETTING ...] [-- PYTEST ARGUMENTS]

    python tests/matrix.py                          # everything, under every setting: hours on two cores
    python tests/matrix.py sse avx2                 # under these two
    python tests/matrix.py sse -- tests/hf -k lora  # of these tests

Libraries choose instructions, and so the order of sums, by the CPU. The settings are environment variables
that select those of older CPUs. Prints a line per setting; pytest's output is in build/matrix. A run that
passed at this commit is not repeated.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

SETTINGS = {
    "native": {},
    "sse": {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"MKL_CBWR": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    # On a CPU with AMX torch's attention in bfloat16 fails if only ATen is limited to AVX2.
    "mixed": {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    # The threads sleep while they wait: those of three processes, spinning, would leave two cores no time.
    "two_threads": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
}
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, tests = arguments[:end] or list(SETTINGS), arguments[end + 1 :]
    if unknown := set(chosen) - SETTINGS.keys():
        print(f"unknown settings: {', '.join(sorted(unknown))}; expected some of {', '.join(SETTINGS)}")
        return 2
    verdicts = [run(name, tests) for name in chosen]
    return int(not all(verdicts))


def run(name: str, tests: list[str]) -> bool:
    """Run the tests under a setting in a new process, print the verdict, and return whether they passed."""
    log = ROOT / "build" / "matrix" / f"{name}-{state(tests)}.log"
    passed = log.with_suffix(".passed")
    if not passed.exists():
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--timeout", "900", *tests]
        # Inductor's cache mixes these settings up: code for AVX-512 gives infinities where it expects AVX2.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": str(log.parent / f"inductor-{name}")}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **compiled, **SETTINGS[name]}
        with log.open("w") as output:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode == 0:
            passed.touch()
    lines = log.read_text().splitlines()
    print(f"{name:12}{lines[-1] if lines else 'no output'}  ({log.relative_to(ROOT)})", flush=True)
    return passed.exists()


def state(tests: list[str]) -> str:
    """Return a key of the commit, local changes, the interpreter and the tests."""
    git = ["git", "-C", str(ROOT)]
    parts = [*tests, sys.executable]
    for what in (["rev-parse", "HEAD"], ["diff", "HEAD"]):
        parts.append(subprocess.check_output([*git, *what], text=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
