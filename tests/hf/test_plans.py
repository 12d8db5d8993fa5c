"""Plans of memory do not depend on the names that a family's modules have in transformers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

import liger_models
from liger_models.architectures import find_architecture
from liger_models.layers.memory import StepMemory, matrix_elements
from liger_models.layers.memory.adapters import AdapterCosts
from liger_models.layers.memory.layer_costs import LayerCosts
from liger_models.layers.memory.step import Step

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("family", ["llama", "phi", "llama4_text", "lfm2", "lfm2_moe"])
def test_a_layer_costs_the_same_under_the_names_of_transformers(family, rank, hf):
    config = copy.deepcopy(dict(find_architecture(family).tiny))
    native = liger_models.from_config(config)
    hf.register()
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    native.split_projections()
    model.split_projections()
    step = Step(batch=1, seq=64, lora_rank=rank)
    for own, other in zip(native.layers, model.model.layers, strict=True):
        assert matrix_elements(other) == matrix_elements(own)
        assert AdapterCosts.of(other, step, 64, 4) == AdapterCosts.of(own, step, 64, 4)
        assert LayerCosts.of(other, step, 4) == LayerCosts.of(own, step, 4)
        assert matrix_elements(own)[1] > 0


def test_planned_adapters_of_experts_are_those_of_a_run():
    pytest.importorskip("peft")
    from liger_models.training.adapters.lora_settings import LoraSettings
    from liger_models.training.lora import Adapters

    config = dict(find_architecture("qwen3_moe").tiny)
    bare, adapted = (liger_models.from_config(config, projections="split") for _ in range(2))
    Adapters(adapted, LoraSettings.parse("r=4,experts"), "", seed=0)
    step = Step(batch=1, seq=64, lora_rank=4, lora_experts=True)
    trained = sum(
        p.numel() for name, p in adapted.named_parameters() if ".experts." in name and p.requires_grad
    )
    without = StepMemory(bare, replace(step, lora_experts=False))
    assert StepMemory(bare, step)._adapter_elements - without._adapter_elements == trained
    for planned, real in zip(bare.layers, adapted.layers, strict=True):
        found = AdapterCosts.of(planned, step, 64, 4)
        assert found.columns == AdapterCosts.of(real, Step(batch=1, seq=64), 64, 4).columns
