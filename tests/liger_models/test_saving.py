"""Which models can be saved, in which dtype, and where they can be."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import CheckpointError, ConfigError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return liger_models.from_config({**find_architecture("llama").tiny, "tie_word_embeddings": True})


def test_a_dtype_may_be_given_by_name(model, tmp_path):
    model.save_pretrained(tmp_path / "out", dtype="bfloat16")
    assert liger_models.from_hub(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "float8_e4m3fn", "bf16"])
def test_a_dtype_that_would_lose_the_weights_is_refused(dtype, model, tmp_path):
    with pytest.raises(ConfigError, match="is not a floating point dtype"):
        model.save_pretrained(tmp_path / "out", dtype=dtype)
    with pytest.raises(ConfigError, match="is not a floating point dtype"):
        liger_models.from_config(model.config.to_dict(), dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_only_carried_along_does_not_choose_the_dtype(model, tmp_path):
    """Old LLaMA checkpoints hold the rotary frequencies in float32 beside weights in 16 bits."""
    model.bfloat16().save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    save_file(load_file(file) | frequencies, file, {"format": "pt"})
    assert liger_models.from_hub(tmp_path / "out").dtype == torch.bfloat16


def test_split_projections_load_and_save_the_same_bytes(model, tmp_path):
    model.save_pretrained(tmp_path / "out")
    split = liger_models.from_hub(tmp_path / "out", projections="split")
    assert type(split.layers[0].self_attn.q_proj) is nn.Linear
    split.save_pretrained(tmp_path / "again")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again")]
    assert files[0] == files[1]


def test_fresh_split_projections_have_the_weights_of_fused_ones(model):
    torch.manual_seed(0)
    split = liger_models.from_config(model.config.to_dict(), projections="split")
    split.fuse_projections()
    assert all(torch.equal(a, b) for a, b in zip(split.parameters(), model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="projections must be 'fused' or 'split', found 'separate'"):
        liger_models.from_config(model.config.to_dict(), projections="separate")


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def wrap_projections(model):
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    attention.qkv_proj, mlp.gate_up_proj = Adapter(attention.qkv_proj), Adapter(mlp.gate_up_proj)


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize("change", [wrap_projections, untie])
def test_a_model_with_other_parameters_than_its_checkpoint_is_not_saved(change, model, tmp_path):
    change(model)
    with pytest.raises(CheckpointError, match="not those that it was made with; they differ in"):
        model.save_pretrained(tmp_path / "out")


def test_a_model_without_values_is_not_saved(model, tmp_path):
    with pytest.raises(CheckpointError, match="is on the meta device"):
        model.to("meta").save_pretrained(tmp_path / "out")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device, model):
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used"):
        liger_models.from_config(model.config.to_dict(), device=device)
