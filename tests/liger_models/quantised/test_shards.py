"""Ranks read their rows of quantised weights, whose blocks lie across the cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import CASES
from ranks import run_ranks

import liger_models
from liger_models.convert.checkpoints.tensor_bytes import same_bits
from liger_models.convert.quantised.reader import ModelReader

RANK = Path(__file__).with_name("quantised_rank.py")
# Scales for blocks of rows, for the matrix, for each row, and in groups; experts stacked and one by one.
NAMES = [
    "float8 blocks",
    "float8 blocks, experts one by one",
    "float8 blocks, stacked experts",
    "float8, one scale a matrix",
    "fbgemm",
    "mxfp4",
    "int4, asymmetric",
    "nf4, nested",
    "nvfp4 of compressed-tensors",
]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*scales of activations")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_and_save_the_bytes_of_the_whole_model(ranks, tmp_path):
    for name in NAMES:
        CASES[name](tmp_path / name / "source")
        liger_models.from_hub(tmp_path / name / "source").save_pretrained(tmp_path / name / "whole")
    found = run_ranks(RANK, tmp_path, ranks=ranks)
    for name in NAMES:
        expected = files_of(tmp_path / name / "whole")
        assert files_of(tmp_path / name / "ranks") == expected, name
        quantised = ModelReader(tmp_path / name / "source"), ModelReader(tmp_path / name / "as_loaded")
        with quantised[0] as source, quantised[1] as kept:
            assert kept.stored.keys() == source.stored.keys()
            assert all(same_bits(kept.read_stored(part), source.read_stored(part)) for part in source.stored)
        if (tmp_path / name / "inner").exists():
            assert files_of(tmp_path / name / "inner") == expected, name
        read, held = (sum(counts[name][i] for counts in found) for i in range(2))
        assert read < held, name  # the codes are at most half of the dense bytes
    assert (tmp_path / "mxfp4" / "inner").exists()
