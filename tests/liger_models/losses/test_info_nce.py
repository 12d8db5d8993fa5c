"""InfoNCE is the cross entropy of scaled cosines, with its gradients, over ranks too."""

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from randomised import randomise
from ranks import run_ranks

import liger_models
from liger_models.architectures import find_architecture
from liger_models.kernels import linear_cross_entropy
from liger_models.losses import info_nce_loss

RANK = Path(__file__).with_name("info_nce_rank.py")


def formula(queries, positives, negatives=None, temperature=0.05):
    passages = positives if negatives is None else torch.cat([positives, negatives.flatten(0, -2)])
    cosines = F.normalize(queries, dim=-1) @ F.normalize(passages, dim=-1).T
    return F.cross_entropy(cosines / temperature, torch.arange(len(queries)))


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("shapes", [[(5, 7)] * 2, [(5, 7), (5, 7), (5, 3, 7)], [(1, 7), (1, 7), (2, 7)]])
def test_loss_and_gradients_are_those_of_the_formula(shapes, assert_same):
    given = leaves(*shapes)
    assert_same(info_nce_loss(*given, temperature=0.2), formula(*given, temperature=0.2), *given)


def test_the_matrix_of_similarities_never_exists(assert_same, monkeypatch):
    """With the least chunks, of 1,024 queries."""
    module = sys.modules[info_nce_loss.__module__]
    monkeypatch.setattr(
        module, "linear_cross_entropy", functools.partial(linear_cross_entropy, chunk_bytes=1)
    )
    given = leaves((3000, 2), (3000, 2))
    with LiveBytes(given) as live:
        found = info_nce_loss(*given)
    assert live.peak < 3000 * 3000 * 4
    assert_same(found, formula(*given), *given)


def test_embeddings_of_16_bits_are_compared_in_float32():
    given = [x.detach().bfloat16().requires_grad_() for x in leaves((6, 8), (6, 8))]
    with torch.autocast("cpu", torch.bfloat16):
        loss = info_nce_loss(*given)
    loss.backward()
    assert loss.dtype == torch.float32
    # Sums of a few terms in float32.
    torch.testing.assert_close(loss, formula(*(x.float() for x in given)), rtol=1e-5, atol=1e-6)
    assert given[0].grad.dtype == torch.bfloat16


def test_what_does_not_fit_is_refused():
    queries, positives = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"\[3, 4\], \[2, 4\]; expected queries and positives"):
        info_nce_loss(queries, positives)
    with pytest.raises(ValueError, match="negatives"):
        info_nce_loss(queries, queries, torch.randn(3, 5))
    with pytest.raises(ValueError, match="temperature is 0"):
        info_nce_loss(queries, queries, temperature=0)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_sharded_ranks_of_uneven_parts_have_the_gradient_of_the_whole_step(tmp_path):
    """Ranks have one query and two, and see each other's passages. In float64, since sums are in another
    order.
    """
    torch.manual_seed(0)
    tiny = {**find_architecture("qwen3").tiny, "num_hidden_layers": 1, "architectures": ["Qwen3Model"]}
    model = randomise(liger_models.from_config(tiny, device="cpu"))
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(0, model.spec.vocab_size, (9, 6))
    torch.save([ids[[0, 3, 6]].split(1), ids[[1, 2, 4, 5, 7, 8]].split(2)], tmp_path / "batch.pt")
    found = run_ranks(RANK, tmp_path)

    model = liger_models.from_hub(tmp_path / "model", device="cpu", dtype=torch.float64)
    embeddings = model(ids, pooling="last").embeddings
    formula(*embeddings.split(3), temperature=0.3).backward()
    for results in found:
        for name, parameter in model.named_parameters():
            assert (results[name] - parameter.grad).norm() <= 1e-9 * parameter.grad.norm(), name
    before, after = (tmp_path / at / "model.safetensors" for at in ("model", "saved"))
    assert before.read_bytes() == after.read_bytes()
