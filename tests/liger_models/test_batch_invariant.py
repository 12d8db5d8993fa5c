"""Log-probabilities with the same bits for a document alone, packed, and in another order."""

from __future__ import annotations

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.kernels.invariant import blocks
from liger_models.losses import shared_prompts

LENGTHS = (7, 19, 1, 5)
# Soft caps and windows; experts and sinks; latent attention; the scans of Mamba and Mamba 2.
FAMILIES = ("gemma2", "gpt_oss", "deepseek_v3", "jamba", "mamba2")


def make(family="llama", device="cpu", dtype=torch.float32, **options):
    model = liger_models.from_config(find_architecture(family).tiny, dtype=dtype, device=device, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + (0.5 if parameter.dim() == 1 else 0))
    return model.eval()


def documents(vocab_size, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, min(vocab_size, 90), (n,), generator=generator) for n in lengths]


def scores(model, docs, order, **options):
    """The log-probabilities and entropies of each document, packed in this order."""
    device = next(model.parameters()).device
    ids = torch.cat([docs[i] for i in order])[None].to(device)
    lengths = [len(docs[i]) for i in order]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.no_grad():
        found = model.score(ids, ids, cu_seqlens=bounds, entropy=True, **options)
    rows = torch.stack([found.log_probs[0], found.entropy[0]], 1)
    parts = torch.cat([rows, rows[:1]]).split(lengths)
    return {i: part[:-1] for i, part in zip(order, parts, strict=True)}


def check(model, docs):
    """Packed, in another order, in parts, and in rows with padding."""
    order = list(range(len(docs)))
    expected = scores(model, docs, order)
    others = [scores(model, docs, order[2:] + order[1::-1])]
    others += [scores(model, docs, part) for part in (order[:2], order[2:])]
    others += [scores(model, docs, [i]) for i in order if len(docs[i]) > 1]
    for other in others:
        for i, found in other.items():
            assert torch.equal(found, expected[i]), i
    ids = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(doc) for doc in docs], batch_first=True)
    with torch.no_grad():
        device = next(model.parameters()).device
        mask = mask.to(device)
        # With the entropy, as in `scores`: kernels for other results may have other tiles.
        padded = model.score(ids.to(device), ids.to(device), attention_mask=mask, entropy=True).log_probs
    for i, doc in enumerate(docs):
        assert torch.equal(padded[i, : len(doc) - 1], expected[i][:, 0]), i
    return expected


@pytest.fixture
def inexact(monkeypatch):
    """A matrix library whose rows depend on how many there are, as cuBLAS's do."""
    multiply = blocks._multiply

    def by_count(a, b, c, out, beta, alpha):
        return multiply(a, b, c, out, beta, alpha).mul_(1 + 2**-20 * (len(a) % 64))

    monkeypatch.setattr(blocks, "_multiply", by_count)
    blocks._sizes_of.cache_clear()
    yield
    blocks._sizes_of.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_a_document_have_the_same_bits_in_every_batch(family, inexact):
    model = make(family)
    docs = documents(model.spec.vocab_size)
    with liger_models.batch_invariant():
        found = check(model, docs)
    ordinary = scores(model, docs, range(len(docs)))
    for i, expected in ordinary.items():  # float32; the library above is off by up to 63 roundings a product
        torch.testing.assert_close(found[i], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", ["lean", "mlp", "checkpoint"])
def test_gradients_are_those_of_an_ordinary_step(level):
    model = make("qwen3_moe", activation_memory=level).train()
    docs = documents(model.spec.vocab_size)
    ids = torch.cat(docs)[None]
    bounds = torch.tensor([0, *map(len, docs)]).cumsum(0).int()

    def gradients(inside):
        model.zero_grad()
        with liger_models.batch_invariant() if inside else torch.enable_grad():
            loss = -model.score(ids, ids, cu_seqlens=bounds).log_probs.sum()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(False)
    for name, found in gradients(True).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_shared_prompts_are_refused():
    model = make()
    batch = shared_prompts([([5, 9, 2], [[7, 8, 1], [4, 1]])])
    with liger_models.batch_invariant(), pytest.raises(liger_models.DataError, match="shared prompts"):
        model.score(**batch)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, "llama", "mixtral", "qwen3_next", "granitemoehybrid"])
def test_log_probs_are_invariant_on_a_gpu(family):
    model = make(family, "cuda", torch.bfloat16)
    with liger_models.batch_invariant():
        check(model, documents(model.spec.vocab_size))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3-30b-a3b"])
def test_log_probs_are_invariant_at_real_widths(preset):
    from benchmarks.training.shapes import config_of

    model = liger_models.from_config(config_of(preset, 2), dtype=torch.bfloat16, device="cuda")
    with liger_models.batch_invariant():
        check(model, documents(1000, (700, 1, 129, 2048, 130, 4096, 333)))
