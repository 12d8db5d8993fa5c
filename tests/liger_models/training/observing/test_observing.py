"""Output of a run while it trains: samples, evaluations, and progress in terminals and in log files."""

import csv
import io
import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest
import torch

from liger_models.convert.errors import ConfigError
from liger_models.convert.progress import ProgressBar
from liger_models.training.loop import Run
from liger_models.training.observing import display, samples
from liger_models.training.observing.metrics import COLUMNS, Metrics
from liger_models.training.observing.samples import Samples, read_prompts
from liger_models.training.processes.world import World
from liger_models.training.text.tokenizer import TextTokenizer

DOCS = Path(__file__).parents[4] / "docs"


# -- samples


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    said = {"role": "user", "content": "abc"}
    lines = [
        {"prompt": "abc abc"},
        {"messages": [said]},
        {"prompt": [{"role": "system", "content": "d"}, said]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def read_samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_prompts_are_answered_greedily_at_each_evaluation_and_after_resuming(
    run, settings, prompts, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(samples, "NEW_TOKENS", 4)
    changes = {"sample_prompts": str(prompts), "save_every": 2, "keep": 0}
    run(settings(steps=4, **changes))
    found = read_samples(tmp_path / "run")
    assert [(s["step"], s["prompt"]) for s in found] == [
        (step, text) for step in (0, 2, 4) for text in ("abc abc", "abc", "abc")
    ]
    assert f"sample at step 4: 'abc abc' -> {found[6]['completion']!r}" in capsys.readouterr().err
    run(settings(steps=6, resume=str(tmp_path / "run" / "checkpoint-2"), **changes))
    later = read_samples(tmp_path / "run")
    assert [sample["step"] for sample in later] == [step for step in (0, 2, 4, 6) for _ in range(3)]
    assert later[:6] == found[:6]


class Repeating:
    """Stub of a model with 40 positions: repeats two tokens of each prompt, and ends."""

    def special_id(self, key):
        return [7, 1]

    def generate(self, ids, most, attention_mask, eos_token_id):
        self.asked = [row[mask.bool()].tolist() for row, mask in zip(ids, attention_mask, strict=True)]
        assert ids.shape[1] + most == 40
        assert eos_token_id == [1, 7]
        end = torch.full((len(ids), 2), 7)
        return torch.cat([ids, ids[:, -5:-3], end], 1)


def test_prompts_are_rendered_padded_and_answered_up_to_the_end(tokenizer_folder, prompts, tmp_path):
    tokenizer, model = TextTokenizer(tokenizer_folder), Repeating()
    asked = Samples(read_prompts(str(prompts), tokenizer, 40), tokenizer, 40, tmp_path)
    asked.generate(model, 3, torch.device("cpu"), print)
    texts = ("<|user|>abc abc</s>", "<|user|>abc</s>", "<|system|>d</s>\n<|user|>abc</s>")
    expected = [
        tokenizer.backend.encode(f"<s>{text}\n<|assistant|>", add_special_tokens=False).ids for text in texts
    ]
    assert model.asked == expected
    assert [s["completion"] for s in read_samples(tmp_path)] == [
        tokenizer.decode(ids[-5:-3]) for ids in expected
    ]


def test_prompts_need_no_held_out_data_and_a_text_is_one(run, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "NEW_TOKENS", 4)
    records = run(settings(sample_prompts="a text", eval_fraction=0.0, eval_every=1, steps=1)).records
    assert [(s["step"], s["prompt"]) for s in read_samples(tmp_path / "run")] == [
        (0, "a text"),
        (1, "a text"),
    ]
    assert "eval_loss" not in records[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_prompts": "missing.txt"}, r"missing\.txt cannot be read \(No such file"),
        ({"sample_prompts": "a" * 500}, " tokens, but the model has 128 positions"),
        ({"objective": "reward"}, "objective reward trains a model that writes no text"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(run, settings, judged, changes, message):
    data = (judged["pairs"],) if "objective" in changes else settings().data
    with pytest.raises(ConfigError, match=message):
        run(settings(data=data, eval_fraction=0.0, **({"sample_prompts": "a"} | changes)))


def test_samples_are_refused_where_processes_share_the_model(settings, monkeypatch):
    world = World("cpu")
    world.shard = "full"
    with pytest.raises(ConfigError, match="pass --shard none"):
        Run(settings(sample_prompts="a"), world)


def test_an_evaluation_takes_no_more_batches_than_asked(settings):
    few = Run(settings(eval_fraction=0.5, eval_steps=2, batch_size=2), World("cpu"))
    assert len(list(few.evaluation.rows())) == 4
    fewer = Run(settings(eval_fraction=0.5, eval_steps=2, batch_size=2, eval_tokens=3 * 64), World("cpu"))
    assert len(list(fewer.evaluation.rows())) == 3


# -- progress


def test_a_log_file_has_a_line_with_the_time_every_few_steps(run, settings, capsys, monkeypatch):
    monkeypatch.setattr(display, "INTERVAL", 0.0)
    run(settings(steps=5, log_every=2, eval_every=5))
    shown = capsys.readouterr().err
    lines = shown.splitlines()
    steps = [line for line in lines if re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ step ", line)]
    assert [line.split()[2] for line in steps] == ["1", "2", "4", "5"]
    assert all("loss" in line for line in steps)
    assert [" of 5, 0:00:0" in line for line in steps] == [False, True, True, False]
    assert any(re.search(r"Z evaluation: 2 of \d+ batches$", line) for line in lines)
    assert "\r" not in shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_bars_of_steps_and_of_evaluations(run, settings, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    run(settings(steps=2))
    shown = re.split(r"[\r\n]+", terminal.getvalue())
    assert any(line.startswith("2/2 |") and "loss" in line for line in shown)
    assert any(line.startswith("evaluation:") for line in shown)
    bars = [line.removesuffix("\x1b[A") for line in shown if "|" in line]  # and the cursor back up
    assert max(map(len, bars)) <= 49
    assert not any(" step 1 of" in line for line in shown)


def test_a_bar_is_lines_in_a_file():
    with ProgressBar(total=2, file=(file := io.StringIO()), desc="reading", mininterval=0.0) as bar:
        bar.update()
        bar.update()
    assert "\\r" not in file.getvalue()
    assert [line.split("|")[0] for line in file.getvalue().splitlines()] == [
        f"reading: {percent:3d}%" for percent in (0, 50, 100, 100)
    ]


def test_a_bar_fits_a_terminal_that_does_not_know_its_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    reader, writer = pty.openpty()  # of no size
    with open(writer, "w") as terminal:
        bar = ProgressBar(total=10, file=terminal)
        bar.set_postfix_str("x" * 300)
        bar.close()
        shown = os.read(reader, 100_000).decode()
    os.close(reader)
    assert max(map(len, re.split(r"[\r\n]+", shown))) == 79


# -- the records


def test_the_csv_has_the_columns_of_the_docs_and_each_record_its_time(run, settings, tmp_path):
    run(settings(steps=2))
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows]
    assert times == [record["time"] for record in records] == sorted(times)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", times[0])
    section = (DOCS / "training.md").read_text().partition("## Logging")[2].partition("\n## ")[0]
    table = "".join(
        line.partition("|")[2].partition("|")[0] for line in section.splitlines() if line[:1] == "|"
    )
    named = re.findall(r"`(\w+)`", table)
    assert tuple(named[: len(COLUMNS)]) == COLUMNS
    assert Metrics(tmp_path, resumed_step=None, extra=["kl"]).columns[-2:] == ("kl", "eval_kl")
