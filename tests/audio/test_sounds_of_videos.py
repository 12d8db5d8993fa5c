"""Videos whose tokens alternate with those of their own sound (`use_audio_in_video`), in the thinkers of
Qwen2.5-Omni and Qwen3-Omni.
"""

from __future__ import annotations

import pytest
import scenes
import torch
from pairs import beyond_bound

from liger_models.convert.errors import DataError
from liger_models.generating.generation import generate
from liger_models.images.pieces import Image, Video
from liger_models.images.sounds import Sound

SECONDS_PER_CHUNK = 2
ENDS = [14, 15]  # the tokens after a sound and after a video
DOCUMENTS = [
    [2, Video(3, 4, 6, 2.0), Sound(24), 3, Sound(9), 1, Image(4, 6), 2],  # the sound lasts longer
    [4, Video(4, 4, 4, 3.0), Sound(8), 2, Video(2, 2, 2, 1.0), Sound(31), 3],  # the first video does
]


@pytest.fixture(params=["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def family(request) -> str:
    return request.param


@pytest.fixture
def pair(family, pairs_made):
    """The family's tiny config, with room for more positions."""
    name = f"{family}, longer"
    if name not in pairs_made:
        pairs_made[name] = scenes.make_pair(family, {"text_config": {"max_position_embeddings": 512}})
    torch.manual_seed(0)
    return pairs_made[name]


def chunks(times: list[int], size: int) -> list[int]:
    """The chunk of each token: a token after the end of its predecessor's begins the next one."""
    numbers, number = [], 0
    for time in times:
        number += time >= (number + 1) * size
        numbers.append(number)
    return numbers


def alternating(pair, videos: list[int], sounds: int, rate: float, seconds: float) -> list[int]:
    """The placeholders of a video whose tokens are at the time steps `videos`, and of so many of a sound, in
    the order of the family's processor: by chunks of two seconds, or by time.
    """
    video, sound = pair.vision.video_id, pair.ours.spec.audio.audio_id
    times = [int(step * seconds * rate) for step in videos]
    if pair.vision.positions.shared_frame:
        size = int(rate * SECONDS_PER_CHUNK)
        orders = chunks(times, size), chunks([*range(sounds)], size)
    else:
        orders = times, [*range(sounds)]
    both = [(place, kind) for kind, places in enumerate(orders) for place in places]
    return [(video, sound)[kind] for _, kind in sorted(both)]


def joined(pair, *documents, padding="right"):
    """The call in which a sound directly after a video is the video's own: only tokens move."""
    call = pair.scene(*documents, padding=padding)
    video, sound = pair.vision.video_id, pair.ours.spec.audio.audio_id
    rate = pair.config["position_id_per_seconds"]
    starts = [pair.config["vision_start_token_id"], pair.config["audio_start_token_id"]]
    number = 0
    for row in call["input_ids"]:
        ids, place = row.tolist(), 0
        while place + 1 < len(ids):
            place += 1
            if (ids[place - 1], ids[place]) != (starts[0], video):
                continue
            steps, height, width = call["video_grid_thw"][number].tolist()
            each = height * width // 4
            videos = [step for step in range(steps) for _ in range(each)]
            first_sound = place + len(videos) + 2  # after the video's end and the sound's start
            if ids[first_sound - 1] != starts[1]:  # a silent video
                number += 1
                continue
            sounds = 0
            while ids[first_sound + sounds] == sound:
                sounds += 1
            seconds = call["video_second_per_grid"][number].item()
            tokens = alternating(pair, videos, sounds, rate, seconds)
            row[place - 1 : first_sound + sounds + 1] = torch.tensor([*starts, *tokens, *ENDS])
            number += 1
    call["labels"] = call["input_ids"].where(call["labels"] != -100, -100)
    return call


def test_logits_loss_and_gradients_match_the_reference(pair):
    call = joined(pair, *DOCUMENTS)
    runs = (pair.run_ours, pair.run_reference)
    found, expected = (run(**call, use_audio_in_video=True) for run in runs)
    assert not beyond_bound(found.distances(expected, call["attention_mask"].bool()))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_positions_equal_the_references(padding, pair, both):
    theirs, ours = both
    call = joined(pair, *DOCUMENTS, padding=padding)
    mask = call["feature_attention_mask"].sum(1)
    given = {name: call[name] for name in ("input_ids", "image_grid_thw", "video_grid_thw", "attention_mask")}
    given |= {"second_per_grids": call["video_second_per_grid"], "use_audio_in_video": True}
    (expected, deltas), (found, own) = (
        theirs.get_rope_index(**given, audio_seqlens=mask),
        ours.get_rope_index(**given),
    )
    shown = call["attention_mask"].bool()
    assert torch.equal(found[:, shown], expected[:, shown].long())
    assert torch.equal(own, deltas.long())


@pytest.mark.gpu
def test_positions_on_a_gpu_are_those_on_a_cpu(pair, both):
    _, ours = both
    call = joined(pair, *DOCUMENTS)
    given = {name: call[name] for name in ("input_ids", "image_grid_thw", "video_grid_thw", "attention_mask")}
    given |= {"second_per_grids": call["video_second_per_grid"]}
    expected = ours.get_rope_index(**given)
    found = ours.cuda().get_rope_index(**{name: x.cuda() for name, x in given.items()})
    assert all(torch.equal(own.cpu(), other) for own, other in zip(found, expected, strict=True))


def test_packed_documents_equal_separate_documents(pair):
    """Also next to a silent video."""
    alone = [joined(pair, document) for document in [*DOCUMENTS, [3, Video(2, 4, 4, 1.0), 2, Sound(8), 1]]]
    with torch.no_grad():
        logits = [pair.ours(**call, return_logits=True).logits[0] for call in alone]
        bounds = torch.tensor([0, *(len(x) for x in logits)]).cumsum(0)
        packed = pair.ours(**pair.pack(alone), cu_seqlens=bounds, return_logits=True).logits[0]
    torch.testing.assert_close(packed, torch.cat(logits), rtol=1e-4, atol=1e-4)


def test_generated_tokens_equal_the_references(pair):
    call = joined(pair, *DOCUMENTS, padding="left")
    del call["labels"]
    options = {"do_sample": False, "pad_token_id": 9, "eos_token_id": None, "use_audio_in_video": True}
    reference = pair.reference.eval()
    expected = reference.generate(**call, max_new_tokens=5, **options)
    reference.train()
    assert torch.equal(generate(pair.ours, **call, max_new_tokens=5), expected)


def test_a_sound_between_a_videos_tokens_needs_both_tokens_before_them(pair):
    call = joined(pair, *DOCUMENTS)
    starts = call["input_ids"] == pair.config["audio_start_token_id"]
    call["input_ids"] = call["input_ids"].masked_fill(starts, 12)
    with pytest.raises(DataError, match="alternate, but not after the tokens that begin a video and a sound"):
        pair.ours(**call)
