"""Ranks that share a base in its quantised bits compute what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")

from kept_rank import ROWS, adapted, load, step
from published import CASES
from ranks import run_ranks
from torch.torch_version import TorchVersion

from liger_models.convert.errors import UnsupportedModelError
from liger_models.parallel import parallelize

RANK = Path(__file__).with_name("kept_rank.py")
NAMES = ["float8 blocks, experts one by one", "mxfp4", "nf4, nested, experts"]


def test_a_torch_that_shards_no_bits_is_refused(tmp_path, monkeypatch):
    CASES["nf4, nested, experts"](tmp_path)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    with pytest.raises(UnsupportedModelError, match=r"uint8.*FSDP2 of torch 2\.11\.0.*install torch 2\.12"):
        load(tmp_path, shard=parallelize)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 of torch before 2.12 cannot shard integers")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_take_the_step_of_one_process(tmp_path):
    for name in NAMES:
        CASES[name](tmp_path / name / "source")
    found = run_ranks(RANK, tmp_path, ranks=2)
    for way in found[0]:
        name = next(name for name in NAMES if way.startswith(name))
        how = way.removeprefix(f"{name}, ")
        one = load(tmp_path / name / "source")
        one = adapted(one) if how.startswith("adapters") else one
        loss, grads = step(one, ROWS)
        # Sums in another order; or products in bfloat16.
        tolerance = 2**-4 if how == "policy" else 1e-4
        of_ranks = [rank[way] for rank in found]
        assert sum(x[2] for x in of_ranks) / 2 == pytest.approx(loss, rel=tolerance), way
        assert of_ranks[0][3].keys() == grads.keys(), way
        for parameter, grad in grads.items():
            actual = torch.tensor(of_ranks[0][3][parameter]).view(grad.shape)
            scale = grad.abs().max().clamp_min(1e-6)
            torch.testing.assert_close(actual / scale, grad / scale, rtol=tolerance, atol=tolerance)
        if how in ("rows", "policy", "parallelize"):  # each reads its part
            whole = sum(p.nbytes for p in one.parameters())
            assert max(x[1] for x in of_ranks) < 0.6 * whole, way
            read = sum(p.stat().st_size for p in (tmp_path / name / "source").glob("*.safetensors"))
            assert max(x[0] for x in of_ranks) < 0.7 * read, way
