"""Checkpoints of families with audio encoders are loaded in full and saved byte for byte, in every known
layout.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from clips import DOCUMENTS
from pairs import beyond_bound, randomise, reference_class, relative_distance
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.convert.errors import ConfigError
from liger_models.layers.audio.encoder import Pieces


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_of_every_layout_come_back_byte_for_byte_and_the_reference_reads_them(pair, tmp_path):
    """Matrices are in bfloat16 and the stored positions in float32, as in Voxtral's checkpoints."""
    reference = reference_class(pair.architecture)
    pair.reference.save_pretrained(tmp_path / "theirs", max_shard_size=100_000)
    model = liger_models.from_hub(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "theirs")
    randomise(model, torch.Generator().manual_seed(2))
    batch = pair.rows_of_one_length([[2, 5], [3, 9]])
    for number, layout in enumerate(pair.architecture.layouts):
        model.layout, model.source = layout, None
        for name, tensor in model.saved_tensors().items():
            if "layers.0." in name and "norm" not in name:
                tensor.data = tensor.data.bfloat16()
        first, second = tmp_path / f"first-{number}", tmp_path / f"second-{number}"
        model.save_pretrained(first, max_shard_size=50_000)
        again = liger_models.from_hub(first)
        again.save_pretrained(second)
        assert files(second) == files(first)
        read = reference.from_pretrained(first, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            found = liger_models.from_hub(first, dtype=torch.float32)(**batch, return_logits=True).logits
            expected = read(**batch, use_cache=False).logits
        assert not beyond_bound({"logits": relative_distance(found, expected)})


def test_fresh_positions_are_whispers_sines_and_cosines(pair):
    model = liger_models.from_config(pair.config, dtype=torch.float32)
    table = getattr(model.audio.encoder, "table", None)
    if table is None:
        pytest.skip("the positions are not stored")
    assert torch.equal(
        table.weight[0], torch.tensor([0.0, 1.0]).repeat_interleave(table.weight.shape[1] // 2)
    )
    assert torch.allclose(table.weight[1, 0].sin(), torch.tensor(1.0).sin().sin())
    assert not any("table" in name for name, _ in model.named_parameters())


def test_whole_models_come_back_with_the_parts_that_speak(pair, tmp_path):
    if not pair.architecture.model_type.endswith("_thinker"):
        pytest.skip("not part of a model that speaks")
    pair.reference.save_pretrained(tmp_path / "thinker")
    tensors = load_file(tmp_path / "thinker/model.safetensors")
    tensors = {f"thinker.{name}": x for name, x in tensors.items()} | {
        "talker.model.norm.weight": torch.rand(3)
    }
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole/model.safetensors", {"format": "pt"})
    whole = pair.architecture.model_type.removesuffix("_thinker")
    config = {"model_type": whole, "thinker_config": pair.config, "talker_config": {"hidden_size": 3}}
    (tmp_path / "whole/config.json").write_text(json.dumps(config))
    model = liger_models.from_hub(tmp_path / "whole")
    model.save_pretrained(tmp_path / "out")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("key", ["dropout", "activation_dropout", "attention_dropout"])
def test_dropout_of_the_encoder_is_refused(key, pair):
    if isinstance(pair.ours.audio.encoder, Pieces):
        pytest.skip("there is no encoder")
    part = next(name for name in ("audio_config", "encoder_config") if name in pair.config)
    config = {**pair.config, part: {**pair.config[part], key: 0.1}}
    with pytest.raises(ConfigError, match=key):
        liger_models.from_config(config)
    liger_models.from_config(config, dropout=0.0)


def test_the_text_part_loads_alone(pair, tmp_path):
    pair.reference.save_pretrained(tmp_path)
    model = liger_models.from_hub(tmp_path, text_only=True)
    assert model.spec.audio is None
    tensors = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert len(model.saved_tensors()) < len(tensors)


@pytest.mark.parametrize("family", ["voxtral"])
def test_positions_in_float32_leave_the_other_matrices_in_bfloat16(pair, tmp_path):
    reference = copy.deepcopy(pair.reference).bfloat16()
    next(m for name, m in reference.named_modules() if name.endswith("embed_positions")).float()
    reference.save_pretrained(tmp_path)
    model = liger_models.from_hub(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.audio.encoder.table.weight.dtype == torch.float32
    model(**pair.scene(*DOCUMENTS)).loss.backward()
