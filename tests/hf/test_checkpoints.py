"""Checkpoints through transformers' loader and writer equal those of its own models byte for byte."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from safetensors.torch import load_file, save_file

import liger_models

transformers = pytest.importorskip("transformers")

FAMILIES = [
    "llama",
    "gemma2",
    "qwen3_moe",
    "gpt_oss",
    "phi3",
    "gemma4_text",
    "falcon",
    "gpt_neox",
    "stablelm",
]


def files(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in os.listdir(folder) if (folder / name).is_file()}


def tensors_of(folder) -> dict[str, torch.Tensor]:
    """Read all tensors through the index, from the files that it lists."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in index.items()}


@pytest.mark.supports("transformers", "checkpoints byte for byte")
@pytest.mark.parametrize("projections", ["fused", "split"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_written_back_unchanged(family, projections, make_both, tmp_path):
    both = make_both(family, projections=projections)
    both.ours.save_pretrained(tmp_path / "ours")
    assert files(tmp_path / "ours") == files(both.folder)


@pytest.mark.supports("transformers", "sharded files")
def test_sharded_files_are_read_and_written(make_both, tmp_path):
    both = make_both("qwen3_moe")
    both.reference.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    assert len(files(tmp_path / "sharded")) > 4
    model = type(both.ours).from_pretrained(tmp_path / "sharded")
    model.save_pretrained(tmp_path / "ours", max_shard_size="30KB")
    # The file of a tensor depends on the order in which transformers collects them.
    expected, found = (tensors_of(tmp_path / name) for name in ("sharded", "ours"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_weights_are_saved_as_the_native_model_saves_them(family, make_both, tmp_path):
    both = make_both(family)
    fresh = transformers.AutoModelForCausalLM.from_config(both.ours.config)
    fresh.save_pretrained(tmp_path / "fresh")
    native = liger_models.from_pretrained(tmp_path / "fresh")
    native.save_pretrained(tmp_path / "native")
    name = "model.safetensors"
    assert (tmp_path / "native" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()
    ids = torch.arange(3, 16)[None]
    assert relative_distance(fresh.eval()(ids).logits, native(ids).logits) <= BOUND


def test_tensors_that_a_checkpoint_lacks_are_zeros(make_both, tmp_path):
    """A.X K1 was released without the correction bias of its routers."""
    both = make_both("axk1")
    tensors = load_file(both.folder / "model.safetensors")
    stored = {name: tensor for name, tensor in tensors.items() if not name.endswith("correction_bias")}
    assert len(stored) < len(tensors)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((both.folder / "config.json").read_bytes())
    model = type(both.ours).from_pretrained(tmp_path).eval()
    assert not any(bias.any() for name, bias in model.named_buffers() if name.endswith("correction_bias"))
    native = liger_models.from_pretrained(tmp_path)
    ids = torch.arange(3, 16)[None]
    assert relative_distance(model(ids).logits, native(ids).logits) <= BOUND


def test_a_checkpoint_with_stacked_experts_is_saved_with_stacked_experts(make_both, tmp_path):
    both = make_both("qwen3_moe")
    native = liger_models.from_pretrained(both.folder)
    whole = native.architecture.layouts[1]
    tensors = {}
    for name, expr in native.weight_map(whole).items():
        tensors |= expr.write(native.saved_tensors()[name].detach())
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors
    folder = tmp_path / "whole"
    both.reference.config.save_pretrained(folder)
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    model = type(both.ours).from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    expected = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == expected


@pytest.mark.supports("transformers", "base models")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_base_model_can_be_read_from_any_checkpoint_and_saved(family, make_both, tmp_path, hf):
    both = make_both(family)
    ids = torch.arange(3, 16)[None]
    expected = both.ours.model(ids).last_hidden_state
    base = transformers.AutoModel.from_pretrained(both.folder)
    # Not bit for bit: tensors in different files are aligned differently, and on some CPUs the order of sums
    # in a matrix product depends on alignment.
    assert relative_distance(base(ids).last_hidden_state, expected) <= BOUND
    assert all(map(torch.equal, base.state_dict().values(), both.ours.model.state_dict().values()))
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")  # with a fresh head
    assert all(map(torch.equal, again.model.state_dict().values(), base.state_dict().values()))
    hf.unregister()
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert relative_distance(theirs(ids).last_hidden_state, expected) <= BOUND
    theirs.save_pretrained(tmp_path / "their_base")
    assert files(tmp_path / "their_base") == files(tmp_path / "base")


@pytest.mark.supports("transformers", "dtypes")
@pytest.mark.parametrize(
    ("family", "projections"),
    [("llama", "fused"), ("deepseek_v32", "fused"), ("hunyuan_v1_moe", "split"), ("hy_v4", "split")],
)
def test_dtypes_are_those_of_the_reference(family, projections, make_both, tmp_path):
    """Which keeps routers, sinks or the head of some models in float32."""
    both = make_both(family, projections=projections)
    theirs = type(both.reference).from_pretrained(both.folder, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs_in_16_bits")
    model = type(both.ours).from_pretrained(both.folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs_in_16_bits")
    again = type(both.ours).from_pretrained(tmp_path / "ours", dtype="auto")
    assert all(map(same, again.state_dict().values(), model.state_dict().values()))
    for dtype in (torch.bfloat16, torch.float16):  # in which it has more tensors in float32
        logits = type(both.ours).from_pretrained(both.folder, dtype=dtype)(torch.arange(3, 16)[None]).logits
        assert logits.isfinite().all()


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.supports("transformers", "layers offloaded to disk")
def test_layers_offloaded_to_disk_compute_the_same(make_both, batch, tmp_path):
    both = make_both("qwen3_moe")
    devices = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{i}": "disk" if i else "cpu" for i in range(len(both.ours.model.layers))}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        both.folder, device_map=devices | layers, offload_folder=tmp_path / "offloaded"
    ).eval()
    with torch.no_grad():
        assert relative_distance(model(**batch).logits, both.ours(**batch).logits) <= BOUND


def test_loading_with_a_tensor_parallel_plan_of_transformers_is_refused(make_both):
    both = make_both("llama")
    for option, value in (("tp_plan", "auto"), ("tp_size", 2), ("distributed_config", object())):
        with pytest.raises(ValueError, match=f"{option}: transformers' plans .* are for its own modules"):
            transformers.AutoModelForCausalLM.from_pretrained(both.folder, **{option: value})


def test_a_checkpoint_with_a_part_missing_is_refused(make_both, tmp_path):
    both = make_both("llama")
    path = both.folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RuntimeError):
        type(both.ours).from_pretrained(both.folder)


def test_a_state_dict_of_a_checkpoint_is_loaded_and_half_of_it_refused(make_both):
    """Trainer resumes with strict=False, which would silently skip tensors with other names."""
    both = make_both("qwen3_moe")
    tensors = load_file(both.folder / "model.safetensors")
    expected = {name: x.clone() for name, x in both.ours.state_dict().items()}
    for model in (both.ours, both.ours.model):
        with torch.no_grad():
            for p in both.ours.parameters():
                p.zero_()
        prefix = "" if model is both.ours else "model."
        given = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        result = model.load_state_dict(given, strict=False)
        assert not result.missing_keys
        found = both.ours.state_dict()
        assert all(torch.equal(found[n], x) for n, x in expected.items() if n.startswith(prefix))
    tensors = load_file(both.folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(liger_models.CheckpointError, match="pass all of them, or none"):
        both.ours.load_state_dict(tensors, strict=False)


def test_only_whole_checkpoints_reset_the_tensors_that_they_lack(make_both):
    """An adapter, loaded with strict=False, leaves the correction bias, which A.X K1's checkpoint lacks."""
    both = make_both("axk1")
    buffers = dict(both.ours.named_buffers())
    biases = {n: x.normal_().clone() for n, x in buffers.items() if n.endswith("correction_bias")}
    tensors = load_file(both.folder / "model.safetensors")
    released = {n: x for n, x in tensors.items() if not n.endswith("correction_bias")}
    one = {name: x for name, x in released.items() if ".layers.0.mlp." in name}
    for part in ({}, one):
        both.ours.load_state_dict(part, strict=False)
        assert all(torch.equal(both.ours.get_buffer(name), x) for name, x in biases.items())
    fresh = type(both.ours)(both.ours.config)  # which has not read a checkpoint with biases
    for name in biases:
        fresh.get_buffer(name).normal_()
    fresh.load_state_dict(released)
    assert biases
    assert not any(fresh.get_buffer(name).any() for name in biases)


@pytest.mark.parametrize("projections", ["fused", "split"])
def test_the_orientation_of_an_ambiguous_tensor_is_inferred_from_the_others(projections, make_both):
    """Checkpoints of gpt-oss have the experts transposed, and their biases in another order."""
    both = make_both("gpt_oss", projections=projections, hidden_size=80, intermediate_size=80)
    expected = {name: x.clone() for name, x in both.ours.state_dict().items()}
    stored = load_file(both.folder / "model.safetensors")
    down = "model.layers.1.mlp.experts.down_proj"
    assert stored[down].shape == expected[down].shape
    assert not torch.equal(stored[down], expected[down])
    for given in (expected, stored):
        with torch.no_grad():
            for p in both.ours.parameters():
                p.zero_()
        both.ours.load_state_dict(given)
        found = both.ours.state_dict()
        assert all(torch.equal(found[name], x) for name, x in expected.items())
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(liger_models.CheckpointError, match=r"may be either; pass all of one kind"):
        both.ours.load_state_dict(stored | {gate_up: expected[gate_up]})
