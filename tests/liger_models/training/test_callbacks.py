"""Callbacks see a run and may stop it, and the page on training from Python runs as it is printed."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import liger_models
from liger_models.convert.errors import ConfigError
from liger_models.training.checkpoints.state import STATE

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


class Recorder(liger_models.Callback):
    """Records its calls; draws random numbers and modifies its arguments, which must not affect the run."""

    def __init__(self, stop_at=None):
        self.calls, self.metrics, self.stop_at = [], [], stop_at

    def on_step(self, metrics):
        torch.rand(3), random.random()
        self.calls.append(("step", metrics["step"]))
        self.metrics.append(dict(metrics))
        stop = metrics["step"] == self.stop_at
        metrics.clear()
        return stop

    def on_evaluation(self, metrics):
        assert metrics.keys() == {"step", "eval_loss"}
        self.calls.append(("evaluation", metrics["step"]))

    def on_save(self, folder):
        assert (folder / "model.safetensors").is_file()
        self.calls.append(("save", folder.name))


def test_callbacks_see_every_step_evaluation_and_folder(run, settings, losses, tmp_path):
    recorder, alone = Recorder(), run(settings(output=str(tmp_path / "alone")))
    result = liger_models.train(settings(keep=0, keep_best="eval_loss"), callbacks=[recorder])
    assert losses(result) == losses(alone)
    assert [c for c in recorder.calls if c[0] == "step"] == [("step", n) for n in range(1, 7)]
    evaluated = [c for c in recorder.calls if c[0] == "evaluation"]
    assert evaluated == [("evaluation", n) for n in (0, 2, 4, 6)]
    assert recorder.calls.index(("evaluation", 2)) < recorder.calls.index(("step", 2))
    records = [{k: v for k, v in r.items() if k != "time"} for r in result.records if r["step"]]
    assert recorder.metrics == records
    saved = [name for kind, name in recorder.calls if kind == "save"]
    expected = ["checkpoint-2", "checkpoint-4", "checkpoint-6", "final"]
    assert [name for name in saved if name != "best"] == expected
    assert saved.count("best") in (1, 2, 3)
    output = tmp_path / "run"
    assert (result.output, result.best) == (output, output / "best")
    assert [path.name for path in result.checkpoints] == expected[:-1]
    ends = result.checkpoints[-1], tmp_path / "alone" / "checkpoint-6"
    states = [load_file(end / STATE / "tensors.safetensors")["random.torch"] for end in ends]
    assert torch.equal(*states)
    assert result.metrics["eval_loss"] == result.records[-1]["eval_loss"]
    assert result.metrics["step"] == 6


def test_a_callback_stops_the_run_and_its_model_is_exported(run, settings, capsys):
    result = run(settings(), callbacks=[Recorder(stop_at=3)])
    assert result.steps == 3
    assert [r["step"] for r in result.records] == [0, 1, 2, 3]
    assert (result.final / "model.safetensors").is_file()
    assert "stopped early after step 3 of 6: a callback stopped it" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["on_step", "on_evaluation", "on_save"])
def test_an_error_in_a_callback_surfaces_and_the_run_can_be_resumed(method, run, settings):
    failing = type("Failing", (liger_models.Callback,), {method: lambda self, given: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        run(settings(), callbacks=[failing()])
    if method == "on_save":
        assert run(settings(resume="auto")).steps == 6


def test_only_callbacks_are_taken(run, settings):
    with pytest.raises(ConfigError, match="expected an instance of a subclass"):
        run(settings(), callbacks=[print])
    with pytest.raises(ConfigError, match=r"callbacks is .*; expected a list"):
        run(settings(), callbacks=liger_models.Callback())


def test_the_page_runs(checkpoint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d e f"}]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(30)))
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block.replace('"Qwen/Qwen3-0.6B"', repr(str(checkpoint))), names)
    assert names["stopped"].steps == 0
    assert len(names["losses"]) == names["result"].steps > 0
