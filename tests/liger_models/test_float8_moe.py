"""Experts of a model in float8, with emulated products."""

import pytest
import torch
from live_bytes import as_on_a_gpu

import liger_models
from liger_models import set_float8
from liger_models.layers.experts import moe
from liger_models.layers.memory import Step, StepMemory
from liger_models.layers.projections.float8 import Float8Settings

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
IDS = torch.arange(60).view(2, 30)
EXPERTS = "layers.0.mlp.experts"


def make_model(**options):
    torch.manual_seed(0)
    return liger_models.from_config(CONFIG, dtype="bfloat16", device="cpu", **options)


def only_experts(model, settings):
    """Leave the linear layers in bfloat16, so that a difference is the experts'."""
    for layer in model.layers:
        layer.mlp.experts.float8 = settings
    return model


def gradients(model) -> torch.Tensor:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def test_every_level_gives_the_same_bits_and_they_are_near_those_of_bfloat16():
    exact = gradients(make_model())
    model = only_experts(make_model(), Float8Settings("rowwise", emulate=True))
    found = gradients(model)
    # e4m3 rounds by 2.7%, both operands of four products; the experts are a part of the model.
    assert 2**-9 < float((found - exact).norm() / exact.norm()) < 0.0265 * 8**0.5
    for level in ("all", "mlp", "checkpoint"):
        model.set_activation_memory(level)
        assert torch.equal(gradients(model), found), level


def test_recipes_choose_experts_by_their_scales_and_widths():
    model = make_model()
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        assert set_float8(model, recipe, emulate=True)[EXPERTS] == "float8"
        assert model.get_submodule(EXPERTS).float8.recipe == recipe
        assert model.layers[0].post_attention_layernorm.float8_copy
    assert "scale" in set_float8(model, "tensorwise", emulate=True)[EXPERTS]
    assert model.get_submodule(EXPERTS).float8 is None
    narrow = liger_models.from_config(
        {**CONFIG, "moe_intermediate_size": 40}, dtype="bfloat16", device="meta"
    )
    assert "multiple of 16" in set_float8(narrow, "rowwise")[EXPERTS]


def test_few_rows_are_computed_in_bfloat16(monkeypatch):
    model = only_experts(make_model(), Float8Settings("rowwise"))
    assert torch.equal(gradients(model), gradients(make_model()))
    monkeypatch.setattr(moe, "FLOAT8_ROWS", 30)
    with pytest.raises(RuntimeError, match="float8"):  # 60 tokens have 30 rows for each expert
        gradients(model)


def test_experts_with_adapters_are_computed_in_bfloat16():
    peft = pytest.importorskip("peft")
    losses = []
    for settings in (None, Float8Settings("rowwise", emulate=True)):
        model = only_experts(make_model(projections="split"), settings)
        parameters = [
            f"layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")
        ]
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_parameters=parameters, init_lora_weights=False)
        losses.append(peft.get_peft_model(model, config)(IDS, labels=IDS).loss)
    assert torch.equal(*losses)


def test_the_plan_counts_the_copies_of_the_matrices():
    def peak(model):
        return StepMemory(model, Step(2, 30, 4)).plan(["checkpoint"] * 2).peak

    with as_on_a_gpu():
        plain, model = make_model(), make_model()
        only_experts(model, Float8Settings("rowwise", emulate=True))
        copies = model.get_submodule(EXPERTS).float8_copies
        assert copies == {"gate_up_proj": 4 * 96 * 32, "down_proj": 4 * 48 * 32}
        assert 0 <= peak(model) - peak(plain) <= copies["gate_up_proj"] + 60 * 2 * 96
