"""Decoders with bidirectional attention, as in embedding models: results match transformers, and packed or
padded documents match each document by itself.
"""

import pytest
import torch
from pairs import LENGTH, make_pair

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, DataError, UnsupportedModelError
from liger_models.generating.generation import generate

# Without windows; with windows; with windows and soft caps; with windows and sinks; and windows that Gemma's
# own key divides by both sides.
CASES = {
    "llama": {"is_causal": False},
    "olmo3": {"is_causal": False},
    "gemma2": {"is_causal": False},
    "gpt_oss": {"is_causal": False},
    "gemma3_text": {"use_bidirectional_attention": True},
}


@pytest.fixture(scope="module", params=CASES)
def pair(request):
    return make_pair(request.param, CASES[request.param])


def test_logits_and_gradients_agree(pair, failures):
    assert not failures(pair.distances(**pair.batch()))


def test_packed_documents_are_separate(pair, failures):
    batch, lengths = pair.batch(1, LENGTH + 12), [LENGTH, 1, 11]
    bounds = torch.tensor([0, LENGTH, LENGTH + 1, LENGTH + 12])
    expected = pair.run_reference_by_document(batch["input_ids"], batch["labels"], lengths)
    assert not failures(pair.run_ours(**batch, cu_seqlens=bounds).distances(expected))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(pair, side):
    ids = pair.batch(2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, slice(0, 6) if side == "left" else slice(LENGTH - 6, LENGTH)] = 0
    alone = ids[1:, 6:] if side == "left" else ids[1:, : LENGTH - 6]
    with torch.no_grad():
        found = pair.ours(ids, attention_mask=mask).logits[1][mask[1].bool()]
        expected = pair.ours(alone).logits[0]
    # The same sums in other places of other tensors: the usual float32 bound.
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_both_keys_of_gemma_3_widen_the_window_twice(failures):
    both = make_pair("gemma3_text", {"use_bidirectional_attention": True, "is_causal": False})
    assert not failures(both.distances(**both.batch()))


def test_nothing_is_generated_and_no_document_continues_another():
    model = make_pair("llama", CASES["llama"]).ours
    ids = torch.arange(6)[None]
    with pytest.raises(DataError, match="all tokens of a document attend to one another"):
        model(ids, cu_seqlens=torch.tensor([0, 3, 6]), parents=[-1, 0])
    with pytest.raises(UnsupportedModelError, match="cannot generate"):
        generate(model, ids)


def test_other_mixers_and_images_are_refused():
    images = find_architecture("qwen2_5_vl")
    text = {**images.tiny["text_config"], "is_causal": False}
    for config in ({**images.tiny, "is_causal": False}, {**images.tiny, "text_config": text}):
        with pytest.raises(ConfigError, match="models with images or sounds do not support"):
            images.spec(HFConfig.load(config))
    with pytest.raises(ConfigError, match="layer 0 is more than attention with or without a window"):
        make_pair("mamba2", {"is_causal": False})
