"""Scores of two answers to a prompt with images, as `train` reads them from a corpus.

In every vision-language family they equal the scores of separate sequences, with the prompt computed once or
twice.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import save
from scenes import Image

from liger_models.layers.vision.packing import VisionConversation, pack_conversations
from liger_models.training.data import groups
from liger_models.training.data.corpora.corpus import Corpus
from liger_models.training.data.corpora.writing import written_corpus
from liger_models.training.data.documents import Part
from liger_models.training.data.packing import Piece
from liger_models.training.data.pictured import join_images
from liger_models.training.data.reading.schema import LABELLED, PAIRS
from liger_models.training.objectives.objective import score_rows

PROMPTS = ([2, Image(4, 6), 3, Image(4, 4), 25], [14], [Image(2, 4), 9])
LENGTHS = (4, 7)


def sequences_of(pair):
    """The two sequences of each prompt, and a pair whose second answer contains an image."""
    found = []
    for prompt in PROMPTS:
        call = pair.scene(prompt)
        ids = call["input_ids"][0]
        images = pair.images(call)
        two = []
        for length in LENGTHS:
            learned = torch.arange(len(ids) + length) >= len(ids)
            own = dict(images)
            if (image_mask := images.get("cross_attention_mask")) is not None:
                answer_mask = image_mask[:, -1:].expand(-1, length, -1, -1)
                own["cross_attention_mask"] = torch.cat([image_mask, answer_mask], 1)
            two.append(VisionConversation(torch.cat([ids, torch.randint(10, 40, (length,))]), learned, own))
        found.append(two)
    answer = pair.scene([3, Image(4, 4), 6])
    ids = answer["input_ids"][0]
    learned = torch.arange(len(ids)) >= len(ids) - 3
    images = pair.images(answer)
    found.append(
        [VisionConversation(torch.cat([ids[:3], torch.randint(10, 40, (3,))]), torch.arange(6) >= 3, {})]
    )
    found[-1].append(VisionConversation(ids, learned, images))
    return found


def written(folder, found, form):
    """Write a corpus of these groups; return it, and a row with all of them."""
    with written_corpus(folder, 200, 1 << 20, form) as writer:
        for two in found:
            for one in two:
                writer.extend(one.ids.tolist(), bytes(one.learned.tolist()))
            images = save(join_images([one.images for one in two])) if any(one.images for one in two) else b""
            writer.end(True, images, (len(two[0].ids), 1))
    corpus = Corpus(folder)
    return corpus, [Piece(*bounds) for bounds in itertools.pairwise(corpus.starts.tolist())]


def alone(pair, one):
    """Score of a sequence in a separate call."""
    labels = one.ids.where(one.learned, -100)[None]
    images = pack_conversations(pair.vision, [one])
    return pair.ours.score(one.ids[None], labels=labels, **images).log_probs.sum()


@pytest.mark.of_layers("tokens")
@torch.no_grad()
def test_scores_equal_those_of_separate_sequences(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "SPARED", 0.0)
    found = sequences_of(pair)
    expected = torch.stack([alone(pair, two[side]) for side in (0, 1) for two in found])
    corpus, row = written(tmp_path / "pairs", found, PAIRS)
    for shares in (False, getattr(pair.vision, "spans", None) != "prefix" and not pair.needs_whole_documents):
        documents = groups.Groups([Part(corpus)], pair.vision)
        documents.shares = shares
        batch = documents.batch([row])
        prompts = [len(two[0].ids) - LENGTHS[0] for two in found[:3]]
        spared = sum(prompts) - 3 if shares else 0  # except for the last token of each
        assert batch.input_ids.numel() == corpus.starts[-1] - spared
        scores = score_rows(pair.ours, batch).log_probs.sum(1)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
        said = batch.following[0, : int(batch.cu_seqlens[4])] != -100
        assert shares or said.sum() == documents.count([row]).first_said
    image_ids = {pair.vision.image_id, getattr(pair.vision, "video_id", None)}
    assert not image_ids & set(batch.following[0].tolist())


@pytest.mark.of_layers("tokens")
@torch.no_grad()
def test_labelled_answers_are_split_into_separate_calls(pair, tmp_path):
    found = sequences_of(pair)
    corpus, row = written(tmp_path / "labelled", found, LABELLED)
    batch = groups.Groups([Part(corpus)], pair.vision).batch([row])
    for side, half in enumerate(batch.calls()):
        expected = torch.stack([alone(pair, two[side]) for two in found])
        scores = score_rows(pair.ours, half).log_probs.sum(1)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
