"""The best model of a run is kept, early stopping counts evaluations, and both continue after resuming."""

import json

import pytest
import torch
from safetensors.torch import load_file

from liger_models.convert.errors import ConfigError
from liger_models.training import loop
from liger_models.training.best import Best


@pytest.fixture
def evaluations(monkeypatch):
    """Factory that sets the losses of evaluations, before the first step and after every second one."""

    def script(*values):
        left = list(values)
        monkeypatch.setattr(loop.Run, "evaluate", lambda self, display=None: {"eval_loss": left.pop(0)})

    return script


def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_the_best_model_is_kept_and_patience_ends_the_run(run, settings, evaluations):
    evaluations(1.0, 5.0, 4.0, 4.5, None, 3.0)  # the first is the untrained model's, which does not count
    result = run(settings(steps=10, keep=1, keep_best="eval_loss", patience=2))
    best = result.final.parent / "best"
    assert result.steps == 8
    assert json.loads((best / "best.json").read_text()) == {"metric": "eval_loss", "value": 4.0, "step": 4}


def test_best_is_the_model_of_its_step_and_a_resumed_run_compares_with_it(run, settings, evaluations):
    evaluations(1.0, 5.0, 4.0, 4.5)
    config = {"keep_best": "eval_loss", "keep": 0}
    first = run(settings(steps=6, **config))
    best, step_4 = first.final.parent / "best", first.final.parent / "checkpoint-4"
    for name, tensor in tensors(step_4).items():
        assert torch.equal(tensor, tensors(best)[name]), name
    folder = best.parent
    for checkpoint, losses, at in (("checkpoint-4", [4.2], 4), ("checkpoint-2", [6.0, 6.1], 4)):
        evaluations(*losses)
        run(settings(steps=6, resume=str(folder / checkpoint), **config))
        assert json.loads((best / "best.json").read_text())["step"] == at
        assert (folder / "abandoned-best").is_dir() == (checkpoint == "checkpoint-2")


def test_higher_accuracy_is_better_and_missing_values_never_improve():
    best = Best("eval_accuracy", [{"step": 0, "eval_accuracy": 0.9}, {"step": 1, "eval_accuracy": 0.2}])
    assert best.improves(2, {"eval_accuracy": 0.3})
    assert not best.improves(3, {"loss": 1.0})
    assert best.since == 0
    assert not best.improves(4, {"eval_accuracy": None})
    assert (best.step, best.value, best.since) == (2, 0.3, 1)


def test_settings_without_evaluations_are_refused(settings, run):
    with pytest.raises(ConfigError, match="pass eval_data or eval_fraction"):
        settings(keep_best="eval_loss", eval_fraction=0.0)
    with pytest.raises(ConfigError, match="pass eval_every"):
        settings(patience=1, eval_every=0)
    with pytest.raises(ConfigError, match="objective sft has no such metric"):
        run(settings(keep_best="eval_accuracy"))
