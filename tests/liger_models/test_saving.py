"""Models that can be saved, their dtypes, and their devices."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import liger_models
from liger_models.architectures import Architecture, find_architecture
from liger_models.architectures.registry import registry
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.layers.specs import MoESpec


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


def test_an_unused_tensor_does_not_determine_the_dtype(model, tmp_path):
    """Old LLaMA checkpoints have rotary frequencies in float32 next to 16-bit weights."""
    model.bfloat16().save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    save_file(load_file(file) | frequencies, file, {"format": "pt"})
    assert liger_models.from_hub(tmp_path / "out").dtype == torch.bfloat16


def test_split_projections_load_and_save_the_same_bytes(model, tmp_path):
    model.save_pretrained(tmp_path / "out")
    split = liger_models.from_hub(tmp_path / "out", projections="split")
    assert isinstance(split.layers[0].self_attn.q_proj, nn.Linear)
    split.save_pretrained(tmp_path / "again")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again")]
    assert files[0] == files[1]


def test_fresh_split_projections_have_the_same_weights_as_fused_ones(model):
    torch.manual_seed(0)
    split = liger_models.from_config(model.config.to_dict(), projections="split")
    split.fuse_projections()
    assert all(torch.equal(a, b) for a, b in zip(split.parameters(), model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="projections must be 'fused' or 'split', found 'separate'"):
        liger_models.from_config(model.config.to_dict(), projections="separate")


def test_layers_in_torchs_checkpoint_wrapper_are_saved_under_their_own_names(model, tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.save_pretrained(tmp_path / "out")
    model.split_projections()
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    model.save_pretrained(tmp_path / "again")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again")]
    assert files[0] == files[1]


GATE = ((".router.correction_bias", ".gate.e_score_correction_bias"), (".router.", ".gate."))
LAYOUTS = (
    Layout(rename=GATE),
    Layout(rename=GATE, whole=("*.experts.*",)),
    Layout(
        whole=("*.experts.*",),
        permuted=(
            ("*.experts.gate_up_proj", "e h (i 2) -> e (2 i) h"),
            ("*.experts.down_proj", "e i h -> e h i"),
        ),
    ),
)


@pytest.fixture
def experts_model(monkeypatch):
    """Model of a family with three layouts, experts and a saved buffer."""

    def build(c):
        block = llama(c).blocks[0]
        moe = MoESpec(4, 2, 24, score="sigmoid", correction_bias=True)
        return replace(llama(c), blocks=(replace(block, mlp=moe), block))

    llama = find_architecture("llama").build
    tiny = {**find_architecture("llama").tiny, "model_type": "of_experts"}
    family = Architecture("of_experts", build, "LlamaForCausalLM", tiny, layouts=LAYOUTS)
    monkeypatch.setitem(registry._ARCHITECTURES, "of_experts", family)
    torch.manual_seed(0)
    model = liger_models.from_config(tiny, dtype="bfloat16")
    model.layers[0].mlp.router.correction_bias.normal_()
    return model


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one by one", "stacked", "inputs first, alternating"])
def test_a_checkpoint_is_saved_in_its_source_layout(layout, experts_model, tmp_path):
    experts_model.layout = layout
    experts_model.save_pretrained(tmp_path / "in")
    found = load_file(tmp_path / "in" / "model.safetensors")
    assert found.keys() == checkpoint_shapes(experts_model.weight_map(layout)).keys()
    again = liger_models.from_hub(tmp_path / "in")
    assert again.layout == layout
    tensors = experts_model.saved_tensors()
    for name, tensor in again.saved_tensors().items():
        assert torch.equal(tensor, tensors[name]), name
    again.save_pretrained(tmp_path / "out")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("in", "out")]
    assert files[0] == files[1]


def test_a_buffer_is_saved_and_loaded_and_keeps_its_dtype(experts_model, tmp_path):
    bias = experts_model.layers[0].mlp.router.correction_bias
    experts_model.save_pretrained(tmp_path / "out", dtype="float16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    stored = found.pop("model.layers.0.mlp.gate.e_score_correction_bias")
    assert torch.equal(stored, bias)
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    again = liger_models.from_hub(tmp_path / "out")  # the float32 bias does not determine the dtype
    assert again.dtype == torch.float16
    assert torch.equal(again.layers[0].mlp.router.correction_bias, bias)


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
    with pytest.raises(CheckpointError, match="have changed since its creation; they differ in"):
        model.save_pretrained(tmp_path / "out")


def test_a_model_without_values_is_not_saved(model, tmp_path):
    with pytest.raises(CheckpointError, match="is on the meta device"):
        model.to("meta").save_pretrained(tmp_path / "out")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_missing_device_is_refused(device, model):
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used"):
        liger_models.from_config(model.config.to_dict(), device=device)
