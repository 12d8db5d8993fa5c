"""Documents in a row attend to their own images only; no other attention is computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from scenes import DOCUMENTS

from liger_models.convert.errors import DataError
from liger_models.layers.attention import cross_attention


@pytest.fixture
def packed(make_pair):
    """A pair, its documents in one row, their ends, and the number of images of each."""
    pair = make_pair("mllama")
    alone = [pair.scene(document) for document in DOCUMENTS.values()]
    lengths = [call["input_ids"].shape[1] for call in alone]
    images = [call["aspect_ratio_ids"].shape[1] if "aspect_ratio_ids" in call else 0 for call in alone]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    return pair, {**pair.pack(alone), "cu_seqlens": bounds}, lengths, images


def scores(pair, call, monkeypatch) -> list[list[int]]:
    """Number of scores that each cross-attention layer computes for one head."""
    counts: list[list[int]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(q, k, *rest, **options):
        counts[-1].append(q.shape[2] * k.shape[2])
        return attend(q, k, *rest, **options)

    mixers = [layer.token_mixer for layer in pair.ours.layers]
    crossing = [mixer for mixer in mixers if isinstance(mixer, cross_attention.CrossAttention)]
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        begin = [m.register_forward_pre_hook(lambda *_: counts.append([])) for m in crossing]
        end = [m.register_forward_hook(lambda *_: counts.append([])) for m in crossing]
        counts.append([])
        pair.ours(**{name: x for name, x in call.items() if name != "labels"})
        for hook in (*begin, *end):
            hook.remove()
    return counts[1::2]


def test_each_document_attends_to_its_own_images_only(packed, monkeypatch):
    pair, call, lengths, images = packed
    keys = pair.vision.tiles * ((pair.vision.image_size // pair.vision.patches.size) ** 2 + 1)
    expected = [length * count * keys for length, count in zip(lengths, images, strict=True) if count]
    assert scores(pair, call, monkeypatch) == [expected] * 2  # for two layers
    # If no token attends to an image, its document is unknown: then all tokens are scored with all images.
    unseen = call["cross_attention_mask"].clone()
    first = unseen[0, :, 0].nonzero()[:, 0]
    unseen[0, first, 0] = 0
    whole = scores(pair, call | {"cross_attention_mask": unseen}, monkeypatch)
    assert whole == [[sum(lengths) * sum(images) * keys]] * 2


def test_an_image_that_another_document_names_is_refused(packed):
    pair, call, lengths, _ = packed
    mask = call["cross_attention_mask"].clone()
    mask[0, sum(lengths[:2]), -1] = 1  # the last document's image, visible to the previous one
    with pytest.raises(DataError, match="to another document than the one whose text names it"):
        pair.ours(**call | {"cross_attention_mask": mask})
