"""Two GPUs that share the experts of a layer, through NCCL, compute as one."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

RANK = Path(__file__).with_name("experts_gpu_rank.py")


@pytest.mark.gpu
def test_two_gpus_that_exchange_rows_while_products_run_are_as_exact_as_one(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for cases in run_ranks(RANK, tmp_path, backend="nccl"):
        for case, found in cases.items():
            assert found["same bits"], case
            for name, (distance, alone) in found["distances"].items():
                # Each rank's part of a sum over experts is rounded once more.
                assert distance <= 1.5 * alone, f"{case} {name}: {distance:.1e}, alone {alone:.1e}"
