"""The examples of post-training, shortened: what they show is there."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.slow
def test_a_small_model_learns_a_preference(tmp_path):
    command = [sys.executable, EXAMPLES / "learn_a_preference.py", "--output", tmp_path, "--steps", "30"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the chosen answer more likely than before: 0% -> 100%" in done.stdout
    assert (tmp_path / "preferring" / "loss.png").is_file()


def test_the_reward_of_grpo_in_a_loop_rises(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    rewards = importlib.import_module("grpo_in_a_loop").main(steps=25)
    # By chance a place is right one time in twelve; the mean of five steps of 128 answers scatters by 0.03.
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.35
