"""The memory of a training step is planned as it was measured; the levels chosen repeat the least work."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from allocations import peak_of_a_step

import liger_models
from liger_models.cli import main
from liger_models.cli.shared.gpus import find_gpu
from liger_models.convert.errors import ConfigError
from liger_models.kernels.losses._linear_chunks import working_bytes
from liger_models.layers.memory import (
    LADDERS,
    FittingLevels,
    Step,
    StepMemory,
    largest,
    layer_costs,
    parse_budget,
)
from liger_models.layers.recompute.activation_memory import LEVELS

GIB = 2**30

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN3_30B_6 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}

QWEN3_30B = QWEN3_30B_6 | {"num_hidden_layers": 12}
GEMMA_2B = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
ONE_LAYER = LLAMA_8B | {"num_hidden_layers": 1}

# Results of `python -m benchmarks train` and `parallel` on H200s: config, batch, tokens per row, other
# settings of the step, levels, peak GiB. AdamW is torch's, with both moments in bfloat16, except for
# compensated weights.
MEASURED = [
    (LLAMA_8B, 8, 4096, {}, ["checkpoint"] * 32, 63.5),
    (LLAMA_8B, 8, 4096, {}, ["lean"] * 28 + ["checkpoint"] * 4, 133.3),
    (LLAMA_8B, 4, 4096, {}, ["lean"] * 32, 94.3),
    (LLAMA_8B, 4, 4096, {"optimizer_bytes": 6}, ["lean"] * 32, 109.3),
    (LLAMA_8B, 2, 4096, {}, ["lean"] * 32, 71.2),
    (LLAMA_8B, 1, 3973, {"labels": 0.25}, ["lean"] * 32, 59.9),
    (LLAMA_1B, 1, 10949, {"labels": 0.25}, ["lean"] * 16, 16.6),
    (LLAMA_1B, 8, 2048, {}, ["lean"] * 16, 22.0),
    (LLAMA_1B, 8, 2048, {}, ["all"] * 16, 28.0),
    (ONE_LAYER, 1, 65536, {}, ["lean"], 18.0),
    (QWEN3_30B_6, 4, 4096, {}, ["lean"] * 6, 33.9),
    # Two GPUs, which shard the parameters, and in some cases a sequence too.
    (LLAMA_8B, 2, 8192, {"gpus": 2}, ["lean"] * 32, 74.3),
    (LLAMA_8B, 4, 8192, {"gpus": 2}, ["lean"] * 28 + ["checkpoint"] * 4, 112.6),
    (LLAMA_8B, 4, 8192, {"gpus": 2}, ["lean"] * 26 + ["all"] * 6, 129.0),
    (QWEN3_30B, 4, 4096, {"gpus": 2}, ["lean"] * 12, 39.5),
    (QWEN3_30B, 4, 4096, {"gpus": 2}, ["all"] * 12, 40.8),
    (ONE_LAYER, 1, 65536, {"gpus": 2, "sequence_ranks": 2}, ["lean"], 12.9),
    (LLAMA_8B | {"num_hidden_layers": 4}, 8, 8192, {"optimizer_bytes": 6}, ["tiled"] * 4, 23.0),
    # A first step, at whose end the optimizer state is created; and one with the state on the host.
    (ONE_LAYER, 1, 524288, {"gpus": 2, "sequence_ranks": 2, "optimizer_bytes": 0}, ["offload"], 25.7),
    (ONE_LAYER, 1, 524288, {"optimizer_bytes": 6, "optimizer_on_host": True}, ["offload"], 36.14),
]


def on_meta(config):
    return liger_models.from_config(config, device="meta", dtype="bfloat16")


@pytest.mark.parametrize(("config", "batch", "seq", "others", "levels", "peak"), MEASURED)
def test_the_planned_peak_is_within_two_percent_of_the_measured_one(config, batch, seq, others, levels, peak):
    plan = StepMemory(on_meta(config), Step(batch, seq, **{"optimizer_bytes": 4, **others})).plan(levels)
    assert plan.peak / GIB == pytest.approx(peak, rel=0.02)
    assert sum(plan.parts.values()) == plan.peak


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize(("level", "peak"), [("lean", 39.2), ("all", 40.7)])
def test_the_planned_peak_is_right_with_experts_sharded_over_two_gpus(level, peak):
    """On parameters that say themselves how they are divided, of the first of two processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = liger_models.parallelize(on_meta(QWEN3_30B), liger_models.ParallelDims(experts=2))
        plan = StepMemory(model, Step(4, 4096, optimizer_bytes=4)).plan([level] * 12)
    finally:
        torch.distributed.destroy_process_group()
    assert plan.peak / GIB == pytest.approx(peak, rel=0.02)


