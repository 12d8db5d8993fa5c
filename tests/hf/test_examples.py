"""The examples run as their users run them, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def task(make_both, tmp_path):
    """A tiny checkpoint with a tokenizer of letters, and data."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(i): i for i in range(3, 128)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    both = make_both("llama")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(both.folder)
    rows = [{"prompt": "say " + "a" * i, "answer": "b" * (7 - i)} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return both, tmp_path / "data.jsonl", tmp_path / "out"


@pytest.mark.slow
@pytest.mark.parametrize(("example", "result"), [("train_with_trainer", ""), ("train_with_peft", "merged")])
def test_an_example_trains_a_checkpoint_that_transformers_reads(example, result, task):
    both, data, out = task
    settings = {
        "max_steps": 4,
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 0.01,
        "logging_steps": 1,
    }
    settings |= {"lr_scheduler_type": "constant", "per_device_train_batch_size": 8}
    call = f"import {example}; t = {example}.main(*{[str(both.folder), str(data), str(out)]}, **{settings})"
    show = "import json; print(json.dumps([e['loss'] for e in t.state.log_history if 'loss' in e]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{call}\n{show}"], cwd=EXAMPLES, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert losses[-1] < losses[0]  # all rows are in every step
    trained = type(both.reference).from_pretrained(out / result)
    changed = (
        trained.model.layers[0].self_attn.q_proj.weight
        - both.reference.model.layers[0].self_attn.q_proj.weight
    )
    assert torch.isfinite(changed).all()
    assert changed.any()
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) < 60
