"""Every vision-language family matches its reference in transformers.

Logits, loss and the gradient of every parameter of encoder, projector and language model are compared, under
the checkpoint's names.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairs import beyond_bound
from scenes import DOCUMENTS, Image, Video

from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import DataError
from liger_models.images.scenes import Scenes
from liger_models.layers.parts.embedder import embeds_ids
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.specs import SquarePictures
from liger_models.layers.vision.packing import VisionConversation, pack_conversations


def compare(pair, call, positions=None):
    ours = pair.run_ours(**call)
    expected = pair.run_reference(**call)
    return beyond_bound(ours.distances(expected, positions))


@pytest.mark.parametrize("padding", [pytest.param("right", marks=pytest.mark.of_layers("tokens")), "left"])
def test_a_batch_may_mix_images_of_several_sizes_videos_and_text(pair, padding):
    call = pair.scene(*DOCUMENTS.values(), padding=padding)
    assert not compare(pair, call, call["attention_mask"].bool())


@pytest.mark.of_layers("tokens")
def test_rows_without_padding_match_the_reference(pair):
    assert not compare(pair, pair.batch())


@pytest.mark.of_layers("tokens")
def test_text_only_batches_train_the_language_model_only(pair):
    call = pair.scene([21], [21])
    ours = pair.run_ours(**call)
    assert not beyond_bound(ours.distances(pair.run_reference(**call)))
    own = "embed_vision" if embeds_ids(pair.ours.vision) else "no other"  # a vocabulary, which text may have
    assert not any("vis" in name and own not in name for name in ours.gradients)


@pytest.mark.of_layers("tokens")
def test_packed_documents_equal_separate_documents(pair):
    """Each document has its own positions and images, in one row, and in rows that end within a document."""
    documents = list(DOCUMENTS.values())
    alone, results = [pair.scene(document) for document in documents], []
    labels = sum(int((call["labels"][:, 1:] != -100).sum()) for call in alone)
    pair.ours.zero_grad()
    for call in alone:
        output = pair.ours(**call, num_items_in_batch=labels, return_logits=True)
        output.loss.backward()
        results.append(output.logits[0].detach())
    expected = pair.gradients_of_ours()
    lengths = torch.tensor([0, *(call["input_ids"].shape[1] for call in alone)])
    output = pair.run_ours(**pair.pack(alone), cu_seqlens=lengths.cumsum(0))
    assert output.logits is not None
    torch.testing.assert_close(output.logits[0], torch.cat(results), rtol=1e-4, atol=1e-4)
    for name, gradient in expected.items():
        assert (output.gradients[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1.0), name


@pytest.mark.of_layers("tokens")
@pytest.mark.parametrize("more", [0, 3], ids=["a whole prompt", "the first tokens of a document"])
def test_a_prompt_with_images_is_computed_once_for_its_answers(pair, more):
    """Compare with each answer and its prompt as a separate document; `more` follows the prompt."""
    if getattr(pair.vision, "spans", None) == "prefix":
        call = pair.scene([Image(4, 4), 6])
        ends = torch.tensor([0, 5, call["input_ids"].shape[1]])
        with pytest.raises(DataError, match="all tokens of a prompt attend to one another"):
            pair.ours(**call, cu_seqlens=ends, parents=[-1, 0])
        return
    alone, shared, parents, continued = [], [], [], []
    for document in (*DOCUMENTS.values(), [2, Image(4, 6), 30]):
        call = pair.scene(document)
        prompt = call["input_ids"][0]
        images = pair.images(call)
        parents += [-1, len(parents), len(parents)]
        continued += [0, len(prompt), len(prompt)]

        def after_prompt(length, prompt=prompt, images=images):
            """Tokens, their cross-attention masks, and the masks of prompt and tokens together."""
            tokens, mask = torch.randint(10, 40, (length,)), {}
            if (seen := images.get("cross_attention_mask")) is not None:  # the last attend to all images
                mask["cross_attention_mask"] = seen[:, -1:].expand(-1, length, -1, -1)
            return tokens, mask, {name: torch.cat([images[name], x], 1) for name, x in mask.items()}

        tokens, _, both = after_prompt(more)
        nothing = torch.zeros(len(prompt) + more).bool()
        shared.append(VisionConversation(torch.cat([prompt, tokens]), nothing, images | both))
        for length in (7, 4):
            answer, mask, both = after_prompt(length)
            learned = torch.arange(length) > 0
            shared.append(VisionConversation(answer, learned, mask))
            learned = torch.cat([nothing[: len(prompt)], learned])
            alone.append(VisionConversation(torch.cat([prompt, answer]), learned, images | both))

    def run(documents, parents=None):
        ids = torch.cat([document.ids for document in documents])
        labels = ids.where(torch.cat([document.learned for document in documents]), -100)[None]
        bounds = torch.tensor([0, *(len(document.ids) for document in documents)]).cumsum(0)
        call = pack_conversations(pair.vision, documents, parents)
        if parents is not None:
            call["parents"] = torch.tensor([parents, continued] if more else parents)
        return pair.run_ours(input_ids=ids[None], labels=labels, cu_seqlens=bounds, **call)

    if pair.needs_whole_documents:
        refusal = (
            r"attends to \d chosen (keys|pools of 3 keys), which doc|n-grams, which documents that continue"
        )
        with pytest.raises(DataError, match=refusal):
            run(shared, parents)
        return
    found, expected = run(shared, parents), run(alone)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert (found.gradients[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1.0), name


@pytest.mark.of_layers
def test_every_level_of_activation_memory_gives_the_same_gradients(pair):
    call = pair.scene(*DOCUMENTS.values())
    expected = pair.run_ours(**call)
    for level in LEVELS:
        if level == "lean":  # as before
            continue
        pair.ours.set_activation_memory(level)
        again = pair.run_ours(**call)
        assert not beyond_bound(again.distances(expected)), level
    pair.ours.set_activation_memory("lean")


@pytest.mark.of_layers("tokens")
@pytest.mark.parametrize(
    "family", [f for f in list_architectures(vision=True) if "video_token_id" in find_architecture(f).tiny]
)
def test_a_long_video_with_slow_frames_matches_the_reference(family, pair):
    """Its positions run ahead of the number of its tokens."""
    assert not compare(pair, pair.scene([2, Video(5, 2, 2, 4.4), 3]))


@pytest.mark.parametrize("side", [6, 8, 19])
def test_square_images_of_another_size_get_interpolated_positions(side, make_pair):
    """13 pixels make 4 times 4 patches, with pixels left over; images are smaller and larger than trained."""
    pair = make_pair("internvl")
    vision = replace(pair.vision, pictures=SquarePictures(side))
    scenes = Scenes(replace(pair.ours.spec, vision=vision), pair.config)
    assert not compare(pair, scenes.make_even([[1, Image(4, 4), 9], [Image(4, 4), 3, Image(4, 4), 2]]))