def test_layers_that_stay_gathered_after_the_forward_pass_are_counted():
    """The same step without that: 74.3 GiB."""
    model = on_meta(LLAMA_8B)
    model.gathered_once = True  # set by parallelize(reshard_after_forward=False)
    plan = StepMemory(model, Step(2, 8192, optimizer_bytes=4, gpus=2)).plan(["lean"] * 32)
    assert plan.peak / GIB == pytest.approx(87.9, rel=0.02)


# Configs, rows, tokens in each, and other settings of the step.
ALLOCATED = {
    "a dense model": (LLAMA_8B | {"num_hidden_layers": 3}, 8, 4096, {}),
    "one layer, long": (ONE_LAYER, 1, 1 << 16, {}),
    "heads by groups": (LLAMA_8B | {"num_hidden_layers": 2}, 1, 1 << 18, {}),
    "a tied head, a quarter of the labels": (LLAMA_1B | {"num_hidden_layers": 2}, 1, 40000, {"labels": 0.25}),
    "experts": (QWEN3_30B_6 | {"num_hidden_layers": 2}, 4, 4096, {}),
    "norms behind branches, windows": (GEMMA_2B, 4, 8192, {}),
    "a sequence over two": (ONE_LAYER, 1, 1 << 16, {"sequence_ranks": 2}),
    "a long one": (LLAMA_8B | {"num_hidden_layers": 2}, 1, 1 << 18, {"sequence_ranks": 2}),
}


@pytest.mark.parametrize("name", ALLOCATED)
def test_a_plan_equals_the_allocations_of_a_step(name):
    """At all levels, to 0.2%: what is left out are vectors of a number a token, and norms' weights."""
    config, batch, seq, others = ALLOCATED[name]
    model = on_meta(config | {"max_position_embeddings": seq})
    memory = StepMemory(model, Step(batch, seq, optimizer_bytes=0, **others))
    for level in LEVELS:
        model.set_activation_memory(level)
        for p in model.parameters():
            p.grad = None
        found = peak_of_a_step(model, batch, seq, others.get("sequence_ranks", 1), others.get("labels", 1.0))
        plan = memory.plan([level] * len(model.layers))
        assert plan.peak - plan.parts["weights"] == pytest.approx(found, rel=2e-3), (level, plan.moment)


@pytest.mark.parametrize(
    ("frozen", "level"),
    [(["embed_tokens", "layers.0-2"], "lean"), (["embed_tokens", "layers.0-2", "lm_head"], "all")],
)
def test_layers_that_no_gradient_reaches_keep_nothing(frozen, level):
    model = on_meta(LLAMA_8B | {"num_hidden_layers": 5})
    model.set_activation_memory(level)
    memory = {name: StepMemory(model, Step(1, 8192, optimizer_bytes=0)) for name in ("whole", "frozen")}
    whole = memory["whole"].plan([level] * 5)
    model.freeze(*frozen)
    plan = memory["frozen"].plan([level] * 5)
    found = peak_of_a_step(model, 1, 8192)
    # Never too low; the first trained layer is counted with a gradient of its input, 128 MiB here
    above = plan.peak - plan.parts["weights"] - found
    assert -2e-3 * found <= above <= 4 * 8192 * 4096 * 2
    assert plan.parts["activations"] < 0.6 * whole.parts["activations"]
    assert plan.repeated <= whole.repeated


def test_computing_heads_in_groups_takes_less_memory():
    memory = StepMemory(on_meta(LLAMA_8B | {"num_hidden_layers": 2}), Step(1, 1 << 19))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_costs, "LONG", 1 << 30)
        at_once = StepMemory(memory.model, memory.step).plan(["offload"] * 2).peak
    assert memory.plan(["offload"] * 2).peak < at_once


@pytest.mark.parametrize(
    ("seq", "level", "optimizer_bytes", "where", "host"),
    [(1 << 18, "tiled", 4, "device", 0), (1_250_000, "offload", 6, "host", 400)],
)
def test_a_whole_8b_has_room_for_long_contexts_on_one_h200(seq, level, optimizer_bytes, where, host):
    """256k tokens with all on the GPU, of whose 139.8 GiB 95% are planned with; and 1.25 million with layers'
    inputs and the optimizer's state in 400 GiB of the host.
    """
    on_host = where == "host"
    step = Step(1, seq, optimizer_bytes, optimizer_on_host=on_host, optimizer_work=on_host * GIB)
    plan = StepMemory(on_meta(LLAMA_8B), step).plan([level] * 32)
    assert plan.peak < 0.95 * 139.8 * GIB
    assert plan.host <= host * GIB


