"""A model sharded over two processes loads, trains and saves like one in a single process."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import liger_models
from liger_models.architectures import find_architecture

RANK = Path(__file__).with_name("sharded_rank.py")
# One family for each way in which tensors are stored on disk and in memory.
NAMES = ["llama-fused", "llama-split", "gemma2-fused", "qwen3_moe-fused", "gpt_oss-fused"]
program = runpy.run_path(str(RANK))
train_a_step, fresh_config = program["train_a_step"], program["fresh_config"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with tiny models that were loaded, trained and saved by two ranks and by one process."""
    folder = tmp_path_factory.mktemp("sharded")
    for name in NAMES:
        family, form = name.split("-")
        torch.manual_seed(0)
        model = liger_models.from_config({**find_architecture(family).tiny, "vocab_size": 133})  # uneven
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.3)
        model.save_pretrained(folder / name / "source", max_shard_size="50KB")
        model = liger_models.from_hub(folder / name / "source", projections=form)
        train_a_step(model)
        model.save_pretrained(folder / name / "expected", max_shard_size="20KB")
    (folder / "taken").write_text("")
    run_ranks(RANK, folder)
    return folder


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_read_their_rows_and_save_the_bytes_of_the_whole_model(name, folder):
    counts = [json.loads((folder / f"bytes{rank}.json").read_text())[name] for rank in range(2)]
    total = sum(
        path.stat().st_size for path in (folder / name / "source").iterdir() if path.suffix == ".safetensors"
    )
    for count in counts:
        assert count["read"] == count["held"]
        assert 0.4 * total < count["read"] < 0.6 * total  # about half each, apart from headers and buffers
    assert files_of(folder / name / "loaded") == files_of(folder / name / "source")
    assert files_of(folder / name / "trained") == files_of(folder / name / "expected")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_read_rows_of_new_tokens(folder, tmp_path):
    first = min(path.name for path in folder.iterdir() if (path / "source").is_dir())
    whole = liger_models.from_hub(folder / first / "source", new_tokens=program["NEW_TOKENS"], device="cpu")
    whole.save_pretrained(tmp_path)
    assert files_of(folder / "new_tokens") == files_of(tmp_path)
    for rank in range(2):
        assert "is sharded over processes (FSDP2)" in (folder / f"resized{rank}").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_all_ranks_raise_if_the_first_cannot_write(folder):
    for rank in range(2):
        assert f"{folder / 'taken'}" in (folder / f"error{rank}").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("family", program["FRESH"])
def test_two_ranks_initialise_the_same_weights_as_one(family, folder, tmp_path):
    torch.manual_seed(0)
    model = liger_models.from_config(fresh_config(family))
    assert not model.embed_tokens.weight[3].any()
    model.save_pretrained(tmp_path / "expected")
    assert files_of(folder / f"fresh_{family}") == files_of(tmp_path / "expected")
