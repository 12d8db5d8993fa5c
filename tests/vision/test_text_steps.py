"""A step without images and sounds in any process changes no parameter of their parts, as in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import run_ranks
from scenes import Image

from liger_models.images.sounds import Sound

RANK = Path(__file__).with_name("text_steps_rank.py")
# Features among the tokens, in cross-attention, and of sounds, too; by day the first alone.
FAMILIES = ("gemma3", "mllama", "gemma4_unified")
# Unlike AdamW, SGD does not amplify rounding; with it, a gradient of zero would still move parameters.
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}


def steps_of(pair):
    """Steps: (micro-batches, each with a call for each rank; labels of the step)."""
    words = [iter(range(5, 40)) for _ in range(2)]

    def text(rank):
        return pair.scene([next(words[rank])])

    def image(rank):
        heard = [] if pair.ours.spec.audio is None else [Sound(19)]
        return pair.scene([1, Image(4, 4), 3, *heard, Image(6, 4), next(words[rank])])

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


def test_text_only_steps_do_not_change_the_vision_part(make_pair, tmp_path, request):
    """After five accumulated steps under DDP and FSDP2, parameters equal those of one process with all rows.

    With gradients of zero instead of none, weight decay and momentum would change them.
    """
    task, expected = {}, {}
    families = FAMILIES if request.config.getoption("--all-families") else FAMILIES[:1]
    for family in families:
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
    for family in families:
        before = task[family][1]
        for wrapper in ("ddp", "fsdp", "gathered once"):
            for rank in (0, 1):
                for name, parameter in expected[family].items():
                    moved = (parameter - before[name]).norm()
                    distance = (found[rank][family, wrapper][name] - parameter).norm()
                    # Float32 sums in another order, through five steps; weight decay alone would change 5e-3.
                    assert distance <= 1e-4 * max(moved, 1e-2 * parameter.norm()), (family, wrapper, name)
