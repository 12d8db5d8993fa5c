"""torchtitan's trainer with our models, on two CPU ranks, against a whole model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from randomised import randomise
from ranks import run_ranks
from safetensors.torch import load_file

import liger_models
from liger_models import ConfigError
from liger_models.architectures import find_architecture

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

RANK = Path(__file__).with_name("torchtitan_rank.py")
pytestmark = pytest.mark.slow


def files(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_step_in_torchtitan_is_that_of_a_whole_model(family, tmp_path):
    """Weights are read from files of Hugging Face, by torchtitan or by us, and written after a step."""
    dense = family == "llama"
    config = {**find_architecture(family).tiny, "vocab_size": 61, "tie_word_embeddings": dense}
    randomise(liger_models.from_config(config), torch.Generator().manual_seed(7)).save_pretrained(
        tmp_path / "model"
    )
    options = ["--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"] if dense else []
    found = run_ranks(RANK, tmp_path, *options)

    model = liger_models.from_hub(tmp_path / "model", device="cpu", dtype=torch.float32, projections="split")
    rows = [runpy.run_path(str(RANK))["rows"](rank) for rank in range(2)]
    ids, positions, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
    model(ids, position_ids=positions, shift_labels=labels).loss.backward()
    parameters = dict(model.named_parameters())
    for rank in found:
        assert rank["loaded"].keys() == {f"model.{name}" for name in parameters}
        for name, p in parameters.items():
            assert torch.equal(rank["loaded"][f"model.{name}"], p), name
            # float32, in another order of sums.
            torch.testing.assert_close(rank["gradients"][f"model.{name}"], p.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert sum(rank["loss"] for rank in found) == pytest.approx(
            model(ids, position_ids=positions, shift_labels=labels).loss.item(), rel=1e-5
        )
        for name, p in parameters.items():
            p.copy_(found[0]["trained"][f"model.{name}"])
    model.save_pretrained(tmp_path / "expected")
    written = tmp_path / "out" / "checkpoint" / "step-1"
    if not dense:
        from liger_models.integrations.torchtitan import export

        export(written, tmp_path / "model", tmp_path / "exported")
        written = tmp_path / "exported"
    expected = files(tmp_path / "expected")
    tensors = files(written)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name].to(tensor.dtype), tensor), name


def test_a_state_is_converted_to_the_files_tensors_and_back(tmp_path):
    from liger_models.integrations.torchtitan import LigerModel, LigerStateDictAdapter

    config = LigerModel.Config(hf_config=find_architecture("qwen3_moe").tiny)
    model = randomise(liger_models.from_config(config.hf_config, projections="split"), torch.Generator())
    model.save_pretrained(tmp_path)
    adapter = LigerStateDictAdapter(config, None)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    expected = files(tmp_path)
    found = adapter.to_hf(state)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    back = adapter.from_hf(found)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())
    del state["model.norm.weight"]
    with pytest.raises(liger_models.CheckpointError, match=r"lacks 1 tensors \['norm.weight'\]"):
        adapter.to_hf(state)


def test_settings_that_our_models_do_not_have_are_refused():
    from liger_models.integrations.torchtitan import train

    for section, name, value in (
        ("parallelism", "tensor_parallel_degree", 2),
        ("training", "disable_cuda_graphs", False),
        ("compile", "enable", True),
    ):
        config = train()
        setattr(getattr(config, section), name, value)
        with pytest.raises(ConfigError, match=name.replace("disable_", "")[:8]):
            config.model_spec.model.update_from_config(config=config)
