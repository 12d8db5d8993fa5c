"""Kernels compile, not only run in the interpreter, and fit the registers of a Hopper GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu():
    run("compile_kernels.py")


@pytest.mark.slow
def test_kernels_do_not_spill_at_a_real_size():
    """A few cases; all take minutes (CONTRIBUTING.md)."""
    run("kernel_resources.py", "norms, 4096", "rotary", "gpt-oss", "AdamW, m", "in float32, 4096")


def run(program: str, *words: str) -> None:
    # In a process of its own: in this one Triton runs its interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
