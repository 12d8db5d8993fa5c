"""Runs with --mtp: training, logging, saving and resuming."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import main
from liger_models.convert.errors import ConfigError
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.adapters.lora_targets import find_targets

PREDICTION = "mtp."
OPTIONS = {"objective_options": {"mtp": 0.3}}


@pytest.fixture(scope="module")
def with_modules(tmp_path_factory, tokenizer_folder):
    """Checkpoint of Qwen3.5's tiny config with its modules and the tokenizer's vocabulary."""
    folder = tmp_path_factory.mktemp("modules") / "model"
    torch.manual_seed(3)
    config = {**find_architecture("qwen3_5_text").tiny, "vocab_size": 320}
    liger_models.from_config(config, mtp=True, device="cpu").save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(folder, result):
    before, after = weights(folder), weights(result.final)
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_a_run_trains_the_modules_and_resumes(tmp_path, with_modules, settings, run, losses):
    config = settings(model=str(with_modules), steps=4, save_every=2, keep=0, **OPTIONS)
    result = run(config)
    assert changed(with_modules, result) == weights(with_modules).keys()
    for record in result.records:
        for kind in ("", "eval_") if record["step"] % 2 == 0 else ("",):
            if record["step"] or kind:
                # Fresh weights predict nothing: each loss is about log(320), 5.8.
                assert 4 < record[f"{kind}mtp_loss"] < 7
                assert record[f"{kind}loss"] > 1.2 * record[f"{kind}mtp_loss"]
    settings_of_resumed = {"output": str(tmp_path / "again"), "resume": str(tmp_path / "run/checkpoint-2")}
    resumed = run(config.changed(**settings_of_resumed))
    for name, tensor in weights(resumed.final).items():
        assert torch.equal(tensor, weights(result.final)[name]), name


def test_micro_batches_give_the_step_of_one_batch(tmp_path, with_modules, settings, run):
    found = []
    for parts in (1, 2):
        sizes = {"batch_size": 2 // parts, "gradient_accumulation": parts, "steps": 1}
        options = {"model": str(with_modules), "output": tmp_path / str(parts), **sizes, **OPTIONS}
        found.append(run(settings(**options, eval_every=0)).metrics)
    for name in ("loss", "mtp_loss", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5)  # sums in other orders


def test_only_modules_that_are_named_get_adapters(with_modules, settings, run):
    pytest.importorskip("peft")

    model = liger_models.from_hub(with_modules, mtp=True, projections="split")
    native, _ = find_targets(model, LoraSettings.parse("r=2"), ())
    assert len(native) > 10
    assert not any(name.startswith("mtp.") for name in native)
    lora = "r=2,targets=q_proj+fc"
    result = run(settings(model=str(with_modules), lora=lora, steps=1, eval_every=0, **OPTIONS))
    assert result.metrics["mtp_loss"] > 0
    tensors = load_file(result.final / "adapter_model.safetensors")
    adapted = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    assert adapted == {"model.layers.1.self_attn.q_proj", "mtp.fc"}


def test_settings_that_exclude_each_other_are_refused(settings):
    with pytest.raises(ConfigError, match="mtp is -1; expected a finite weight"):
        settings(objective_options={"mtp": -1})
    with pytest.raises(ConfigError, match="adds to loss_type nll only"):
        settings(objective_options={"mtp": 0.1, "loss_type": "dft"})
    with pytest.raises(ConfigError, match="the objective dpo has no option 'mtp'"):
        settings(objective="dpo", objective_options={"mtp": 0.1})
    with pytest.raises(ConfigError, match="mtp needs the next token"):
        settings(sequence_parallel=2, **OPTIONS)


def test_the_command_line_plans_and_shows_the_modules(with_modules, capsys):
    plan = ["plan", str(with_modules), "--gpu", "80GiB", "--seq-len", "4096", "--json"]
    found = []
    for more in ([], ["--mtp", "0.1"]):
        assert main([*plan, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, more = found
    own = sum(t.numel() for name, t in weights(with_modules).items() if name.startswith(PREDICTION))
    assert more["num_parameters"] - plain["num_parameters"] == own
    assert more["peak"] > plain["peak"] + 4 * own
    assert main(["inspect", str(with_modules)]) == 0
    assert "19 tensors of the checkpoint are not parameters" in capsys.readouterr().out
    assert main(["inspect", str(with_modules), "--mtp"]) == 0
    assert "= mtp.fc.weight" in capsys.readouterr().out
