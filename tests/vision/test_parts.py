"""Parts of a vision-language model are frozen by name."""

from __future__ import annotations

import pytest
from pairs import beyond_bound
from scenes import Image

OF_IMAGES = (
    *("visual", "vision", "projector", "aligner", "connector", "merger", "newline", "resampler"),
    *("image_embed", "view_separator"),
)


@pytest.mark.of_layers("tokens")
@pytest.mark.parametrize("part", ["vision", "projector", "language"])
def test_frozen_parts_do_not_train_and_the_rest_trains_as_before(part, pair):
    call = pair.scene([1, Image(4, 4), 3], [2, Image(4, 4), 2])
    whole = pair.run_ours(**call)
    pair.ours.freeze(part)
    still = pair.run_ours(**call)
    pair.ours.freeze()
    frozen = whole.gradients.keys() - still.gradients.keys()
    assert frozen
    assert still.gradients
    assert not beyond_bound(
        still.distances(
            type(whole)(
                whole.loss,
                whole.logits,
                {name: gradient for name, gradient in whole.gradients.items() if name not in frozen},
            )
        )
    )
    in_vision = {
        name for name in whole.gradients if any(part in name.replace("vision_moe", "") for part in OF_IMAGES)
    }
    assert frozen <= in_vision if part != "language" else not frozen & in_vision


@pytest.mark.of_layers("tokens")
def test_a_frozen_encoder_keeps_nothing(pair):
    pictures = pair.ours.vision.take(pair.scene([1, Image(4, 4), 3])).pictures
    given = []
    hook = pair.ours.vision.encoder.register_forward_hook(lambda module, args, output: given.extend(output))
    pair.ours.freeze("vision")
    features = pair.ours.vision(pictures)
    pair.ours.freeze()
    hook.remove()
    assert not any(x.requires_grad for x in given)
    assert all(x.requires_grad for x in features)


@pytest.mark.parametrize("family", ["qwen2_vl"])
def test_the_error_names_a_missing_part(pair):
    with pytest.raises(ValueError, match=r"'audio'.*language, vision, projector"):
        pair.ours.freeze("audio")