TINY = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def test_no_other_fitting_levels_recompute_less():
    memory = StepMemory(on_meta(LLAMA_1B | {"num_hidden_layers": 4}), Step(16, 2048))
    plans = [memory.plan(levels) for levels in itertools.product(LADDERS[0], repeat=4)]
    smallest = min(plan.peak for plan in plans)
    of_a_layer = memory.plan(["checkpoint"] * 4).repeated / 4
    for budget in sorted({plan.peak for plan in plans if plan.peak >= memory.choose_levels(0).peak}):
        chosen = memory.choose_levels(budget)
        best = min(plan.repeated for plan in plans if plan.peak <= budget)
        assert chosen.fits
        # Choosing layer by layer is not always optimal, but never worse by more than a layer.
        assert best <= chosen.repeated <= best + of_a_layer
    smallest = memory.plan(["offload"] * 4).peak
    assert memory.choose_levels(smallest).fits
    nothing_fits = memory.choose_levels(smallest // 2)
    assert not nothing_fits.fits
    assert nothing_fits.peak <= 1.05 * smallest


def test_long_sequences_go_in_tiles_and_then_to_the_host():
    memory = StepMemory(on_meta(LLAMA_1B | {"num_hidden_layers": 4}), Step(1, 1 << 17))
    peaks = [memory.plan([level] * 4).peak for level in LEVELS]
    assert peaks == sorted(peaks, reverse=True)
    for i, level in enumerate(LEVELS[3:], 3):
        assert peaks[i] < peaks[i - 1]
        chosen = memory.choose_levels(peaks[i])
        assert chosen.fits
        assert level in chosen.levels
        offloaded = chosen.levels.count("offload")
        assert chosen.host == offloaded * (1 << 17) * 2048 * 2
        assert bool(offloaded) == (level == "offload") == ("GiB of the host" in str(chosen))
    # A short sequence is a single tile, which costs no less than all tokens at once.
    short = StepMemory(on_meta(LLAMA_1B), Step(1, 4096))
    assert short.plan(["tiled"] * 16).peak == short.plan(["checkpoint"] * 16).peak


def test_the_state_of_adapters_is_that_of_their_dtype():
    model = liger_models.from_config(TINY, dtype="bfloat16", activation_memory="auto", memory_budget="1GiB")
    model.requires_grad_(False)
    adapter = model.layers[0].self_attn.adapter = torch.nn.Linear(64, 64, dtype=torch.float32)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, labels=ids)
    assert model.fit_levels.plan.parts["optimizer"] == 8 * sum(p.numel() for p in adapter.parameters())


def test_the_first_layers_give_up_what_they_keep_first():
    memory = StepMemory(on_meta(LLAMA_1B), Step(8, 2048))
    everything, least = memory.plan(["all"] * 16).peak, memory.plan(["checkpoint"] * 16).peak
    for share in (0.2, 0.4, 0.6, 0.8):
        levels = memory.choose_levels(int(least + share * (everything - least))).levels
        places = [LEVELS.index(level) for level in levels]
        assert places == sorted(places, reverse=True)


def test_other_memory_of_a_step_counts():
    model = on_meta(LLAMA_1B)
    peak = {
        name: StepMemory(model, step).plan(["lean"] * 16).peak
        for name, step in {
            "plain": Step(1, 4096, optimizer_bytes=4),
            "master": Step(1, 4096, optimizer_bytes=6),
            "accumulating": Step(1, 4096, optimizer_bytes=4, accumulates=True),
            "adapters": Step(1, 4096, optimizer_bytes=8, lora_rank=16),
            "quantised": Step(1, 4096, optimizer_bytes=8, lora_rank=16, weight_bytes=0.5),
            "divided": Step(1, 4096, optimizer_bytes=4, gpus=8),
        }.items()
    }
    elements = model.num_parameters()
    assert peak["master"] - peak["plain"] == pytest.approx(2 * elements)
    assert 0 < peak["accumulating"] - peak["plain"] <= 2 * elements
    assert peak["quantised"] < peak["adapters"] < peak["plain"]
    assert peak["divided"] < peak["plain"]


@pytest.mark.parametrize("trained", [True, False])
def test_the_memory_of_a_loss_follows_from_its_chunks(trained):
    few = working_bytes(1024, 4096, 128256, 2, trained)
    dw = 128256 * 4096
    chunk = 1024 * (4096 * 2 + 128256) * 2  # including its tokens and their gradients
    assert few == 1024 * 4096 * 2 + chunk + (2 * dw if trained else 0)
    many = working_bytes(1 << 17, 4096, 128256, 2, trained) - (1 << 17) * 4096 * 2
    assert (4 * dw if trained else 0) < many <= (6 * dw if trained else 0) + (2 << 30)


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
        weight = SimpleNamespace(is_cuda=True)
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
    with pytest.raises(ValueError, match="give memory_budget in bytes"):
        run_step(model, 32)


