"""Memory that a training step allocates, counted on the meta device.

Every operation of torch runs on tensors without memory; live_bytes.py counts their storages.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from live_bytes import LiveBytes, as_on_a_gpu
from torch import Tensor

from liger_models.layers.model.mtp import MTPCall
from liger_models.layers.model.output import CausalLMOutput
from liger_models.layers.sequences.sequences import Sequences


def peak_of_a_step(
    model: Any, batch: int, seq: int, ranks: int = 1, labels: float = 1.0, rank: int = 0
) -> int:
    """Peak bytes of a forward and a backward pass, without the model's parameters.

    Args:
        model: on the meta device.
        batch, seq: rows, and tokens in each.
        ranks: that divide each row.
        labels: the share of the tokens that have one.
        rank: of these ranks, the one to count.
    """
    memory = LiveBytes(
        [*model.parameters(), *model.buffers()], "meta", unit=512
    )  # as torch's allocator rounds
    with as_on_a_gpu("meta"), memory:
        ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
        sequences = Sequences.from_call((batch, seq), ids.device)
        if ranks > 1:
            sequences = sequences.divided(_OneOf(ranks, rank))
        model.prepare_call(sequences, ids)
        tokens = len(sequences.pack(ids))
        targets = torch.empty(tokens, dtype=torch.long, device="meta")
        valid = min(math.ceil(labels * tokens), tokens - batch)  # the last token of a row has none
        further = None if model.mtp is None else _further(model, targets, sequences, valid)
        hidden = model.run_layers(sequences, ids, embedded=None if further is None else further.embedded)
        output = CausalLMOutput(
            loss=model.lm_head(hidden, targets, num_valid=valid, num_items=1, form=model.logit_form)
        )
        if further is not None:
            level = model.layers[-1].activation_memory
            further.add_to(output, model.lm_head, model.logit_form, hidden, level, 1)
        del hidden, further
        output["loss"].backward()
    return memory.peak


def _further(model: Any, targets: Tensor, sequences: Sequences, valid: int) -> MTPCall:
    """A call of the modules for multi-token prediction, whose counts cannot be read on the meta device."""
    call = MTPCall(0.1, model.mtp, targets, sequences, False)
    batch = sequences.documents.shape[0]
    call._counts = SimpleNamespace(tolist=lambda: [valid - batch * (k + 1) for k in range(len(model.mtp))])
    return call


class _OneOf:
    """A group of ranks, one of which is this process."""

    def __init__(self, ranks: int, own: int):
        self.ranks, self.own = ranks, own

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own
