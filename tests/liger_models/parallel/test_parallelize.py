"""`parallelize`: two processes hold half of a model each, and make the gradients of the whole."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture

RANK = Path(__file__).with_name("parallelize_rank.py")
program = runpy.run_path(str(RANK))

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny checkpoints, and what two ranks made of them."""
    folder = tmp_path_factory.mktemp("parallelize")
    for family in program["CASES"]:
        torch.manual_seed(0)
        model = liger_models.from_config({**find_architecture(family).tiny, "vocab_size": 133})  # uneven
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.3)
        model.save_pretrained(folder / family, max_shard_size="50KB")
    environment = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(folder)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        complaints = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], complaints
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", program["CASES"])
def test_two_ranks_read_their_rows_and_make_the_gradients_of_one(family, folder):
    results = [torch.load(folder / f"rank{rank}.pt")[family] for rank in range(2)]
    total = sum(path.stat().st_size for path in (folder / family).glob("*.safetensors"))
    copies = 2 if family == "qwen3_moe" else 1  # replicas
    for result in results:
        assert result["read"] == result["held"]
        assert 0.4 * copies * total < result["read"] < 0.6 * copies * total

    model = liger_models.from_hub(folder / family)
    ids = program["batch"](model.spec.vocab_size)
    for row in ids.split(1):  # as the ranks do: an auxiliary loss is not linear in its batch
        model(row, labels=row, num_items_in_batch=ids.numel()).loss.backward()
    for name, p in model.named_parameters():
        for result in results:
            # The same products on the same numbers; what differs is the order of four rows' sum in float32.
            torch.testing.assert_close(
                result["gradients"][name],
                p.grad,
                rtol=1e-5,
                atol=2**-20 * p.grad.abs().max().item(),
                msg=name,
            )
