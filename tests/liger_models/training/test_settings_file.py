"""Settings of a run in a file: overridden by flags, checked by name, written, and read back."""

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import liger_models.training
from liger_models.cli import main
from liger_models.convert.errors import ConfigError
from liger_models.training import TrainConfig
from liger_models.training.settings_file import settings_text

FILE = """
model: somewhere
output: out
data: [0.7=a.jsonl, 0.3=b.jsonl]
steps: 10
optimizer:
  lr: 1e-4
  weight-decay: 0
objective: dpo
beta: 0.2
freeze: [vision, projector]
lora: {r: 4, targets: [q_proj, v_proj], rslora: true}
merge: true
"""


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    """Function that returns the TrainConfig of a command line and a file."""

    def parse(text, *flags):
        (tmp_path / "run.yaml").write_text(text)
        got = []
        monkeypatch.setattr(liger_models.training, "train", lambda config: got.append(config) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["train", "--config", str(tmp_path / "run.yaml"), *flags])
        return got[0]

    return parse


def test_every_setting_has_an_option_with_its_default_and_is_described(parsed):
    given = "model: m\noutput: o\ndata: [d]\nsteps: 1"
    assert parsed(given) == TrainConfig("m", ("d",), "o", steps=1)
    described = set(re.findall(r"\w+", TrainConfig.__doc__))
    assert {field.name for field in fields(TrainConfig)} <= described


def test_a_file_gives_settings_and_flags_override_them(parsed):
    config = parsed(FILE, "--epochs", "2", "--beta", "0.5", "--data", "c.jsonl")
    expected = TrainConfig(
        "somewhere",
        ("c.jsonl",),
        "out",
        objective="dpo",
        objective_options={"beta": 0.5},
        epochs=2.0,
        lr=1e-4,
        weight_decay=0.0,
        freeze=("vision", "projector"),
        lora="r=4,targets=q_proj+v_proj,rslora",
        merge=True,
    )
    assert config == expected
    assert parsed(FILE).data == ("0.7=a.jsonl", "0.3=b.jsonl")
    assert (parsed(FILE).steps, parsed(FILE, "another").model) == (10, "another")


def test_the_settings_that_a_run_writes_are_read_back(parsed):
    config = parsed(FILE, "--lr", "1e-05", "--eval-fraction", "0.1")
    assert asdict(parsed(settings_text(config))) == asdict(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("leraning_rate: 1", "leraning_rate is not an option"),
        (
            "optimizer: {wieght_decay: 1}",
            "optimizer.wieght_decay is not an option; the nearest is weight_decay",
        ),
        ("lr: fast", "lr is 'fast'; expected float"),
        ("merge: 3", "merge is 3; expected true or false"),
        ("objective: dop", "objective is 'dop'; expected one of sft, dpo"),
        ("optimizer: {lr: 1}\nlr: 2", "lr is given twice"),
        ("lr: 1\nsteps: 2\nlr: 1", "names 'lr' twice"),
        ("- a", "holds list"),
        ("a: [", "is malformed"),
    ],
)
def test_an_unusable_file_is_refused_with_the_reason(tmp_path, capsys, text, words):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["train", "--config", str(tmp_path / "run.yaml")])
    assert words in capsys.readouterr().err


def test_a_json_file_that_names_a_setting_twice_is_refused(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"lr": 1, "lr": 2}')
    with pytest.raises(SystemExit):
        main(["train", "--config", str(tmp_path / "run.json")])
    assert "names 'lr' twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "lr", "weight_decay"),
    [
        ({"model": "llama-demo"}, 3e-4, 0.1),
        ({}, 2e-5, 0.0),
        ({"lora": ""}, 2e-4, 0.0),
        ({"objective": "dpo"}, 1e-6, 0.0),
        ({"objective": "dpo", "lora": ""}, 1e-5, 0.0),
        ({"lr": 0.5, "weight_decay": 0.2, "objective": "kto"}, 0.5, 0.2),
    ],
)
def test_defaults_of_learning_rate_and_decay_depend_on_the_kind_of_training(given, lr, weight_decay):
    config = TrainConfig(**{"model": "m", "data": ("d",), "output": "o", "steps": 1} | given)
    assert (config.lr, config.weight_decay) == (lr, weight_decay)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": "fast"}, "lr is 'fast'; expected a number"),
        ({"eval_every": True}, "eval_every is True; expected a number"),
        ({"lora": True}, "lora is True; expected text"),
        ({"model": None}, "model is None; expected text"),
    ],
)
def test_a_setting_of_another_type_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"model": "m", "data": ("d",), "output": "o", "steps": 1} | setting)


def test_paths_are_taken_as_settings(tmp_path):
    config = TrainConfig(tmp_path, ("d",), tmp_path / "o", steps=1)
    assert (config.model, config.output) == (str(tmp_path), str(tmp_path / "o"))


@pytest.mark.parametrize("section", ["optimizer", "the run", "run", "adapters", "most-used", "the_machine"])
def test_sections_are_named_as_in_the_help(parsed, section):
    assert parsed("model: m\ndata: d\noutput: o\n" + f"{section}: {{steps: 3, seed: 4}}").seed == 4


def test_defaults_adapt_to_an_adapter_found_later_and_given_values_are_kept():
    config = TrainConfig("m", ("d",), "o", steps=1, weight_decay=0.3)
    assert config.changed(lora="").lr == pytest.approx(10 * config.lr)
    assert config.changed(lora="").weight_decay == 0.3


def test_paths_are_taken_as_their_names(tmp_path):
    """Such as `final` of another run."""
    named = TrainConfig(model="a/final", data=("b.jsonl",), output="c", epochs=1)
    assert TrainConfig(model=Path("a/final"), data=(Path("b.jsonl"),), output=Path("c"), epochs=1) == named
