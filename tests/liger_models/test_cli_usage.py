"""Usage of the command line: its help, and errors in its options."""

import re

import pytest

from liger_models.cli import COMMANDS, build_parser, main
from liger_models.layers.attention.backends import BACKENDS


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (["train", "model", "--seq", "256"], "liger-models train", "the following arguments are required"),
        (["inspect", "model", "--quickly"], "liger-models inspect", "unrecognized arguments: --quickly"),
        ([], "liger-models", "the following arguments are required: COMMAND"),
    ],
)
def test_a_usage_error_prints_the_error_and_where_to_find_help(words, command, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    error, help_line = capsys.readouterr().err.splitlines()
    assert error.startswith(f"{command}: error: {message}")
    assert help_line == f"See `{command} --help`."


@pytest.mark.parametrize("more", [[], ["--epochs", "1"]], ids=["and something is missing", "alone"])
def test_an_unknown_option_is_reported_with_the_nearest(more, capsys):
    with pytest.raises(SystemExit):
        main(["train", "model", "--data", "d", "--output", "o", "--epoch", "1", *more])
    assert "; --epoch is not an option, the nearest is --epochs\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["lst"], "list"), (["train", "model", "--dtype", "bf16"], "bfloat16")],
    ids=["command", "value"],
)
def test_an_unknown_choice_is_reported_with_the_nearest(words, nearest, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert f"; the nearest is {nearest}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--learning_rate", "--lr"),
        ("--per-device-train-batch-size", "--batch-size"),
        ("--max-length", "--seq-len"),
    ],
)
def test_options_of_other_tools_are_reported_with_ours(theirs, ours, capsys):
    with pytest.raises(SystemExit):
        main(["train", "model", "--data", "d", "--output", "o", "--epochs", "1", theirs, "1"])
    assert f"; {theirs} is not an option, the nearest is {ours}\n" in capsys.readouterr().err


def command_parser(name):
    (commands,) = (action for action in build_parser()._actions if action.dest == "command")
    return commands.choices[name]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_begins_with_its_purpose(command):
    assert re.match(r"[A-Z][a-z]+ ", command_parser(command).description)


def test_the_help_of_attention_names_every_backend():
    (option,) = (action for action in command_parser("train")._actions if action.dest == "attention")
    assert set(re.findall(r"\w+", option.help)) >= set(BACKENDS)


def test_the_help_fits_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_the_help_of_train_begins_with_the_ten_options_used_most(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    options = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    most = "--data --output --epochs --steps --lr --batch-size --seq-len --lora --eval-fraction --resume"
    assert options[:10] == most.split()


def test_evaluations_without_data_are_refused(capsys):
    words = ["train", "llama-demo", "--data", "x", "--output", "y", "--steps", "1", "--eval-every", "5"]
    assert main(words) == 2
    assert "--eval-every needs held-out data" in capsys.readouterr().err


def test_abbreviated_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["train", "llama-demo", "--data", "x", "--output", "y", "--steps", "1", "--optim", "sgd"])
    assert "unrecognized arguments: --optim sgd" in capsys.readouterr().err