def test_a_budget_is_bytes_or_a_fraction():
    assert parse_budget(None) == (0.95, None)
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


def test_a_step_of_another_size_is_planned_separately():
    model = on_meta(LLAMA_1B)
    counted = StepMemory(model, Step(1, 1, optimizer_on_host=True))
    counted.choose_levels(10 * GIB)
    for batch, seq, budget in ((2, 4096, 12 * GIB), (1, 1 << 18, 30 * GIB)):
        fresh = StepMemory(model, Step(batch, seq, optimizer_on_host=True))
        assert counted.resized(batch, seq).choose_levels(budget) == fresh.choose_levels(budget)


def test_rows_split_over_gpus_need_their_part_and_the_buffers_of_attention(capsys):
    model, tokens = on_meta(LLAMA_8B | {"num_hidden_layers": 1}), 8192
    (alone,) = StepMemory(model, Step(1, tokens)).layers
    for ranks, copies in ((2, 0), (16, 1)):  # for 8 key heads
        (part,) = StepMemory(model, Step(1, ranks * tokens, sequence_ranks=ranks)).layers
        more = {level: part.kept[level] - alone.kept[level] for level in LEVELS}
        # The exchanged output of 32 heads, and copies of keys and values.
        exchanged = 2 * tokens * 128 * (32 + 2 * 8 * copies)
        assert more == {level: exchanged if level in ("all", "lean", "mlp") else 0 for level in LEVELS}
    command = ["plan", "llama-3.1-8b", "--gpu", "H200", "--gpus", "8", "--sequence-parallel", "3"]
    assert main(command) == 2
    assert "--sequence-parallel 3 does not divide --gpus 8" in capsys.readouterr().err


def test_offloaded_state_is_counted_on_the_host_and_must_fit_there(capsys):
    model = on_meta(LLAMA_1B)
    there, here = (StepMemory(model, Step(1, 1 << 17, optimizer_on_host=host)) for host in (True, False))
    plans = there.plan(["offload"] * 16), here.plan(["offload"] * 16)
    assert plans[1].peak - plans[0].peak == plans[1].parts["optimizer"] == 6 * model.num_parameters()
    pinned = plans[0].host - plans[1].host
    assert 6 * model.num_parameters() <= pinned <= 12 * model.num_parameters()  # sizes are powers of two
    assert plans[1].host == 16 * (1 << 17) * 2048 * 2

    divided = StepMemory(model, replace(there.step, gpus=4)).plan(["offload"] * 16)
    assert divided.parts["optimizer"] == 0
    assert divided.host - plans[1].host == pytest.approx(pinned / 4, rel=0.01)

    arguments = ["plan", "llama-3.2-1b", "--gpu", "24GiB", "--optimizer-memory", "host", "--seq-len", "max"]
    reports = {}
    for host in ("1TiB", "24GiB", "1GiB"):
        main([*arguments, "--host-memory", host, "--json"])
        reports[host] = json.loads(capsys.readouterr().out)
    assert reports["1TiB"]["seq_len"] > reports["24GiB"]["seq_len"]
    assert reports["24GiB"]["fits"]
    assert reports["24GiB"]["host"] <= 24 * GIB
    assert not reports["1GiB"]["fits"]
    main([*arguments[:-1], "65536", "--gpus", "2"])
    assert "pinned on the host" in capsys.readouterr().out


def test_the_command_takes_a_config_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for name in (tmp_path / "config.json", tmp_path):
        assert main(["plan", str(name), "--gpu", "1GiB", "--seq-len", "64", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["num_parameters"] == on_meta(TINY).num_parameters()


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
    """As `train` does, which divides only what it trains in full."""

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
    elements = on_meta(TINY).num_parameters()
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


@pytest.mark.gpu
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    "config", [LLAMA_1B, QWEN3_30B_6 | {"num_hidden_layers": 2}], ids=["llama", "qwen3_moe"]
)
def test_a_measured_step_needs_the_planned_memory(config, levels):
    model = liger_models.from_config(config, dtype="bfloat16", device="cuda", activation_memory=levels)
    optimizer = liger_models.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, 128256, (4, 2048), device="cuda")
    plan = StepMemory(model, Step(4, 2048)).plan([levels] * len(model.layers))
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(plan.peak, rel=0.05)


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
