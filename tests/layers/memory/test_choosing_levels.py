"""The levels chosen recompute the least within a budget, in a model and in `liger-models plan`."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from planned_models import GIB, LLAMA_1B, LLAMA_8B, TINY, shared_on_meta

import liger_models
from liger_models.cli import main
from liger_models.cli.shared.gpus import find_gpu, limits_of
from liger_models.convert.errors import ConfigError
from liger_models.layers.memory import (
    FittingLevels,
    Step,
    StepMemory,
    largest,
    parse_budget,
)
from liger_models.layers.recompute.activation_memory import LEVELS


def test_no_other_fitting_levels_recompute_less():
    memory = StepMemory(shared_on_meta(LLAMA_1B | {"num_hidden_layers": 3}), Step(16, 2048))
    plans = [memory.plan(levels) for levels in itertools.product(LEVELS, repeat=3)]
    of_a_layer = memory.plan(["offload"] * 3).repeated / 3
    for budget in sorted({plan.peak for plan in plans if plan.peak >= memory.choose_levels(0).peak}):
        chosen = memory.choose_levels(budget)
        best = min(plan.repeated for plan in plans if plan.peak <= budget)
        assert chosen.fits
        # Choosing layer by layer is not always optimal, but never worse by more than a layer.
        assert best <= chosen.repeated <= best + of_a_layer
    smallest = memory.plan(["offload"] * 3).peak
    assert memory.choose_levels(smallest).fits
    nothing_fits = memory.choose_levels(smallest // 2)
    assert not nothing_fits.fits
    assert nothing_fits.peak <= 1.05 * smallest


def test_long_sequences_without_host_memory_go_in_tiles_and_else_to_the_host():
    memory = StepMemory(shared_on_meta(LLAMA_1B | {"num_hidden_layers": 4}), Step(1, 1 << 17))
    peaks = [memory.plan([level] * 4).peak for level in LEVELS]
    assert peaks == sorted(peaks, reverse=True)
    for i, level in enumerate(LEVELS[3:], 3):
        assert peaks[i] < peaks[i - 1]
        chosen = memory.choose_levels(peaks[i], None if level == "offload" else 0)
        assert chosen.fits
        assert level in chosen.levels
        offloaded = chosen.levels.count("offload")
        assert chosen.host == offloaded * (1 << 17) * 2048 * 2
        assert bool(offloaded) == (level == "offload") == ("GiB of the host" in str(chosen))
    # Attention is not repeated if there is room for its output.
    for left, results in ((None, 0), (8 * GIB, 0), (9 * GIB, 2048 * 2 + 32 * 4)):  # and its log-sum-exp
        plan = memory.plan(["offload"] * 4, host_budget=left)
        assert plan.host == 4 * (1 << 17) * (2048 * 2 + results)
        assert (plan.repeated < memory.plan(["checkpoint"] * 4).repeated) == bool(results)
    assert set(memory.choose_levels(peaks[3], 64 * GIB).levels) <= {"all", "lean", "mlp", "offload"}
    # A short sequence is a single tile, which costs no less than all tokens at once.
    short = StepMemory(shared_on_meta(LLAMA_1B), Step(1, 4096))
    assert short.plan(["tiled"] * 16).peak == short.plan(["checkpoint"] * 16).peak


def test_some_layers_save_on_the_host_where_their_copies_are_hidden():
    memory = StepMemory(shared_on_meta(LLAMA_8B | {"num_hidden_layers": 12}), Step(4, 4096))
    budget = memory.plan(["lean"] * 12).peak - GIB
    chosen, without = memory.choose_levels(budget, 64 * GIB), memory.choose_levels(budget)
    assert chosen.fits
    assert [i for i, level in enumerate(chosen.levels) if level == "lean@host"] == [0, 4]
    assert chosen.repeated < without.repeated
    assert 1 <= chosen.host / (2 * memory.layers[0].kept["lean"]) < 1.01  # in whole buffers
    assert "but lean@host in 0, 4; " in str(chosen)
    # Unless they take more than half of the host's memory, or the bus is slow.
    assert memory.choose_levels(budget, int(1.9 * chosen.host)).levels.count("lean@host") == 1
    assert memory.choose_levels(budget, 64 * GIB, 20_000) == replace(without, host_budget=64 * GIB)


def test_the_state_of_adapters_is_that_of_their_dtype():
    model = liger_models.from_config(TINY, dtype="bfloat16", activation_memory="auto", memory_budget="1GiB")
    model.requires_grad_(False)
    adapter = model.layers[0].self_attn.adapter = torch.nn.Linear(64, 64, dtype=torch.float32)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, labels=ids)
    assert model.fit_levels.plan.parts["optimizer"] == 8 * sum(p.numel() for p in adapter.parameters())


def test_the_first_layers_give_up_what_they_keep_first():
    memory = StepMemory(shared_on_meta(LLAMA_1B), Step(8, 2048))
    everything, least = memory.plan(["all"] * 16).peak, memory.plan(["checkpoint"] * 16).peak
    for share in (0.2, 0.4, 0.6, 0.8):
        levels = memory.choose_levels(int(least + share * (everything - least))).levels
        places = [LEVELS.index(level) for level in levels]
        assert places == sorted(places, reverse=True)


def run_step(model, tokens, seq=32):
    ids = torch.randint(0, 131, (tokens // seq, seq), generator=torch.Generator().manual_seed(1))
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def test_auto_chooses_at_the_first_batch_and_again_for_a_larger_one():
    torch.manual_seed(0)
    model = liger_models.from_config(TINY, activation_memory="auto", memory_budget="3MiB")
    plain = liger_models.from_config(TINY)
    plain.load_state_dict(model.state_dict())
    assert model.activation_memory == ("lean",) * 4
    chosen = {}
    for tokens in (32, 64, 1024, 64):
        assert torch.equal(run_step(model, tokens), run_step(plain, tokens))
        chosen[tokens] = [LEVELS.index(level) for level in model.activation_memory]
    assert chosen[32] < chosen[1024] == chosen[64] == [5] * 4
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        model.set_activation_memory("auto", "3MiB")
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert model.fit_levels.plan is None  # without gradients nothing is kept
    model.set_activation_memory("mlp")
    assert model.fit_levels is None


class OnAGPU(FittingLevels):
    """Simulate a GPU on which the process holds `held` bytes in addition to parameters and gradients."""

    held = 0

    def _others(self, model, device):
        return self.held

    def _first_step_was_made(self, model):
        weight = SimpleNamespace(device=torch.device("cuda"))
        on_gpu = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight), parameters=model.parameters)
        return super()._first_step_was_made(on_gpu)


@pytest.mark.parametrize("held", [0, 4], ids=["sgd", "two moments in bfloat16"])
def test_after_the_first_step_the_optimizers_real_state_counts(held, make_model):
    """Six bytes an element are assumed before; a smaller state leaves room for more, once, and not before a
    step was made.
    """
    model = make_model().bfloat16()
    trained = sum(p.numel() for p in model.parameters())
    ids = torch.randint(0, 61, (16, 60))
    step = Step(1, ids.numel(), optimizer_bytes=held)
    room = StepMemory(model, step).plan(["all"] * 3).peak
    model.fit_levels = fit = OnAGPU(room, say=(said := []).append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def planned():
        model(ids, labels=ids).loss.backward()
        return fit.plan

    first = planned()
    assert first.parts["optimizer"] == 6 * trained
    assert planned() is first  # a second micro-batch
    optimizer.step()
    optimizer.zero_grad()
    fit.held = held * trained
    second = planned()
    assert second.parts["optimizer"] == 0  # it is part of the memory that the process holds
    assert second.budget == room - held * trained
    assert model.activation_memory == second.levels == ("all",) * 3 != first.levels
    assert planned() is second
    assert len(said) == 2


def test_the_chosen_levels_are_logged(caplog):
    model = liger_models.from_config(TINY, activation_memory="auto", memory_budget="1MiB")
    with caplog.at_level("INFO", "liger_models"):
        run_step(model, 1024)
    assert "activation memory for 1,024 tokens: offload in layers 0 to 3" in caplog.text
    assert "does not fit" in caplog.text


def test_without_a_gpu_a_budget_is_needed():
    model = liger_models.from_config(TINY, activation_memory="auto")
    with pytest.raises(ValueError, match="pass memory_budget in bytes"):
        run_step(model, 32)


def test_a_budget_is_bytes_or_a_fraction():
    assert parse_budget(None) == (0.95, None)
    assert parse_budget(None, sharded=True) == (0.9, None)  # collectives have memory of their own
    assert parse_budget(0.8) == (0.8, None)
    assert parse_budget("1.5 GiB") == (1.0, 3 * GIB // 2)
    assert parse_budget("120GB") == (1.0, 120 * 10**9)
    assert parse_budget(1 << 36) == (1.0, 1 << 36)
    for bad in ("much", 0, "-3GiB"):
        with pytest.raises(ValueError, match="expected bytes, text"):
            parse_budget(bad)
    with pytest.raises(ValueError, match="only the level 'auto' has a budget"):
        liger_models.from_config(TINY, activation_memory="lean", memory_budget="1GiB")


def test_the_largest_number_that_fits_is_found():
    assert largest(lambda n: n <= 5) == 5
    assert largest(lambda n: n <= 100_000) == pytest.approx(100_000, rel=1 / 200)
    assert largest(lambda n: True, most=77) == 77
    assert largest(lambda n: False) == 0


def test_the_command_says_whether_a_step_fits_and_what_would_fit(capsys):
    arguments = ["plan", "llama-3.1-8b", "--batch-size", "8", "--seq-len", "4096", "--weights", "plain"]
    assert main([*arguments, "--gpu", "H200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"]
    assert report["peak"] <= report["budget"] < report["memory"]
    assert report["by_level"]["checkpoint"]["seq_len"] > report["by_level"]["lean"]["seq_len"] > 4 * 4096
    rows = report["by_level"]["checkpoint"]["batch_size"]
    assert main([*arguments[:3], str(rows), *arguments[4:], "--gpu", "H200"]) == 0
    assert "It fits: checkpoint in layers 0 to 30, lean" in capsys.readouterr().out
    assert main([*arguments[:3], str(8 * rows), *arguments[4:], "--gpu", "H200"]) == 1
    assert "does NOT fit" in capsys.readouterr().out
    adapters = ["--lora", "r=16", "--quantize", "nf4", "--batch-size", "1"]
    assert main([*arguments, *adapters, "--gpu", "RTX4090"]) == 0


def test_the_command_takes_a_config_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for name in (tmp_path / "config.json", tmp_path):
        assert main(["plan", str(name), "--gpu", "1GiB", "--seq-len", "64", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["num_parameters"] == shared_on_meta(TINY).num_parameters()


def test_the_command_takes_the_settings_of_a_run(tmp_path, capsys):
    """Also train's defaults, where its own differ: the level of activation memory."""
    file = tmp_path / "run.json"

    def planned(*words, **settings):
        file.write_text(json.dumps({"data": ["a.jsonl"], "output": "o", "epochs": 1, **settings}))
        arguments = ["--config", str(file)] if settings else []
        assert main(["plan", *words, *arguments, "--gpu", "80GiB", "--json"]) in (0, 1)
        return json.loads(capsys.readouterr().out)

    run = {"model": "llama-3.2-1b", "batch_size": 4, "seq_len": 512, "lora": {"r": 4}, "optimizer": {"lr": 1}}
    flags = ["--batch-size", "4", "--seq-len", "512", "--lora", "r=4", "--activation-memory", "lean"]
    report = planned("llama-3.2-1b", *flags)
    assert planned(**run) == report
    assert planned("--batch-size", "2", **run)["peak"] < report["peak"]
    for settings, message in (
        ({"objective": "distill"}, "objective distill"),
        ({"expert_parallel": 2}, "expert_parallel is 2"),
        ({"shard": "hybrid"}, "--shard hybrid"),
    ):
        file.write_text(json.dumps({"model": "llama-demo", **settings}))
        assert main(["plan", "--config", str(file), "--gpu", "H100"]) == 2
        assert message in capsys.readouterr().err


