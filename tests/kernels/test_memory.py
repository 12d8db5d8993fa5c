"""Kernels read and write only their tensors: the memory checker of the CUDA toolkit finds no error."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import memory_check
import pytest

from liger_models import kernels


def test_the_operations_to_check_run_at_all():
    memory_check.run_everything("cpu")


def test_the_operations_to_check_launch_every_kernel(interpreted, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    launched = set()
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *_, **__: launched.add(kernel.fn))
    memory_check.run_everything("cpu")
    names = [module.name for module in pkgutil.walk_packages(kernels.__path__, "liger_models.kernels.")]
    everything = {
        value.fn
        for name in names
        for key, value in vars(importlib.import_module(name)).items()
        if isinstance(value, InterpretedFunction) and key.endswith("_kernel")
    }
    assert {f"{fn.__module__}.{fn.__name__}" for fn in everything - launched} == set()


@pytest.mark.gpu
@pytest.mark.slow
def test_the_memory_checker_finds_nothing():
    checker = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if checker is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not installed")
    command = [checker, "--tool", "memcheck", "--padding", "1024", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, Path(memory_check.__file__)],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-5000:]
