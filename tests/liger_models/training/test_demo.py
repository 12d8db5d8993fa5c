"""The demo, shortened: every stage runs and the losses fall."""

import csv
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from liger_models.cli import main

DEMO = Path(__file__).parents[3] / "examples" / "demo.py"


@pytest.fixture
def demo():
    """The demo as a module."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_demo_trains_exports_and_generates(demo, curves, tmp_path, monkeypatch, capsys):
    """Its commands run here: each would import torch again in a process of its own."""
    ran = []

    def run(command):
        assert command[:3] == [sys.executable, "-m", "liger_models.cli"]
        ran.append(command[3:])
        return SimpleNamespace(returncode=main(command[3:]))

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))
    # In 16 steps both losses fall by 1.2; they must by 1.
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path / "demo"), "--steps", "16"])
    assert demo.main() == 0
    printed = capsys.readouterr().out
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("$ ")]
    assert commands == [["$", "liger-models", *words] for words in ran]
    assert [words[0] for words in ran] == ["init", "verify", "train", "export", "verify", "generate"]
    assert printed.count("every byte the same") == 2
    with (tmp_path / "demo" / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["loss"]) < float(rows[1]["loss"]) - 1
    assert float(rows[-1]["eval_loss"]) < float(rows[0]["eval_loss"]) - 1
    assert (tmp_path / "demo" / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_leaves_other_folders_alone(tmp_path):
    (tmp_path / "mine").write_text("kept")
    command = [sys.executable, str(DEMO), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert "was not made by this demo" in done.stderr
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("training", "held_out", "code"), [(7.0, 7.0, 0), (8.0, 7.0, 1), (7.0, 8.0, 1), (float("nan"), 7.0, 1)]
)
def test_the_demo_fails_unless_both_losses_fall_clearly(demo, tmp_path, training, held_out, code):
    (tmp_path / "run").mkdir()
    records = [{"eval_loss": 8.3}, {"loss": 8.3}, *[{"loss": training}] * 5, {"eval_loss": held_out}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    assert demo.summarise(tmp_path, seconds=1.0) == code
