"""Process state that other code can observe is the same before, during and after each use of the library."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ("kernels", "convert", "layers", "architectures", "liger_models")
# Functions that change process-wide state, and the files that may call them.
CHANGES = {
    "sdpa_kernel": set(),
    "catch_warnings": {"liger_models/cli/__init__.py"},  # a program's own process
    "simplefilter": set(),
    "filterwarnings": {"liger_models/cli/__init__.py"},
    "fork_rng": set(),
    "putenv": set(),
    "set_start_method": set(),
    "set_default_dtype": set(),
    "set_default_device": set(),
    "set_float32_matmul_precision": set(),
    "use_deterministic_algorithms": set(),
    "set_num_threads": {"liger_models/training/data/pictured.py"},  # in processes of its own
    "manual_seed": {"liger_models/training/random_numbers.py", "liger_models/cli/init.py"},
}
PROCESS = Path(__file__).with_name("neighbour_process.py")

# Calls that a step may make, with the reason. Any other call fails.
CALLED = {
    # A run handles signals, and draws fresh weights and dropout from torch's generators: both are restored at
    # its end.
    "train": {"signal", "set_rng_state", "setstate"},
    # transformers' own from_pretrained sets the default dtype while it creates a model.
    "transformers": {"_set_default_dtype"},
    # torch's checkpoint runs a layer again with the random numbers of the first run, for dropout.
    **{level: {"fork_rng", "set_rng_state"} for level in ("mlp", "checkpoint", "tiled", "offload")},
}


@pytest.fixture(scope="module")
def uses(tiny_checkpoint, tmp_path_factory):
    """Lasting changes and called setters of each use, from a separate process."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("neighbour")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "abc def " * n}) + "\n" for n in range(1, 30)))
    output = str(folder / "run")
    command = [sys.executable, str(PROCESS), str(tiny_checkpoint()), str(data), output]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(Path(output + ".json").read_text())


def test_no_lasting_change_is_made_to_the_process(uses):
    assert {step: found["left"] for step, found in uses.items() if found["left"]} == {}


def test_no_temporary_change_is_made_either(uses):
    excess = {step: set(found["called"]) - CALLED.get(step, set()) for step, found in uses.items()}
    assert {step: names for step, names in excess.items() if names} == {}


@functools.cache
def nodes():
    """Calls and subscripts, with their files, of the modules that name such a function or the environment."""
    named = re.compile("|".join([*CHANGES, "environ"]))  # to parse all modules takes seconds
    return [
        (node, path.relative_to(ROOT).as_posix())
        for part in PACKAGE
        for path in sorted((ROOT / part).rglob("*.py"))
        if named.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call | ast.Subscript)
    ]


def test_no_module_calls_functions_that_change_the_process():
    """This covers code that runs on GPUs only."""
    found = []
    for node, path in nodes():
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            own = isinstance(getattr(node.func, "value", None), ast.Call)  # torch.Generator().manual_seed(0)
            if name in CHANGES and not own and path not in CHANGES[name]:
                found.append((name, path))
    assert found == []


def test_no_module_writes_the_environment():
    found = [
        path
        for node, path in nodes()
        if isinstance(node, ast.Subscript)
        and not isinstance(node.ctx, ast.Load)
        and ast.unparse(node.value) == "os.environ"
    ]
    assert found == []
