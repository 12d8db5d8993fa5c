"""Positions given by the caller are used, also in families whose image positions have three axes."""

from __future__ import annotations

import copy

import pytest
import torch
from pairs import beyond_bound, relative_distance, spec_of
from scenes import DOCUMENTS, Image

from liger_models.architectures import list_architectures
from liger_models.convert.errors import DataError


def with_axes(family):
    return getattr(spec_of(family).vision, "positions", None) is not None


OF_AXES = [family for family in list_architectures(vision=True) if with_axes(family)]


def given(kind, ids, family):
    """Positions that differ from the model's own. The first of Hunyuan-VL's axes counts."""
    rows, length = ids.shape
    counted = torch.arange(length).expand(rows, -1)
    axes = torch.stack([counted // 2 + 1, counted % 7, 3 + counted // 3])
    if family == "hunyuan_vl" and kind == "on axes":
        kind = "counted and on axes"
    kinds = {"counted": 2 + counted, "of one row": 1 + counted[:1], "on axes": axes}
    return kinds[kind] if kind in kinds else torch.cat([counted[None], axes])


def placed(call, kind, family):
    """The call with such positions."""
    return {**call, "position_ids": given(kind, call["input_ids"], family)}


@pytest.mark.parametrize("kind", ["counted", "of one row", "on axes", "counted and on axes"])
@pytest.mark.parametrize("family", OF_AXES)
def test_given_positions_are_used_as_in_the_reference(kind, family, pair):
    for draw in (pair.batch, lambda: pair.scene([21], [21])):
        call = pair.clear(lambda draw=draw: placed(draw(), kind, family))
        theirs = dict(call)
        if kind == "of one row":  # Qwen4's indexers need those of all rows
            theirs["position_ids"] = call["position_ids"].expand_as(call["input_ids"])
        expected = pair.run_reference(**theirs)
        assert not beyond_bound(pair.run_ours(**call).distances(expected))


@pytest.mark.parametrize("family", OF_AXES)
def test_given_positions_work_with_padding(family, pair):
    call = pair.clear(lambda: placed(pair.scene(*DOCUMENTS.values(), padding="left"), "on axes", family))
    expected = pair.run_reference(**call)
    assert not beyond_bound(pair.run_ours(**call).distances(expected, call["attention_mask"].bool()))


def test_axes_that_a_model_lacks_are_refused(make_pair, pairs_made):
    lacking = {"gemma3": 3, "qwen2_5_vl": 2, "hunyuan_vl": 3}
    for family, positions in ((family, torch.zeros(axes, 1, 8)) for family, axes in lacking.items()):
        pair = pairs_made.get(family) or pairs_made.setdefault(family, make_pair(family))
        with pytest.raises(DataError, match="position_ids"):
            pair.ours(torch.full((1, 8), 20), position_ids=positions.long())


def test_packed_documents_with_images_need_positions_on_all_axes(make_pair, pairs_made):
    """Positions that restart in packed documents cannot be positions of images, with bounds or without."""
    pair = pairs_made.get("qwen2_5_vl") or pairs_made.setdefault("qwen2_5_vl", make_pair("qwen2_5_vl"))
    alone = [pair.scene([1, Image(6, 10), 2]), pair.scene([5, Image(4, 4), 3])]
    lengths, call = [one["input_ids"].shape[1] for one in alone], pair.pack(alone)
    bounds = torch.tensor([0, lengths[0], sum(lengths)])
    counted = torch.cat([torch.arange(length) for length in lengths])[None]
    for more in ({}, {"cu_seqlens": bounds}):
        with pytest.raises(DataError, match="restart, as for packed documents"):
            pair.ours(**call, position_ids=counted, **more)
    names = ("input_ids", "image_grid_thw", "mm_token_type_ids")
    theirs = pair.reference.model
    axes = torch.cat([theirs.get_rope_index(**{n: one[n] for n in names})[0] for one in alone], -1)
    with torch.no_grad():
        expected = pair.ours(**call, cu_seqlens=bounds).loss
        found = pair.ours(**call, position_ids=torch.cat([counted[None], axes])).loss
    assert not beyond_bound({"loss": relative_distance(found, expected)})


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
@pytest.mark.parametrize("way", ["as the model counts", "given"])
def test_tokens_after_a_cache_with_images_continue_from_them(way, family, pair, hf, tmp_path):
    """In transformers, the second half of a conversation on the first's cache equals a pass without cache."""
    import transformers

    pair.reference.save_pretrained(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    call = pair.scene([1, Image(6, 10), 2, Image(4, 4), 9])
    del call["labels"]
    theirs = pair.reference.model
    names = ("input_ids", "image_grid_thw", "mm_token_type_ids")
    axes, _ = theirs.get_rope_index(**{name: call[name] for name in names})
    if way == "given":
        call["position_ids"] = axes
    length = call["input_ids"].shape[1] - 6
    cut = {"input_ids", "mm_token_type_ids", "position_ids"} & call.keys()
    first = {name: x[..., :length] if name in cut else x for name, x in call.items()}
    with torch.no_grad():
        expected = model(**call).logits[:, -6:]
        cache = model(**first, use_cache=True).past_key_values
        ids = call["input_ids"][:, length:]
        for positions in (None, axes[..., length:]):
            found = model(ids, past_key_values=copy.deepcopy(cache), position_ids=positions).logits
            assert not beyond_bound({"logits": relative_distance(found, expected)})
        moved = model(ids, past_key_values=copy.deepcopy(cache), position_ids=5 + axes[..., length:]).logits
        assert relative_distance(moved, expected) > 1e-3
