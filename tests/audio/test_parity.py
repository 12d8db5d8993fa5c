"""Every family with an audio encoder matches its reference in transformers.

Logits, loss and the gradient of every parameter of encoder, projector and language model are compared, under
the checkpoint's names.
"""

from __future__ import annotations

import pytest
import torch
from clips import DOCUMENTS, of_encoder, of_sounds
from pairs import BOUND, beyond_bound, relative_distance

from liger_models.convert.errors import DataError
from liger_models.generating.generation import generate
from liger_models.images.pieces import Image, Video
from liger_models.images.sounds import Sound
from liger_models.layers.audio.sounds import Sounds
from liger_models.layers.memory import NOTHING, Step, StepMemory, heard_of_length
from liger_models.layers.parts.embedder import embeds_ids
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.specs import CountedSounds


@pytest.mark.parametrize("padding", ["right", "left"])
def test_clips_of_several_lengths_match_the_reference(pair, padding):
    """Next to images and videos, too, where the family has these."""
    seen = [] if pair.vision is None else [[Sound(9), Image(4, 6), 3, Video(2, 4, 4), 2, Sound(19), 4]]
    call = pair.scene(*DOCUMENTS, *seen, padding=padding)
    found, expected = pair.run_ours(**call), pair.run_reference(**call)
    assert any(map(of_sounds, found.gradients))
    assert not beyond_bound(found.distances(expected, call["attention_mask"].bool()))


def test_text_alone_trains_the_language_model_only(pair):
    """And a vocabulary of sounds, which text may have, too."""
    call = pair.scene([21], [21])
    ours = pair.run_ours(**call)
    assert not beyond_bound(ours.distances(pair.run_reference(**call)))
    own = "embed_audio" if embeds_ids(pair.ours.audio) else "no other"
    assert not any(of_sounds(name) and own not in name for name in ours.gradients)


