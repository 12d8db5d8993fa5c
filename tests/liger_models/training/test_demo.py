"""The demo, shortened: every stage runs and the losses fall."""

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[3] / "examples" / "demo.py"


def run_demo(*arguments):
    command = [sys.executable, str(DEMO), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_the_demo_trains_exports_and_generates(tmp_path):
    done = run_demo("--output", tmp_path / "demo", "--steps", 24)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ liger-models")]
    assert commands == ["init", "verify", "train", "export", "verify", "generate"]
    assert done.stdout.count("every byte the same") == 2
    with (tmp_path / "demo" / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["loss"]) < float(rows[1]["loss"]) - 1
    assert float(rows[-1]["eval_loss"]) < float(rows[0]["eval_loss"]) - 1
    assert (tmp_path / "demo" / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_leaves_other_folders_alone(tmp_path):
    (tmp_path / "mine").write_text("kept")
    done = run_demo("--output", tmp_path)
    assert done.returncode == 1
    assert "was not made by this demo" in done.stderr
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("training", "held_out", "code"), [(7.0, 7.0, 0), (8.0, 7.0, 1), (7.0, 8.0, 1), (float("nan"), 7.0, 1)]
)
def test_the_demo_fails_unless_both_losses_fall_clearly(tmp_path, training, held_out, code):
    (tmp_path / "run").mkdir()
    records = [{"eval_loss": 8.3}, {"loss": 8.3}, *[{"loss": training}] * 5, {"eval_loss": held_out}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    assert runpy.run_path(str(DEMO))["summarise"](tmp_path, seconds=1.0) == code
