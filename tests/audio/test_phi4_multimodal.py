"""Sounds of Phi-4-multimodal: clips in pieces, biases by distance, and projections next to images."""

from __future__ import annotations

import weakref

import pytest
import torch
from live_bytes import LiveBytes, as_on_a_gpu
from pairs import BOUND, beyond_bound, relative_distance
from scenes import make_pair

from liger_models.architectures.audio_encoders.phi4_multimodal import TINY
from liger_models.images.pieces import Image
from liger_models.images.sounds import Sound
from liger_models.layers.audio.conformer import ConformerEncoder
from liger_models.layers.audio.sounds import Sounds
from liger_models.layers.conformer.distance_attention import bias_by_distance
from liger_models.layers.recompute import activation_memory
from liger_models.layers.recompute.activation_memory import Kept


@pytest.fixture
def family() -> str:
    return "phi4_multimodal"


def test_clips_longer_than_a_piece_are_cut_as_in_the_reference(pair):
    """Frames of zeros fill up the last piece, and the reference attends to them."""
    spec, columns = pair.ours.spec.audio, [2100, 2000, 7]
    features = torch.randn(3, 2100, spec.bins)
    sounds = Sounds(spec, features, columns)
    assert (sounds.lengths, sounds.filling) == ([500, 500, 500, 2], [475, 0, 0])
    with torch.no_grad():
        found = pair.ours.audio.encoder(sounds).split(sounds.frames)
        encoder = pair.reference.model.embed_tokens_extend.audio_embed.encoder
        for clip, own, count in zip(features, found, columns, strict=True):
            assert relative_distance(own, encoder(clip[None, :count], None)[0]) <= BOUND


def test_packed_sounds_are_projected_by_their_documents_images(pair):
    """Each document's sounds as if it were alone: next to an image otherwise than without."""
    documents = [[2, Sound(19), 3], [1, Image(4, 6), 2, Sound(8), 4], [Sound(11), 5]]
    alone = [pair.scene(document) for document in documents]
    with torch.no_grad():
        expected = torch.cat([pair.reference(**call).logits[0] for call in alone])
        bounds = torch.tensor([0, *(call["input_ids"].shape[1] for call in alone)]).cumsum(0)
        found = pair.ours(**pair.pack(alone), cu_seqlens=bounds, return_logits=True).logits[0]
        assert relative_distance(found, expected) <= BOUND


def test_a_sound_of_an_answer_is_next_to_its_prompts_images(pair):
    """A document that continues another one is projected as the whole would be."""
    prompt, answer = pair.scene([1, Image(4, 6), 2]), pair.scene([Sound(8), 4])
    whole = pair.pack([prompt, answer])
    lengths = [call["input_ids"].shape[1] for call in (prompt, answer)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    with torch.no_grad():
        expected = pair.ours(**whole, return_logits=True).logits
        found = pair.ours(**whole, cu_seqlens=bounds, parents=[-1, 0], return_logits=True).logits
    assert relative_distance(found, expected) <= BOUND


def test_biases_are_those_of_clamped_distances():
    table = torch.randn(6, 2)  # distances from -3 to 2
    found = bias_by_distance(table, 5)
    for query in range(5):
        for key in range(5):
            row = table[max(-3, min(2, key - query)) + 3]
            assert torch.equal(found[:, query, key], row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("level", ["lean", "mlp"])
def test_a_layer_reports_the_bytes_it_keeps(level):
    def kept(layers: int) -> tuple[int, ConformerEncoder, int]:
        pair = make_pair("phi4_multimodal", {"audio_config": {**TINY, "num_blocks": layers}})
        encoder = pair.ours.audio.encoder
        encoder.set_activation_memory(level)
        saved = weakref.WeakSet()

        class Noted(Kept):
            def __init__(self, tensor):
                super().__init__(tensor)
                saved.add(self)

        sounds = Sounds(pair.ours.spec.audio, torch.randn(1, 128, 7), [128])
        with as_on_a_gpu(), LiveBytes(zero=True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(activation_memory, "Kept", Noted)
            out = encoder(sounds)
        assert out.requires_grad
        parameters = {tensor.data_ptr() for tensor in encoder.parameters()}
        storages = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage().nbytes() for k in saved}
        found = sum(size for place, size in storages.items() if place not in parameters)
        return found, encoder, sounds.frames[0]

    (one, encoder, frames), (two, *_) = kept(1), kept(2)
    assert two - one == frames * encoder.layers[0].activation_bytes(level, 4)


def test_a_batch_with_sounds_next_to_images_and_alone_trains_both_projections(pair):
    call = pair.scene([1, Image(5, 6), 2, Sound(8), 4], [Sound(11), 5])
    found, expected = pair.run_ours(**call), pair.run_reference(**call)
    for way in ("up_proj_for_speech", "up_proj_for_vision_speech"):
        assert any(way in name for name in found.gradients)
    assert not beyond_bound(found.distances(expected, call["attention_mask"].bool()))


def test_adapters_of_images_and_sounds_load_next_to_the_weights(pair, both, tmp_path):
    """As in the published repository, two folders of adapters of the language model's packed projections."""
    peft = pytest.importorskip("peft")
    theirs, ours = (model.eval() for model in both)
    for name, rank in (("vision", 2), ("speech", 3)):
        targets = r".*model\.layers.*(qkv_proj|o_proj|gate_up_proj|down_proj)"
        config = peft.LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)
        theirs.add_adapter(config, name)
        theirs.set_adapter(name)
        theirs.save_pretrained(tmp_path / "adapters" / f"{name}-lora")
        ours.load_adapter(
            str(tmp_path / "adapters"), adapter_name=name, adapter_kwargs={"subfolder": f"{name}-lora"}
        )
    for name, document in (("vision", [1, Image(5, 6), 4]), ("speech", [Sound(11), 5])):
        call = pair.scene(document)
        without = pair.reference(**call).logits
        for model in (theirs, ours):
            model.set_adapter(name)
        with torch.no_grad():
            found, expected = ours(**call).logits, theirs(**call).logits
        assert relative_distance(found, expected) <= BOUND
        assert relative_distance(found, without) > 1e-2