def test_packed_documents_equal_separate_documents(pair):
    alone = [pair.scene(document) for document in DOCUMENTS]
    labels = sum(int((call["labels"][:, 1:] != -100).sum()) for call in alone)
    pair.ours.zero_grad()
    logits = []
    for call in alone:
        output = pair.ours(**call, num_items_in_batch=labels, return_logits=True)
        output.loss.backward()
        logits.append(output.logits[0].detach())
    expected = pair.gradients_of_ours()
    bounds = torch.tensor([0, *(call["input_ids"].shape[1] for call in alone)]).cumsum(0)
    output = pair.run_ours(**pair.pack(alone), cu_seqlens=bounds)
    torch.testing.assert_close(output.logits[0], torch.cat(logits), rtol=1e-4, atol=1e-4)
    for name, gradient in expected.items():
        assert (output.gradients[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1.0), name


def test_short_clips_are_encoded_as_if_they_were_alone(pair):
    """Of several clips the reference pads short ones, which is exact for Whisper's convolutions alone."""
    spec = pair.ours.spec.audio
    if spec.channels is None or spec.sounds.filled:
        pytest.skip("convolutions over columns alone, or with the processor's padding")
    features, columns = torch.randn(3, spec.bins, 130), [93, 130, 3]
    with torch.no_grad():
        found = pair.ours.audio(Sounds(spec, features, columns))
        for clip, own, n in zip(
            features, found.split(Sounds(spec, features, columns).counts()), columns, strict=True
        ):
            alone = pair.reference.model.audio_tower(clip[:, :n], feature_lens=torch.tensor([n]))
            assert relative_distance(own, alone.last_hidden_state) <= BOUND


def test_every_level_of_activation_memory_gives_the_same_gradients(pair):
    call = pair.scene(*DOCUMENTS)
    expected = pair.run_ours(**call)
    for level in LEVELS:
        pair.ours.set_activation_memory(level)
        assert {layer.activation_memory for layer in pair.ours.audio.encoder.layers} <= {level}
        assert not beyond_bound(pair.run_ours(**call).distances(expected)), level
    pair.ours.set_activation_memory("lean")


def test_generated_tokens_equal_the_references(pair):
    call = pair.scene(*DOCUMENTS, padding="left")
    del call["labels"]
    reference = pair.reference.eval()
    options = {"do_sample": False, "pad_token_id": 9, "eos_token_id": None}
    expected = reference.generate(**call, max_new_tokens=6, **options)
    reference.train()
    found = generate(pair.ours, **call, max_new_tokens=6)
    # A generated placeholder without its sound continues from inputs that no processor would produce.
    before, ids = call["input_ids"].shape[1], torch.tensor([*pair.ours.spec.placeholders.values()])
    named = torch.isin(expected[:, before:], ids)
    known = named.cumsum(1) - named.int() == 0
    assert known.all(1).sum() >= 2
    assert torch.equal(found[:, before:][known], expected[:, before:][known])


def test_a_frozen_encoder_gets_no_gradients_and_the_projector_those_of_before(pair):
    call = pair.scene(*DOCUMENTS)
    whole = pair.run_ours(**call).gradients
    pair.ours.freeze("audio")
    part = pair.run_ours(**call).gradients
    pair.ours.freeze()
    encoded = any(True for _ in pair.ours.audio.encoder.parameters())
    frozen = whole.keys() - part.keys()
    assert any(map(of_encoder, frozen)) == encoded
    # A bias of keys moves all scores of a query alike: rounding only.
    assert not beyond_bound({name: relative_distance(part[name], whole[name], 1e-2) for name in part})


def bad(pair, message, **changes):
    call = {**pair.scene(*DOCUMENTS), **changes}
    with pytest.raises(DataError, match=message):
        pair.ours(**{name: value for name, value in call.items() if value is not None})


def test_sounds_that_do_not_fit_are_errors_that_say_what_was_found(pair):
    call = pair.scene(*DOCUMENTS)
    spec = pair.ours.spec.audio
    name, audio_id, mask = spec.sounds.features, spec.audio_id, spec.sounds.mask
    features = call[name]
    ids = call["input_ids"].where(call["input_ids"] != audio_id, 12)
    bad(pair, "has 0 tokens of sounds", input_ids=ids, mm_token_type_ids=None)
    counts = {spec.sounds.sizes: None} if isinstance(spec.sounds, CountedSounds) else {}
    bad(pair, f"{name} must be floating point of shape", **{name: features[:, :-1, :-1]})
    bad(pair, "make 0", **{name: None, mask: None, **counts})
    if "mm_token_type_ids" in call:
        bad(pair, r"3 where they are 7 \(sounds\)", mm_token_type_ids=0 * call["mm_token_type_ids"])
    elif pair.ours.spec.vision is not None and pair.ours.spec.vision.video_id is not None:
        with_video = pair.scene([2, Video(2, 4, 4), 3])
        assert with_video.pop("video_second_per_grid").tolist() == [1.0]
        bad(pair, "got videos without video_second_per_grid", **with_video)
    if not spec.sounds.masked:
        return
    given = call[mask]
    bad(pair, f"without {mask}", **{mask: None})
    if counts:
        bad(pair, f"without {spec.sounds.sizes}", **counts)
        bad(pair, r"audio_embed_sizes is \[1, 1, 1\], and", **{spec.sounds.sizes: torch.ones(3).long()})
    bad(pair, "ones and then zeros", **{mask: given.flip(1)})
    if getattr(spec.sounds, "filled", False):
        bad(pair, "columns; expected a multiple of 100", **{name: features[..., :-1], mask: given[:, :-1]})
    bad(pair, rf"{mask} must be \[3", **{mask: given[:2]})
    bad(pair, rf"{mask}\[0\] has no ones", **{mask: 0 * given})


def test_a_plan_counts_the_encoder(pair):
    """More and longer sounds take more, and a frozen encoder keeps less."""
    spec, found = pair.ours.spec.audio, {}
    for name, heard in {"none": NOTHING, "one": heard_of_length(spec, 1, 0.2)}.items():
        memory = StepMemory(pair.ours, Step(2, 64, heard=heard))
        found[name] = memory.plan(["all"] * len(memory.stages))
    assert len(found["one"].encoder_levels) == len(pair.ours.audio.encoder.layers)
    assert found["one"].peak > found["none"].peak
    pair.ours.freeze("audio")
    memory = StepMemory(pair.ours, Step(2, 64, heard=heard_of_length(spec, 1, 0.2)))
    assert memory.plan(["all"] * len(memory.stages)).peak < found["one"].peak
    pair.ours.freeze()
    counts = [heard_of_length(spec, n, 0.2).features for n in (1, 2)]
    assert counts[1] == 2 * counts[0] > 0
