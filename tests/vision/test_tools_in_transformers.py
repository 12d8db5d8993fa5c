"""Methods of vision-language models in transformers that generation and other tools call."""

from __future__ import annotations

import pytest
import torch
from pairs import BOUND, relative_distance
from scenes import DOCUMENTS

transformers = pytest.importorskip("transformers")

GREEDY = {"do_sample": False, "pad_token_id": 9, "eos_token_id": None, "suppress_tokens": [3, 4]}
FEW = ["gemma3", "gemma4", "llava_onevision", "mllama", "qwen2_5_vl"]
GRIDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {}


@pytest.fixture
def ours(family, pair, hf, folders, tmp_path_factory):
    """Our model, loaded from the files of transformers' own, `pair.reference`."""
    if family not in folders:
        folders[family] = tmp_path_factory.mktemp(family)
        pair.reference.save_pretrained(folders[family])
    return transformers.AutoModelForImageTextToText.from_pretrained(folders[family]).eval()


@pytest.mark.supports("vision-language models", "prompt lookup", "assisted generation")
@pytest.mark.parametrize(
    ("family", "way"),
    [(family, "assistant") for family in FEW]
    # Prompt lookup fails if the image token has no logit, also in transformers' own models (Mllama).
    + [(family, "prompt_lookup") for family in FEW if family != "mllama"],
)
def test_drafts_change_no_token_with_images(family, way, pair, ours):
    call = pair.scene(DOCUMENTS["two images"])
    del call["labels"]
    ids = call["input_ids"]
    first = int((ids[0] == ours.model.spec.vision.image_id).nonzero()[0])
    ids[:, -1] = ids[:, first - 1]  # the token before the image, whose tokens prompt lookup then drafts
    expected = ours.generate(**call, max_new_tokens=8, **GREEDY)
    options = {"prompt_lookup_num_tokens": 3}
    if way == "assistant":
        assistant = type(ours).from_pretrained(ours.name_or_path).eval()
        with torch.no_grad():  # an assistant that is often wrong
            head = assistant.get_output_embeddings().weight
            head.add_(0.05 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
        options = {"assistant_model": assistant}
    assert torch.equal(ours.generate(**call, max_new_tokens=8, **options, **GREEDY), expected)


@pytest.mark.parametrize("family", ["gemma3", "llava", "llava_onevision", "mistral3", "qwen3_vl"])
def test_image_features_match_the_reference(family, pair, ours):
    call = pair.scene(DOCUMENTS["two images"], DOCUMENTS["an image first"])
    given = {name: x for name, x in call.items() if name.startswith(("pixel_values", "image_"))}
    with torch.no_grad():
        expected = pair.reference.eval().get_image_features(**given).pooler_output
        found = ours.get_image_features(**given).pooler_output
        of_base = ours.model.get_image_features(**given).pooler_output
    assert len(found) == len(expected) == 3
    for one, other, theirs in zip(found, of_base, expected, strict=True):
        assert relative_distance(one, theirs) <= BOUND
        assert torch.equal(one, other)
    (as_tuple,) = ours.get_image_features(**given, return_dict=False)
    assert all(torch.equal(one, other) for one, other in zip(as_tuple, found, strict=True))
    with pytest.raises(TypeError, match="colour"):
        ours.get_image_features(**given, colour="red")


@pytest.mark.parametrize("family", GRIDS)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_image_positions_match_the_reference(family, padding, pair, ours):
    call = pair.scene(*DOCUMENTS.values(), padding=padding)
    expected, deltas = pair.reference.model.get_rope_index(**call)
    found, ours_deltas = ours.model.get_rope_index(**call)
    seen = call["attention_mask"].bool()
    assert torch.equal(found[:, seen], expected[:, seen])
    assert torch.equal(ours_deltas, deltas)
    text = pair.scene([5], [7], padding=padding)
    text = {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]}
    counted = (text["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found, deltas = ours.model.get_rope_index(**text)
    assert torch.equal(found, (counted * text["attention_mask"]).expand(3, -1, -1))
    assert not deltas.any()


@pytest.mark.parametrize("family", FEW)
def test_the_decoder_is_the_language_model(family, pair, ours):
    decoder = ours.get_decoder()
    assert decoder is ours.model.get_decoder()
    if family == "gemma4":  # another module has the name there
        assert decoder is ours.model
        return
    found = {id(p) for p in decoder.parameters()}
    assert found == {id(p) for module in ours.model.parts()["language"] for p in module.parameters()}
    ids = pair.scene([9])["input_ids"]
    with torch.no_grad():
        assert torch.equal(decoder(ids).last_hidden_state, ours.model(ids).last_hidden_state)
    assert decoder.config is ours.config.get_text_config()
