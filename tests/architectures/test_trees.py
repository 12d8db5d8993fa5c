"""Answers that share their prompt have the loss and the gradients of the reference, which reads each answer
with its prompt as a separate sequence.
"""

from __future__ import annotations

import pytest
import torch
from pairs import Run

from liger_models.convert.errors import DataError
from liger_models.layers.specs import CompressedAttentionSpec, ConvolvedAttentionSpec
from liger_models.losses import shared_prompts

WITHOUT_TREES = CompressedAttentionSpec | ConvolvedAttentionSpec

# Lengths of prompts and of their answers: windows and chunks of the tiny configs end in prompts, at the start
# of answers, and in answers.
ITEMS = ((11, (6, 3, 9)), (1, (4, 2)), (2, (17,)))


def chooses_keys(pair):
    return any(getattr(block.mixer, "indexer", None) for block in pair.ours.spec.blocks)


def items_of(vocab_size):
    def ids(count):
        return torch.randint(0, vocab_size, (count,)).tolist()

    return [(ids(prompt), [ids(answer) for answer in answers]) for prompt, answers in ITEMS]


@pytest.mark.of_layers("tokens")
def test_answers_with_a_shared_prompt_equal_separate_sequences(family, make_pair, failures):
    pair = make_pair(family)
    if chooses_keys(pair):  # of longer documents than these
        longer = {"index_topk": 64, "index_topk_blocks": 64}
        pair = make_pair(family, {key: longer[key] for key in longer if key in pair.config})
    items = items_of(pair.vocab_size)
    batch = shared_prompts(items)
    mixers = [m for block in pair.ours.spec.blocks for m in block.mixers]
    refused = any(getattr(m, "slopes", None) or isinstance(m, WITHOUT_TREES) for m in mixers)
    if refused or any(block.ngrams for block in pair.ours.spec.blocks):
        with pytest.raises(DataError, match="without parents"):
            pair.ours.score(**batch)
        return
    pair.ours.zero_grad()
    scores = pair.ours.score(**batch)
    loss = -batch.rows(scores.log_probs).sum() / batch.counted.sum()
    loss.backward()
    found = Run(loss, None, pair.gradients_of_ours())

    apart = [(prompt, answer) for prompt, answers in items for answer in answers]
    ids = torch.tensor([[token for prompt, answer in apart for token in prompt + answer]])
    labels = torch.tensor([[label for prompt, answer in apart for label in [-100] * len(prompt) + answer]])
    lengths = [len(prompt) + len(answer) for prompt, answer in apart]
    expected = pair.run_reference_by_document(ids, labels, lengths)
    expected.logits = None
    assert not failures(found.distances(expected))


@pytest.mark.parametrize(
    ("family", "what"),
    [("deepseek_v32", "5 chosen keys"), ("minimax_m3_vl_text", "2 chosen blocks of 3 keys")],
)
def test_documents_in_which_keys_are_chosen_cannot_continue_others(family, what, make_pair):
    pair = make_pair(family)
    with pytest.raises(DataError, match=f"layer 0 attends to {what}"):
        pair.ours.score(**shared_prompts(items_of(pair.vocab_size)))
