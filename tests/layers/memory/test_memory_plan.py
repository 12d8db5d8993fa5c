"""The memory of a training step is planned as it was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from allocations import peak_of_a_step
from planned_models import GIB, LLAMA_1B, LLAMA_8B, QWEN3_30B_6, on_meta, shared_on_meta

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import main
from liger_models.kernels.losses._linear_chunks import working_bytes
from liger_models.layers.attention import backends
from liger_models.layers.memory import (
    Step,
    StepMemory,
)
from liger_models.layers.recompute.activation_memory import LEVELS

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


@pytest.mark.parametrize(("config", "batch", "seq", "others", "levels", "peak"), MEASURED)
def test_the_planned_peak_is_within_two_percent_of_the_measured_one(config, batch, seq, others, levels, peak):
    plan = StepMemory(shared_on_meta(config), Step(batch, seq, **{"optimizer_bytes": 4, **others})).plan(
        levels
    )
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
    "norms after branches, windows": (GEMMA_2B, 4, 8192, {}),
    "a sequence over two": (ONE_LAYER, 1, 1 << 16, {"sequence_ranks": 2}),
    "a long one": (LLAMA_8B | {"num_hidden_layers": 2}, 1, 1 << 18, {"sequence_ranks": 2}),
}


@pytest.mark.parametrize("name", ALLOCATED)
def test_a_plan_equals_the_allocations_of_a_step(name):
    """At all levels, to 0.2%: plans leave out vectors of one number per token, and norms' weights."""
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


BITNET = LLAMA_8B | {
    **{"model_type": "bitnet", "hidden_act": "relu2", "vocab_size": 2048, "num_hidden_layers": 2},
    **{"hidden_size": 2560, "intermediate_size": 6912, "num_attention_heads": 20, "num_key_value_heads": 5},
    "max_position_embeddings": 1 << 15,
}
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


@pytest.mark.parametrize(
    ("shape", "levels"), [((4, 4096), ("all", "lean", "mlp", "checkpoint")), ((1, 1 << 15), ("tiled",))]
)
@pytest.mark.parametrize("settings", [None, ONLINE])
def test_a_plan_counts_norms_before_output_projections_and_rounded_operands(settings, shape, levels):
    model = on_meta(BITNET if settings is None else BITNET | {"quantization_config": settings})
    memory = StepMemory(model, Step(*shape, optimizer_bytes=0))
    for level in levels:
        model.set_activation_memory(level)
        for p in model.parameters():
            p.grad = None
        found = peak_of_a_step(model, *shape)
        plan = memory.plan([level] * 2)
        assert plan.peak - plan.parts["weights"] == pytest.approx(found, rel=2e-3), (level, plan.moment)


GEMMA_3N = {
    **{"model_type": "gemma3n_text", "vocab_size": 2048, "vocab_size_per_layer_input": 2048},
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_kv_shared_layers": 0},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "laurel_rank": 64},
    **{"hidden_size_per_layer_input": 256, "activation_sparsity_pattern": [0.95, 0.0]},
    **{"layer_types": ["full_attention"] * 2, "max_position_embeddings": 8192},
}


def test_a_plan_counts_streams_that_projections_make_and_end():
    """To 1%: it leaves out gradients of these projections, and the input of the norm of per-layer inputs."""
    model = on_meta(GEMMA_3N)
    memory = StepMemory(model, Step(4, 4096, optimizer_bytes=0))
    for level in ("all", "lean", "checkpoint"):
        model.set_activation_memory(level)
        for p in model.parameters():
            p.grad = None
        found = peak_of_a_step(model, 4, 4096)
        plan = memory.plan([level] * len(model.layers))
        assert plan.peak - plan.parts["weights"] == pytest.approx(found, rel=1e-2), (level, plan.moment)


@pytest.mark.parametrize("modules", [1, 2])
def test_a_plan_counts_the_modules_for_multi_token_prediction(modules):
    """At all levels, to 2%, or one tensor [T, H]: which ones still exist when a module runs again differs."""
    config = QWEN3_30B_6 | {"model_type": "glm4_moe", "num_hidden_layers": 2, "n_routed_experts": 32}
    config |= {"n_shared_experts": 1, "num_nextn_predict_layers": modules, "hidden_size": 4096}
    del config["num_experts"]
    model = liger_models.from_config(config, device="meta", dtype="bfloat16", mtp=True)
    memory = StepMemory(model, Step(4, 4096, optimizer_bytes=0))
    for level in LEVELS:
        model.set_activation_memory(level)
        for p in model.parameters():
            p.grad = None
        plan = memory.plan([level] * 2)
        found = peak_of_a_step(model, 4, 4096)
        assert plan.peak - plan.parts["weights"] == pytest.approx(found, rel=2e-2), (level, plan.moment)


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
    memory = StepMemory(shared_on_meta(LLAMA_8B | {"num_hidden_layers": 2}), Step(1, 1 << 19))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "LONG", 1 << 30)
        at_once = StepMemory(memory.model, memory.step).plan(["offload"] * 2).peak
    assert memory.plan(["offload"] * 2).peak < at_once


@pytest.mark.parametrize(
    ("seq", "level", "optimizer_bytes", "where", "host"),
    [(1 << 18, "tiled", 4, "device", 0), (1_250_000, "offload", 6, "host", 400)],
)
def test_a_whole_8b_supports_long_contexts_on_one_h200(seq, level, optimizer_bytes, where, host):
    """256k tokens with all on the GPU, of whose 139.8 GiB 95% are planned with; and 1.25 million with layers'
    inputs and the optimizer's state in 400 GiB of the host.
    """
    on_host = where == "host"
    step = Step(1, seq, optimizer_bytes, optimizer_on_host=on_host, optimizer_work=on_host * GIB)
    plan = StepMemory(shared_on_meta(LLAMA_8B), step).plan([level] * 32)
    assert plan.peak < 0.95 * 139.8 * GIB
    assert plan.host <= host * GIB


