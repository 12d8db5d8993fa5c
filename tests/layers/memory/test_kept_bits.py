"""The planned memory of a step over quantised bits is what the step allocates."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from allocations import peak_of_a_step
from planned_models import LLAMA_8B, QWEN3_30B_6

import liger_models
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.quantised.reader import dense_tensors
from liger_models.convert.quantised.recognition import recognise
from liger_models.layers.memory import Step, StepMemory
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.models.stored_weights import keep_stored

peft = pytest.importorskip("peft")

FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "rope_theta": 150000.0,
    },
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tie_word_embeddings": False,
}
MODELS = {
    "gpt-oss": (GPT_OSS, MXFP4, 1, 4096),
    "experts one by one": (QWEN3_30B_6, FLOAT8, 4, 4096),
    "linear layers": (LLAMA_8B, FLOAT8, 1, 8192),
}


def parts_of(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of a weight in a checkpoint: names, dtypes and shapes."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        experts, inputs, outputs = shape
        grid = experts, outputs, inputs // 32
        return {f"{name}_blocks": (torch.uint8, (*grid, 16)), f"{name}_scales": (torch.uint8, grid)}
    if name.endswith("_proj.weight"):
        grid = tuple(-(-size // 128) for size in shape)
        return {name: (torch.float8_e4m3fn, shape), f"{name}_scale_inv": (torch.float32, grid)}
    return {name: (torch.bfloat16, shape)}


def in_bits(config, settings):
    """A model of two layers on the meta device, with adapters on attention."""
    config = config | {"num_hidden_layers": 2, "dtype": "bfloat16"}
    model = liger_models.from_config(config, device="meta", projections="split")
    model.layout = model.architecture.layouts[0]
    tensors = {}
    for expr in model.weight_map().values():
        for ref in expr.refs():
            quantised = settings is FLOAT8 or "experts" in ref.name
            parts = parts_of(ref.name, ref.shape) if quantised else {ref.name: (torch.bfloat16, ref.shape)}
            for name, (dtype, shape) in parts.items():
                tensors[name] = TensorInfo(name, "", dtype, shape, 0, math.prod(shape) * dtype.itemsize)
    config["quantization_config"] = settings
    found = recognise(Path("published"), config, tensors, None)
    keep_stored(model, dense_tensors(tensors, found, config), Path("published"))
    with torch.device("meta"):
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets)).train()
    return model, sum(info.nbytes for info in tensors.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_what_a_step_over_quantised_bits_allocates(name):
    config, settings, batch, seq = MODELS[name]
    model, on_disk = in_bits(config, settings)
    memory = StepMemory(model, Step(batch, seq, optimizer_bytes=0))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    for level in LEVELS:
        model.set_activation_memory(level)
        model.zero_grad()
        plan = memory.plan([level] * 2)
        assert plan.parts["weights"] == on_disk + trained
        found = peak_of_a_step(model, batch, seq) + plan.parts["weights"]
        assert plan.peak == pytest.approx(found, rel=0.02), (level, plan.moment)
