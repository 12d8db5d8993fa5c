"""Kernels compile, not only run in the interpreter (for other GPUs: tests/benchmarks/test_devices.py)."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu_and_no_offset_overflows_32_bits(request):
    """At night every specialisation, by day one of each kernel, up to Triton's IR."""
    at_night = request.config.getoption("--all-families")
    run("check_offsets.py", *(["--all"] if at_night else []))
    if at_night:
        run("compile_kernels.py")  # up to LLVM's, with the smallest operands


@pytest.mark.slow
def test_batches_of_other_lengths_compile_nothing_new():
    first, *others = map(json.loads, run("count_compilations.py").splitlines())
    assert len(first["kernels"]) > 30
    assert not [found for found in others if found["kernels"]]


@pytest.mark.slow
def test_kernels_of_experts_and_of_models_are_compiled_before_they_run():
    found = run("list_launches.py")
    assert "gpt-oss" in found
    assert "AdamW" in found


@pytest.mark.slow
def test_operations_that_are_compiled_for_other_gpus_launch_every_kernel():
    assert "operations launch" in run("launch_cases.py")


def run(program: str, *arguments: str) -> str:
    # In a process of its own: in this one Triton runs its interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])  # for `benchmarks`
    # Not the cache of programs that run kernels: code generators that are left out leave no kernel to load.
    environment["TRITON_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / "liger-models-compilation")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