def test_adapters_are_planned_with_the_whole_model_on_each_gpu(capsys):
    """As `train` does, which divides only models that it trains in full."""

    def weights(*options):
        main(["plan", "llama-demo", "--gpu", "80GiB", "--gpus", "4", *options, "--json"])
        return json.loads(capsys.readouterr().out)["parts"]["weights"]

    divided, whole = weights(), weights("--shard", "none")
    assert divided < whole / 3
    assert weights("--lora") > whole


def test_the_command_counts_the_state_of_the_optimizer(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    found = {}
    for name in ("adamw", "adamw_8bit", "sgd", "adafactor"):
        main(["plan", str(tmp_path), "--gpu", "1GiB", "--dtype", "bfloat16", "--optimizer", name, "--json"])
        found[name] = json.loads(capsys.readouterr().out)["parts"]["optimizer"]
    elements = shared_on_meta(TINY).num_parameters()
    assert found["adamw"] == found["sgd"] == 6 * elements
    assert 4 * elements < found["adamw_8bit"] < 6 * elements
    assert 2 * elements < found["adafactor"] < 3 * elements


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "Voodoo2"], "pass its memory"),
        (["--gpu", "3091"], "unknown GPU '3091'"),
        (["--gpu", "H200", "--lora", "16"], "is not a setting"),
        (["--gpu", "H200", "--quantize", "nf4"], "--quantize needs --lora"),
        (["--gpu", "H200", "--host-memory", "much"], "expected a size such as 256GiB"),
        (["--gpu", "H200", "--optimizer", "sgd", "--moments", "float32"], "neither --moments nor"),
        (["--gpu", "H200", "--optimizer", "muon", "--lora", "r=8"], "muon trains no adapters"),
    ],
)
def test_the_command_refuses_unsupported_plans(options, message, capsys):
    assert main(["plan", "llama-demo", *options]) == 2
    assert message in capsys.readouterr().err


def test_without_a_name_it_plans_for_the_gpu_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU was found on this machine"):
        find_gpu(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 22 * 2**30))
    assert find_gpu(None) == ("NVIDIA L4", 22 * 2**30)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("3090", 23.5),
        ("RTX3090", 23.5),
        ("NVIDIA GeForce RTX 4090", 23.5),
        ("A100-80", 79.1),
        ("a100 40gb", 39.4),
        ("L40S", 44.4),
        ("MI300X", 191.0),
        ("48GiB", 48.0),
    ],
)
def test_a_gpu_is_found_by_its_common_names(name, gib):
    assert find_gpu(name)[1] == int(gib * 2**30)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.95),
        ({"gpus": 2}, 0.9),
        ({"gpus": 2, "shard": "none"}, 0.95),
        ({"gpus": 2, "lora": "r=8"}, 0.95),
    ],
)
def test_a_plan_of_a_sharded_model_leaves_room_for_collectives(settings, share):
    asked = {"gpu": "80GiB", "gpus": 1, "shard": None, "lora": None, "activation_memory": "auto"}
    asked |= {"memory_budget": None, "host_memory": None, **settings}
    assert limits_of(argparse.Namespace(**asked))[2] == int(share * 80 * GIB)
