"""Processes that each hold a full model, as under DDP, save it together, separately, or only one does."""

import runpy
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

RANK = Path(__file__).with_name("replicas_rank.py")
RANKS = 3


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_replicas_save_one_checkpoint_without_racing(tmp_path):
    program = runpy.run_path(str(RANK))
    program["make_model"]().save_pretrained(tmp_path / "expected")
    expected = files_of(tmp_path / "expected")
    run_ranks(RANK, tmp_path, ranks=RANKS)
    folders = [*(tmp_path / "new").iterdir(), tmp_path / "again", tmp_path / "first"]
    for folder in [*folders, *(tmp_path / f"own{rank}" for rank in range(RANKS))]:
        assert files_of(folder) == expected
    assert len(folders) == program["ROUNDS"] + 2
    for parent in (tmp_path, tmp_path / "new"):
        assert not [path.name for path in parent.iterdir() if path.name.startswith(".")]
