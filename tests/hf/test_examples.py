"""The examples run as their users run them, with a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from ranks import Fork

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def task(make_both, tmp_path):
    """Tiny checkpoint with a character tokenizer, and data."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(i): i for i in range(3, 128)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    both = make_both("llama")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(both.folder)
    rows = [{"prompt": "say " + "a" * i, "completion": "b" * (7 - i)} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return both, tmp_path / "data.jsonl", tmp_path / "out"


TRAINER = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "lr_scheduler_type": "constant"}
TRAINER |= {"max_steps": 4, "learning_rate": 0.01, "per_device_train_batch_size": 8}
SETTINGS = {
    "train_with_accelerate": {"epochs": 4, "learning_rate": 0.01, "batch_size": 8},
    "train_in_a_loop": {"epochs": 4, "learning_rate": 0.01, "batch_size": 8},
    "train_with_trainer": TRAINER,
    "train_with_trl": TRAINER | {"bf16": False},
}


@pytest.mark.parametrize("example", SETTINGS)
def test_an_example_trains_a_checkpoint_that_transformers_reads(example, task, hf, monkeypatch):
    """Every step trains on all rows, so the loss decreases."""
    if example == "train_with_trl":
        pytest.importorskip("trl", reason="trl is not installed")
    both, data, out = task
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    hf.unregister()  # the example registers what it needs
    ran = importlib.import_module(example).main(str(both.folder), str(data), str(out), **SETTINGS[example])
    losses = ran if isinstance(ran, list) else [e["loss"] for e in ran.state.log_history if "loss" in e]
    check(losses, both, out / "merged" if example == "train_with_trl" else out, example)


@pytest.mark.slow
def test_the_example_for_several_gpus_trains_on_two_processes(task, tmp_path):
    both, data, out = task
    settings = "epochs=4, learning_rate=0.01, batch_size=4"
    imports = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import train_on_eight_gpus"
    code = "import json, train_on_eight_gpus as t; "
    code += f"losses = t.main({str(both.folder)!r}, {str(data)!r}, {str(out)!r}, {settings}); "
    code += f"open({str(tmp_path / 'losses')!r} + str(t.dist.get_rank()), 'w').write(json.dumps(losses)); "
    code += "t.dist.destroy_process_group()"
    fork = Fork("launch", imports, code, 2, output=tmp_path / "output")
    ended = fork.wait(300)
    assert ended == 0, f"{ended}: {fork.output.read_text()[-9000:]}"
    check(json.loads((tmp_path / "losses0").read_text()), both, out, "train_on_eight_gpus")


def check(losses, both, out, example):
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    trained = type(both.reference).from_pretrained(out)
    before, after = (model.model.layers[0].self_attn.q_proj.weight for model in (both.reference, trained))
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.name_or_path)
    assert tokenizer("say b").input_ids
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) < 70


def test_the_vision_example_exports_a_checkpoint_that_transformers_reads(tmp_path, monkeypatch, request):
    """At night it runs a tenth of the usual length, enough to beat guessing, which is right once in twelve
    times.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    long = request.config.getoption("--all-families")
    main = importlib.import_module("learn_to_see").main
    share, same = main(str(tmp_path / "out"), steps=40 if long else 2, batch_size=16)
    assert share > (0.2 if long else -1)
    assert same
