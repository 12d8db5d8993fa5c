"""Plans count the memory of PEFT's own forward of a layer, and with adapters they match measurements."""

from __future__ import annotations

import functools

import pytest
import torch
from allocations import peak_of_a_step
from live_bytes import LiveBytes, surroundings
from planned_models import LLAMA_8B
from test_live_bytes import LORA, RANK, adapted

import liger_models
from liger_models.layers.memory import Step, StepMemory
from liger_models.layers.memory.adapters import Work, _Linear
from liger_models.layers.recompute.activation_memory import carry_recipe, keep_recipes
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters

peft = pytest.importorskip("peft")

IA3 = {
    "kind": "IA3Config",
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
KINDS = {
    "lora": {"lora_bias": True},
    "lora, dropout": {"lora_bias": True, "lora_dropout": 0.1},
    "dora": {"use_dora": True},
    "dora, dropout": {"use_dora": True, "lora_dropout": 0.1},
    "ia3 on inputs": IA3,
    "ia3 on outputs": IA3,
}


class Seed(torch.autograd.Function):
    """A scalar, whose backward pass gives a gradient that was there before."""

    @staticmethod
    def forward(ctx, y, dy):
        ctx.dy = dy
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.dy.view_as(ctx.dy), None


def peak_of(layer, tokens: int) -> int:
    """Memory of one layer's backward pass beyond the gradient of its output; its input carries a recipe."""
    before = torch.zeros(1, tokens, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(1, tokens, layer.out_features, dtype=torch.bfloat16)
    with LiveBytes([*layer.parameters(), *layer.buffers(), before, dy], zero=True) as live:
        x = carry_recipe(torch.neg(before), torch.neg, before)
        with keep_recipes():
            loss = Seed.apply(layer(x), dy)
        del x
        live.peak = live.now
        loss.backward()
    return live.peak


LAYERS = [
    *((kind, name) for kind in KINDS if "ia3" not in kind for name in ("mlp.down_proj", "mlp.gate_proj")),
    ("ia3 on inputs", "mlp.down_proj"),
    ("ia3 on outputs", "self_attn.k_proj"),
]


@pytest.mark.parametrize(("kind", "name"), LAYERS)
def test_a_layer_run_by_peft_needs_the_counted_memory(kind, name):
    with surroundings():
        layer = adapted(**KINDS[kind])(1).decoder.layers[0].get_submodule(name)
        assert layer.adapter_costs() == {"peft": kind}
        biased = layer.bias is not None
        linear = _Linear(name, layer.in_features, layer.out_features, peft=kind, bias=biased)

        def counted(tokens: int) -> int:
            return Work.of_peft(linear, tokens, 2).total(2 * tokens * layer.in_features)

        few, many = 2048, 4096
        measured, planned = peak_of(layer, many) - peak_of(layer, few), counted(many) - counted(few)
    low_rank = (many - few) * 2 * RANK * 4  # t = x A^T and its gradient
    assert planned <= measured <= planned + low_rank


OF_8B = LLAMA_8B | {"num_hidden_layers": 2, "max_position_embeddings": 1 << 20}
OF_LORA = {"r": 32, "target_modules": LORA}
ADAPTERS = {
    "LoRA": peft.LoraConfig(**OF_LORA),
    "DoRA": peft.LoraConfig(**OF_LORA, use_dora=True),
    "LoRA with a bias": peft.LoraConfig(**OF_LORA, lora_bias=True),
    "IA3": peft.IA3Config(target_modules=IA3["target_modules"], feedforward_modules=["down_proj"]),
}
LONG = 131_072
STEPS = [  # each kind of adapter with some levels, each level with some kinds
    *(("LoRA", level, 65536) for level in ("all", "lean", "mlp", "checkpoint")),
    *(("DoRA", level, 65536) for level in ("lean", "checkpoint")),
    ("DoRA", "offload", LONG),
    ("LoRA", "tiled", 65536 + 256),  # in five tiles of equal length
    ("DoRA", "tiled", 65536),
    ("DoRA", "checkpoint", 8192),
    *(("LoRA with a bias", level, 65536) for level in ("all", "checkpoint")),
    *(("IA3", level, 65536) for level in ("lean", "checkpoint")),
]


@functools.cache
def adapted_8b(name):
    """With few layers: memory needed at work counts the more."""
    model = liger_models.from_config(OF_8B, device="meta", dtype=torch.bfloat16, projections="split")
    with torch.device("meta"):
        peft.get_peft_model(model, ADAPTERS[name]).train()
    return model


@pytest.mark.parametrize(("name", "level", "tokens"), STEPS)
def test_a_plan_with_adapters_is_what_a_step_of_real_widths_allocates(name, level, tokens):
    """On the meta device. (In short sequences, DoRA's norms of whole matrices count.)"""
    model = adapted_8b(name)
    model.zero_grad()
    model.set_activation_memory(level)
    weights = sum(p.nbytes for p in model.parameters())
    measured = peak_of_a_step(model, 1, tokens) + weights
    planned = StepMemory(model, Step(1, tokens, optimizer_bytes=0)).plan([level] * len(model.layers)).peak
    assert measured == pytest.approx(planned, rel=0.04 if name == "IA3" else 0.02)


QWEN3_4B = LLAMA_8B | {
    **{"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128},
    **{"vocab_size": 151936, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("level", ["tiled", "offload"])
@pytest.mark.parametrize(("config", "tokens"), [(QWEN3_4B, 271360), (LLAMA_8B, 195072)])
def test_long_rows_under_adapters_need_the_planned_memory(config, tokens, level):
    """To 1.5%: plans may count a tile's memory beside the gradient of its rows, which comes after it."""
    config = config | {"num_hidden_layers": 2, "max_position_embeddings": tokens}
    options = {"device": "meta", "dtype": torch.bfloat16}
    planned = StepMemory(liger_models.from_config(config, **options), Step(1, tokens, 0, lora_rank=32))
    model = liger_models.from_config(config, activation_memory=level, **options).train()
    model.split_projections()
    Adapters(model, LoraSettings(r=32), "none", seed=0)
    model.set_activation_memory(level)  # of the adapters' layers, too
    plan = planned.plan([level] * 2)
    assert -0.015 < peak_of_a_step(model, 1, tokens) / (plan.peak - plan.parts["weights"]) - 1 < 2e-3
