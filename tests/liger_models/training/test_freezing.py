"""Runs with --freeze and --train-only."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from liger_models.cli import main
from liger_models.convert.errors import ConfigError


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"freeze": ("embed_tokens", "layers.0")}, ("model.layers.1.", "model.norm.")),
        ({"train_only": ("q_proj", "*norm*")}, ("q_proj", "norm")),
    ],
)
def test_a_run_trains_the_rest_and_resumes_with_the_same_patterns(
    options, trained, tmp_path, checkpoint, settings, run, capsys
):
    """`q_proj` is fused with other projections, which are split for it."""
    config = settings(output=tmp_path / "run", steps=4, save_every=2, keep=0, **options)
    result = run(config)
    before, after = weights(checkpoint), weights(result.final)
    assert before.keys() == after.keys()  # the checkpoint is whole
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if any(part in name for part in trained)}
    count = sum(before[name].numel() for name in changed)
    assert f"trained: {count:,} of " in capsys.readouterr().err
    assert {record["trainable_parameters"] for record in result.records if record["step"]} == {count}
    resumed = run(config.changed(output=str(tmp_path / "again"), resume=str(tmp_path / "run/checkpoint-2")))
    for name, tensor in weights(resumed.final).items():
        assert torch.equal(tensor, after[name]), name
    other = {"freeze": ("embed_tokens",), "train_only": ()}
    with pytest.raises(ConfigError, match=r"was trained with (freeze|train_only)=\['?"):
        run(config.changed(resume=str(tmp_path / "run/checkpoint-2"), output=str(tmp_path / "x"), **other))


def test_layers_that_are_frozen_get_no_adapters(tmp_path, settings, run):
    pytest.importorskip("peft")
    result = run(settings(output=tmp_path, lora="r=2", train_only=("layers.1.mlp", "layers.0.*.q_proj")))
    adapted = {name.split(".lora_")[0] for name in load_file(result.final / "adapter_model.safetensors")}
    path = "base_model.model.model.layers."
    mlp = {f"{path}1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert adapted == {f"{path}0.self_attn.q_proj", *mlp}
    with pytest.raises(ConfigError, match="no linear layer is left to adapt"):
        run(settings(output=tmp_path / "none", lora="r=2", train_only=("norm",)))


def test_patterns_of_the_command_line_and_of_files(tmp_path, checkpoint, data, capsys):
    command = ["train", str(checkpoint), "--data", data, "--output", str(tmp_path / "run"), "--steps", "1"]
    assert main([*command, "--freeze", "layer.0"]) == 2
    assert "--freeze layer.0: no tensor matches 'layer.0'; near names are" in capsys.readouterr().err
    assert main([*command, "--train-only", "norm", "--freeze", "norm"]) == 2
    assert "--freeze norm --train-only norm: nothing is left to train" in capsys.readouterr().err
    (file := tmp_path / "run.json").write_text(json.dumps({"freeze": ["embed_tokens", "layers.0-1.mlp"]}))
    assert main([*command, "--config", str(file), "--train-only", "layers.*, norm", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert 'freeze: ["embed_tokens", "layers.0-1.mlp"]' in printed
    assert 'train_only: ["layers.*", "norm"]' in printed
    plan = ["plan", str(checkpoint), "--gpu", "80GiB", "--seq-len", "64", "--json"]
    totals = []
    for more in ([], ["--train-only", "layers.1.*.q_proj"]):
        assert main([*plan, *more]) == 0
        totals.append(json.loads(capsys.readouterr().out)["parts"]["optimizer"])
    assert 0 < totals[1] < totals[0] / 10
