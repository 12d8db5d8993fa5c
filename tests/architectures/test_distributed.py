"""Two ranks, each with half of a batch, train like one process with the whole: under DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

RANK = Path(__file__).with_name("data_parallel_rank.py")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize(
    ("wrapper", "level"), [("ddp", "lean"), ("fsdp", "lean"), ("fsdp", "mlp"), ("fsdp", "checkpoint")]
)
def test_two_ranks_equal_one_process(make_pair, tmp_path, failures, wrapper, level):
    # A tied weight has two uses, and its gradient must be averaged once, after both.
    pair = make_pair("llama", {"tie_word_embeddings": True})
    batch = pair.batch(rows=4)
    batch["labels"][2:, 8:] = -100  # the ranks have different numbers of labels
    expected = pair.run_ours(**batch)
    expected.logits = None
    torch.save({"config": pair.config, "state": pair.ours.state_dict(), "batch": batch}, tmp_path / "task.pt")
    results = run_ranks(RANK, tmp_path, wrapper, level)
    joint = sum(result["loss"] for result in results) / 2  # averaged, like the gradients of the ranks
    for result in results:
        by_name = {}
        for name, expression in pair.weight_map.items():
            by_name |= expression.write(result["gradients"][name])
        assert not failures(type(expected)(joint, None, by_name).distances(expected))
