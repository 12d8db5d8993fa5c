"""Kernels compile, not only run in the interpreter, and fit the registers of a Hopper GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["compile_kernels.py", "kernel_resources.py"])
def test_every_kernel_compiles_for_a_hopper_gpu_and_none_spills_at_a_real_size(program):
    # In a process of its own: in this one Triton runs its interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
