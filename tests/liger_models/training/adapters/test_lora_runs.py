"""`--lora`: a run matches transformers with PEFT, and resumes bit for bit."""

from __future__ import annotations

import importlib
import json
import math
import signal

import pytest
import torch
from peft_runs import ADAPTER, DRIFT, distance, stock, train_stock
from rounding import BOUND
from safetensors.torch import load_file

import liger_models
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.layers.recompute import host_weights
from liger_models.training import TrainingInterrupted
from liger_models.training.data import Documents
from liger_models.training.loop import Run
from liger_models.training.processes.world import World


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", "r=4"),
        ("gemma2", "r=4,alpha=4,targets=q_proj+down_proj,rslora"),
        ("llama", "r=3,dora"),
        ("phi3", "r=4"),
        ("starcoder2", "r=4"),
        ("deepseek_v3", "r=4"),  # PEFT mistakes dense MLPs and shared experts for experts
        ("deepseek_v3", "r=4,targets=o_proj+down_proj"),
        ("deepseek_v3", "r=4,experts"),
        ("qwen3_moe", "r=3,targets=q_proj,experts,rslora"),
        ("gpt_oss", "r=3,targets=q_proj,experts"),  # gate and up alternate, and stacks are transposed
        ("llama4_text", "r=3,targets=q_proj,experts"),  # transposed, and not said to PEFT
    ],
)
def test_a_run_matches_transformers_and_peft(family, lora, checkpoints, settings, run):
    folder = checkpoints(family)
    config = settings(model=str(folder), lora=lora, eval_fraction=0.0, merge=True, steps=5)
    begun = Run(config, World("cpu"))
    (config_folder := folder.parent / "begun").mkdir()
    begun.adapters.write(config_folder)
    theirs = stock(folder, config_folder)
    expected = train_stock(theirs, begun, 5)
    result = run(config)
    for record, loss in zip(result.records, expected, strict=True):
        assert math.isclose(record["loss"], loss, rel_tol=BOUND)
        assert record["trainable_parameters"] == sum(p.numel() for p in begun.parameters)
    theirs.save_pretrained(folder.parent / "theirs")
    theirs_adapter, ours = (load_file(path / ADAPTER) for path in (folder.parent / "theirs", result.final))
    assert distance(ours, theirs_adapter) <= DRIFT
    assert any(tensor.any() for name, tensor in ours.items() if "lora_B" in name)

    # The merged model equals PEFT's merge into transformers' own, up to the order of a sum of 4 products.
    merged = stock(folder, result.final).merge_and_unload().state_dict()
    found = stock(result.final.parent / "merged").state_dict()
    assert distance(found, merged) <= 1e-6
    files = load_file(result.final.parent / "merged" / "model.safetensors")
    assert distance(dict(liger_models.from_hub(result.final).checkpoint_tensors()), files) <= 1e-6
    config_file = json.loads((result.final / "adapter_config.json").read_text())
    assert config_file["base_model_name_or_path"] == str(folder)
    assert not (result.final / "model.safetensors").exists()


def test_only_the_adapted_layers_change(checkpoint, settings, run):
    result = run(settings(lora="r=4", merge=True))
    before, after = (load_file(f / "model.safetensors") for f in (checkpoint, result.final.parent / "merged"))
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize(("lora", "level"), [("r=4", "lean"), ("r=4,dropout=0.2", "checkpoint")])
def test_a_run_resumed_after_a_signal_gives_the_same_bits(
    lora, level, settings, losses, run, monkeypatch, tmp_path
):
    unstopped = run(settings(lora=lora, activation_memory=level, output=tmp_path / "unstopped"))
    make, made = Documents.batch, []

    def batch(self, rows):
        made.append(rows)
        if len(made) == 9:
            signal.raise_signal(signal.SIGTERM)
        return make(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Documents, "batch", batch)
        with pytest.raises(TrainingInterrupted):
            run(settings(lora=lora, activation_memory=level, save_every=0))
    saved = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*/*"))
    assert {ADAPTER, "adapter_config.json", "tokenizer.json", "training_state"} <= set(saved)
    result = run(settings(lora=lora, activation_memory=level, save_every=0, resume="auto"))
    assert losses(result) == losses(unstopped)
    one, other = (load_file(r.final / ADAPTER) for r in (result, unstopped))
    assert distance(one, other) == 0


def test_a_resumed_run_must_have_the_same_adapters_and_model(settings, run, checkpoints):
    run(settings(lora="r=4", steps=2))
    for changed in ({"lora": "r=8"}, {"lora": None}, {"lora": "r=4", "model": str(checkpoints("llama"))}):
        with pytest.raises((ConfigError, CheckpointError)):
            run(settings(**{"steps": 4, "resume": "auto", **changed}))


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_run_with_weights_in_host_memory_has_the_same_bits(
    quantize, settings, losses, run, monkeypatch, tmp_path
):
    if quantize:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(host_weights, "LEAST", 1)  # of a tiny model
    options = {"lora": "r=4", "quantize": quantize, "merge": True, "activation_memory": "offload"}
    if quantize and importlib.import_module("bitsandbytes").functional.has_avx512bf16():
        options["eval_fraction"] = 0.0  # there bitsandbytes evaluates no layer narrower than a block of 64
    here, there = (
        run(settings(output=tmp_path / where, weights_memory=where, **options))
        for where in ("device", "host")
    )
    assert losses(here) == losses(there)
    ours, theirs = (load_file(r.final.parent / "merged" / "model.safetensors") for r in (here, there))
    assert distance(ours, theirs) == 0
