"""Answers that share their prompt have the loss and the gradients of the reference, which is given each with
its prompt as a sequence of its own.
"""

from __future__ import annotations

import torch
from pairs import Run

from liger_models.losses import shared_prompts

# Prompts of as many tokens, and their answers': windows and chunks of the tiny configs end in prompts, where
# answers begin, and in answers.
ITEMS = ((11, (6, 3, 9)), (1, (4, 2)), (2, (17,)))


def items_of(vocab_size):
    def ids(count):
        return torch.randint(0, vocab_size, (count,)).tolist()

    return [(ids(prompt), [ids(answer) for answer in answers]) for prompt, answers in ITEMS]


def test_a_prompt_that_is_computed_once_gives_what_its_answers_give_apart(pair, failures):
    items = items_of(pair.vocab_size)
    batch = shared_prompts(items)
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
