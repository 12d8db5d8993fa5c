"""What a training step allocates, counted on the meta device.

Every operation of torch runs on tensors without memory; live_bytes.py counts their storages.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from live_bytes import LiveBytes, as_on_a_gpu

from liger_models.layers.sequences.sequences import Sequences


def peak_of_a_step(model: Any, batch: int, seq: int, ranks: int = 1, labels: float = 1.0) -> int:
    """Bytes at the largest moment of a forward and a backward pass, without the model's parameters.

    Args:
        model: on the meta device.
        batch, seq: rows, and tokens in each.
        ranks: that divide each row.
        labels: the share of the tokens that have one.
    """
    memory = LiveBytes(
        [*model.parameters(), *model.buffers()], "meta", unit=512
    )  # as torch's allocator rounds
    with as_on_a_gpu("meta"), memory:
        ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
        sequences = Sequences.from_call((batch, seq), ids.device)
        if ranks > 1:
            sequences = sequences.divided(_FirstOf(ranks))
        hidden = model.hidden_states(sequences, ids)
        targets = torch.empty(len(hidden), dtype=torch.long, device="meta")
        valid = min(math.ceil(labels * len(hidden)), len(hidden) - batch)  # the last token of a row has none
        loss = model.lm_head(hidden, targets, num_valid=valid, form=model.logit_form)
        del hidden
        loss.backward()
    return memory.peak


class _FirstOf:
    """A group of ranks whose rank 0 is this process."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0
