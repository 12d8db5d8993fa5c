"""The examples of post-training, shortened, still show their effect."""

import ast
import importlib
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from liger_models import cli

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def examples(monkeypatch):
    """Function that imports an example by name. Its commands run in this process, with torch imported."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(*words):
        assert cli.main(list(map(str, words))) == 0

    monkeypatch.setattr(importlib.import_module("demo"), "liger_models", run)
    yield importlib.import_module
    for name in ("demo", "learn_a_preference"):
        sys.modules.pop(name, None)  # import it afresh each time


@pytest.mark.slow
def test_a_small_model_learns_a_preference(examples, curves, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learn_a_preference.py", "--output", str(tmp_path), "--steps", "30"])
    assert examples("learn_a_preference").main() == 0
    assert "the chosen answer more likely than before: 0% -> 100%" in capsys.readouterr().out
    assert (tmp_path / "preferring" / "loss.png").is_file()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_help_is_the_docstring_and_trains_nothing(path, monkeypatch, capsys):
    """Other libraries are left out: their import takes longer than this test."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for library in ("accelerate", "datasets", "liger_models.hf", "peft", "transformers", "trl"):
        monkeypatch.setitem(sys.modules, library, MagicMock())
    for name in [*sys.modules.keys() & {path.stem for path in EXAMPLES.glob("*.py")}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 0
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring.split() == capsys.readouterr().out.partition("\n\n")[2].split()[: len(docstring.split())]
    for name in [*sys.modules.keys() & {path.stem for path in EXAMPLES.glob("*.py")}]:
        del sys.modules[name]  # made of stubs


def test_the_reward_of_grpo_in_a_loop_rises(examples):
    rewards = examples("grpo_in_a_loop").main(steps=25)
    # By chance one token in twelve is right; the mean of five steps of 128 answers has a deviation of 0.03.
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.35