def test_other_memory_of_a_step_counts():
    model = shared_on_meta(LLAMA_1B)
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


def test_a_step_of_another_size_is_planned_separately():
    model = shared_on_meta(LLAMA_1B)
    counted = StepMemory(model, Step(1, 1, optimizer_on_host=True))
    counted.choose_levels(10 * GIB)
    for batch, seq, budget in ((2, 4096, 12 * GIB), (1, 1 << 18, 30 * GIB)):
        fresh = StepMemory(model, Step(batch, seq, optimizer_on_host=True))
        assert counted.resized(batch, seq).choose_levels(budget) == fresh.choose_levels(budget)


def test_rows_split_over_gpus_need_their_part_and_the_buffers_of_attention(capsys):
    model, tokens = shared_on_meta(LLAMA_8B | {"num_hidden_layers": 1}), 8192
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
    assert main([*command[:-2], "--pass-states"]) == 2
    assert "--pass-states needs --sequence-parallel" in capsys.readouterr().err


DELTA = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 2,
    "vocab_size": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "layer_types": ["linear_attention"] * 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 1 << 16,
}
MAMBA = {
    "model_type": "granitemoehybrid",
    "hidden_size": 2048,
    "shared_intermediate_size": 8192,
    "num_local_experts": 0,
    "num_hidden_layers": 2,
    "vocab_size": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "layer_types": ["mamba"] * 2,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "max_position_embeddings": 1 << 16,
}


ALONE = {
    "model_type": "nemotron_h",
    "intermediate_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "hybrid_override_pattern": "MM",
    "hidden_size": 2048,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
}


# The residual stream is in float32, but not the embeddings.
WIDE = dict(find_architecture("falcon_mamba").tiny) | {
    "hidden_size": 2048,
    "state_size": 16,
    "vocab_size": 1024,
}
WIDE |= {"time_step_rank": 128, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "ranks", "passes"),
    [
        (DELTA, 1, False),
        (DELTA, 4, False),
        (DELTA, 4, True),
        (ALONE, 4, False),
        (MAMBA, 4, True),
        (WIDE, 1, False),
    ],
    ids=[
        "delta rule",
        "heads exchanged",
        "states passed",
        "groups exchanged",
        "their states passed",
        "float32",
    ],
)
def test_a_plan_counts_what_recurrent_layers_keep(config, ranks, passes):
    """On a rank with another before and after it. To 0.5%: the states that pass are not counted. To 1.5%
    where a forward pass takes the most: the plan adds gradients that do not exist yet; or where parts of the
    scan's states are in float32.
    """
    model = on_meta(config)
    for module in model.modules():
        if hasattr(module, "pass_states"):
            module.pass_states = passes or (config is MAMBA and ranks > 1)  # one group of heads
    tokens = ranks << 14
    step = Step(1, tokens, optimizer_bytes=0, sequence_ranks=ranks, pass_states=passes)
    for level in ("lean", "checkpoint"):
        model.set_activation_memory(level)
        for p in model.parameters():
            p.grad = None
        plan = StepMemory(model, step).plan([level] * 2)
        found = peak_of_a_step(model, 1, tokens, ranks, rank=ranks // 2)
        rel = 1.5e-2 if config in (ALONE, WIDE) else 5e-3
        assert plan.peak - plan.parts["weights"] == pytest.approx(found, rel=rel), (level, plan.moment)


NARROW = {"num_hidden_layers": 1, "vocab_size": 1024}
SCANS = {
    "delta rule": DELTA | NARROW | {"layer_types": ["linear_attention"], "intermediate_size": 64},
    "state space": MAMBA | NARROW | {"layer_types": ["mamba"], "shared_intermediate_size": 64},
    "decay by channel": dict(find_architecture("kimi_linear").tiny)
    | NARROW
    | {
        "hidden_size": 2048,
        "intermediate_size": 64,
        "layer_types": ["linear_attention"],
        "mlp_layer_types": ["dense"],
        "linear_num_heads": 16,
        "linear_head_dim": 128,
    },
    "no MLP": ALONE | {"num_hidden_layers": 1, "hybrid_override_pattern": "M"},
}


@pytest.mark.parametrize("name", SCANS)
def test_a_plan_counts_what_the_backward_pass_of_a_scan_takes(name):
    """Of a single long document, to 1%, where the scan's backward pass takes the most."""
    model = on_meta(SCANS[name])
    for level in ("all", "lean", "checkpoint"):
        model.set_activation_memory(level)
        for p in model.parameters():
            p.grad = None
        plan = StepMemory(model, Step(1, 1 << 15, optimizer_bytes=0)).plan([level])
        found = peak_of_a_step(model, 1, 1 << 15)
        assert plan.peak - plan.parts["weights"] == pytest.approx(found, rel=1e-2), (level, plan.moment)


def test_offloaded_state_is_counted_on_the_host_and_must_fit_there(capsys):
    model = shared_on_meta(LLAMA_1B)
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


def test_one_projection_at_a_time_is_dequantised():
    """Gate and up are separate layers, once they are quantised."""
    model = shared_on_meta(LLAMA_8B | {"num_hidden_layers": 1})
    dense, quantised = (Step(1, 4096, lora_rank=16, weight_bytes=size) for size in (None, 0.5))
    temporary = [StepMemory(model, step).plan(["offload"]).parts["temporary"] for step in (quantised, dense)]
    assert temporary[0] - temporary[1] == 2 * 14336 * 4096
