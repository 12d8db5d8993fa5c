"""The layout of a checkpoint is found by its tensor names; if none fits, the error shows both sides."""

import pytest
import torch
from safetensors.torch import save_file
from sample_files import MAP, random_tensors

from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.reading import (
    SINGLE_FILE,
    CheckpointReader,
)
from liger_models.convert.checkpoints.source_layout import match_layout
from liger_models.convert.errors import CheckpointError

OTHER = {"norm": Ref("model.norm.weight", (6,)), "w": Ref("model.w", (4, 4))}


def match(folder, tensors, layouts=None, **kwargs):
    save_file(tensors, folder / SINGLE_FILE)
    with CheckpointReader(folder) as reader:
        return match_layout(reader, layouts or {"first": MAP, "other": OTHER}, **kwargs)


def test_the_layout_with_exactly_these_names_is_found(tmp_path):
    assert match(tmp_path, random_tensors(MAP)).layout == "first"
    assert match(tmp_path, random_tensors(OTHER)).layout == "other"


def test_names_that_fit_no_layout_are_shown_for_both_sides(tmp_path):
    tensors = random_tensors()
    tensors["surplus"] = tensors.pop("q.weight")
    del tensors["norm.weight"]
    with pytest.raises(CheckpointError) as error:
        match(tmp_path, tensors)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "the nearest of 2 known layouts" in message
    assert "missing from the checkpoint: 2 tensors: norm.weight, q.weight" in message
    assert "unknown to the model: 1 tensors: surplus" in message


def test_a_long_list_of_names_is_truncated(tmp_path):
    with pytest.raises(CheckpointError, match=r"unknown to the model: 30 tensors: x0, .*, \.\.\.\n"):
        match(tmp_path, {**random_tensors(), **{f"x{i}": torch.zeros(1) for i in range(30)}})


def test_a_wrong_shape_is_shown_with_file_and_both_shapes(tmp_path):
    wrong = rf"(?s)q.weight in {SINGLE_FILE} is \(6, 8\), expected \(8, 6\)"
    with pytest.raises(CheckpointError, match=wrong):
        match(tmp_path, {**random_tensors(), "q.weight": torch.zeros(6, 8)})


def test_carried_tensors_are_kept_for_export(tmp_path):
    inv_freq = torch.rand(4)
    tensors = {**random_tensors(), "layers.0.rotary_emb.inv_freq": inv_freq}
    source = match(tmp_path, tensors, carried=("*.rotary_emb.inv_freq",))
    assert source.carried.keys() == {"layers.0.rotary_emb.inv_freq"}
    assert torch.equal(source.carried["layers.0.rotary_emb.inv_freq"], inv_freq)
    with pytest.raises(CheckpointError, match=r"unknown to the model: 1 tensors: layers\.0\.rotary_emb"):
        match(tmp_path, tensors)


def test_a_tied_duplicate_must_equal_its_original_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("liger_models.convert.checkpoints.tensor_bytes.PIECE_BYTES", 64)
    tensors = random_tensors()
    tied = {"lm_head.weight": "q.weight"}
    assert match(tmp_path, tensors, tied_duplicates=tied).tied == {}
    same = {**tensors, "lm_head.weight": tensors["q.weight"].clone()}
    assert match(tmp_path, same, tied_duplicates=tied).tied == tied
    for change in (lambda t: t[-1, -1].add_(1), lambda t: t.neg_(), lambda t: t.resize_(4, 6)):
        different = {**tensors, "lm_head.weight": tensors["q.weight"].clone()}
        change(different["lm_head.weight"])
        with pytest.raises(
            CheckpointError, match=r"'lm_head.weight' must repeat 'q.weight'.*tie_word_embeddings"
        ):
            match(tmp_path, different, tied_duplicates=tied)
