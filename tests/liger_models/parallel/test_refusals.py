"""A batch that one process refuses raises an error in all processes, so that none waits for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

RANK = Path(__file__).with_name("refusals_rank.py")
ERRORS = {
    "an id": "outside the vocabulary",
    "a label": "outside the vocabulary",
    "no label": "no token of the batch has a label",
    "a shape": "of the shape of the tokens",
    "a mask": "attention_mask must",
    "positions": "position_ids must have the shape of the tokens",
    "no batch": r"of shape [batch, seq]",
}


@pytest.mark.parametrize("kind", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_batch_that_one_process_refuses_is_refused_by_all(kind, tmp_path):
    if kind == "transformers":
        pytest.importorskip("transformers")
    others, refusing = run_ranks(RANK, tmp_path, kind, seconds=120)
    for wrapper in ("ddp", "fsdp"):
        for fault, message in ERRORS.items():
            assert message in refusing[wrapper, fault], (wrapper, fault)
            assert "another process refused its batch" in others[wrapper, fault], (wrapper, fault)
        assert refusing[wrapper, "nothing"] == others[wrapper, "nothing"] == ""
