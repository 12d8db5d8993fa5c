"""A step in which no process has an image changes nothing that reads images, as in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import run_ranks
from scenes import Image

RANK = Path(__file__).with_name("text_steps_rank.py")
FAMILIES = ("gemma3", "mllama")  # features among the tokens, and read by layers of the language model
# Unlike AdamW it makes no large step of a gradient's rounding; a gradient of zero moves parameters as well.
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}


def steps_of(pair):
    """[(micro-batches, each with the call of each rank; labels of the step)]"""
    words = [iter(range(5, 40)) for _ in range(2)]

    def text(rank):
        return pair.scene([next(words[rank])])

    def image(rank):
        return pair.scene([1, Image(4, 4), 3, Image(6, 4), next(words[rank])])

    steps = [
        [[image(0), text(1)]],
        [[text(0), text(1)]],
        [[image(0), text(1)], [text(0), text(1)]],
        [[text(0), text(1)], [text(0), image(1)]],
        [[text(0), text(1)], [text(0), text(1)]],
    ]
    return [
        (batches, sum(int((call["labels"][:, 1:] != -100).sum()) for calls in batches for call in calls))
        for batches in steps
    ]


def test_steps_of_text_leave_the_parts_that_read_images_as_they_are(make_pair, tmp_path):
    """After five steps under DDP and FSDP2, with accumulation, the parameters of one process with all rows.
    Gradients of zero would decay them, and move them by their momentum.
    """
    task, expected = {}, {}
    for family in FAMILIES:
        pair = make_pair(family)
        state = {name: value.clone() for name, value in pair.ours.state_dict().items()}
        task[family] = (pair.config, state, steps_of(pair), OPTIONS)
        optimizer = torch.optim.SGD(pair.ours.parameters(), **OPTIONS)
        pair.ours.train()
        for batches, labels in task[family][2]:
            optimizer.zero_grad()
            for call in (call for calls in batches for call in calls):
                pair.ours(**call, num_items_in_batch=labels).loss.backward()
            optimizer.step()
        expected[family] = {name: p.detach().clone() for name, p in pair.ours.named_parameters()}
        pair.ours.zero_grad()
        pair.ours.load_state_dict(state)
    torch.save(task, tmp_path / "task.pt")
    found = run_ranks(RANK, tmp_path)
    for family in FAMILIES:
        before = task[family][1]
        for wrapper in ("ddp", "fsdp", "gathered once"):
            for rank in (0, 1):
                for name, parameter in expected[family].items():
                    moved = (parameter - before[name]).norm()
                    distance = (found[rank][family, wrapper][name] - parameter).norm()
                    # Of float32 sums in another order, through five steps; a decay alone is 5e-3 of it.
                    assert distance <= 1e-4 * max(moved, 1e-2 * parameter.norm()), (family, wrapper, name)
