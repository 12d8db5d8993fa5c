"""Runs with --indexer-loss."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError

OPTIONS = {"objective_options": {"indexer_loss": 0.5}}


@pytest.fixture(scope="module")
def with_indexers(tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("indexers") / "model"
    torch.manual_seed(3)
    config = {**find_architecture("deepseek_v32").tiny, "vocab_size": 320}
    liger_models.from_config(config, device="cpu").save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_only_the_indexers_are_trained_if_asked_for(with_indexers, settings, run):
    result = run(settings(model=str(with_indexers), train_only=["indexer"], steps=1, **OPTIONS))
    assert result.metrics["indexer_loss"] > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (with_indexers, result.final))
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    assert trained == {name for name in before if ".indexer." in name}


@pytest.mark.parametrize(
    ("changes", "said"), [({"lora": "r=2"}, "does not work with lora"), ({}, "no layer")]
)
def test_settings_without_their_loss_are_refused(with_indexers, settings, run, checkpoint, changes, said):
    model = with_indexers if changes else checkpoint
    with pytest.raises(ConfigError, match=said):
        run(settings(model=str(model), steps=1, **changes, **OPTIONS))
