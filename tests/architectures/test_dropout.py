"""Dropout where configs ask for it: with the random numbers of the reference, results are the reference's."""

from __future__ import annotations

import pytest
import torch

from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec

KEYS = {
    "granite": ("attention_dropout",),
    "starcoder2": ("attention_dropout", "residual_dropout", "embedding_dropout"),
    "hunyuan_v1_dense": ("attention_dropout",),
    "phi": ("attention_dropout", "resid_pdrop", "embd_pdrop"),
    "seed_oss": ("attention_dropout", "residual_dropout"),
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "opt": ("attention_dropout", "dropout"),
    "openai-gpt": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_neox_japanese": ("attention_dropout", "hidden_dropout"),
}
LEVELS = ("all", "lean", "mlp", "checkpoint", "tiled", "offload")


def asked(family):
    """A different probability for each dropout, so that none can be mistaken for another."""
    return {key: 0.1 + 0.15 * i for i, key in enumerate(KEYS[family])}


def run(pair, run_model, **batch):
    torch.manual_seed(7)
    pair.ours.zero_grad()
    pair.reference.zero_grad()
    return run_model(**batch)


@pytest.fixture(params=KEYS)
def dropping(request, make_pair):
    pair = make_pair(request.param, asked(request.param))
    pair.ours.train(), pair.reference.train()
    return pair


def test_the_same_random_numbers_give_the_loss_and_gradients_of_the_reference(dropping, failures):
    batch = dropping.batch()
    found = run(dropping, dropping.run_ours, **batch)
    expected = run(dropping, dropping.run_reference, **batch)
    assert not failures(found.distances(expected))


def test_every_dropout_has_an_effect(make_pair, failures):
    for family, keys in KEYS.items():
        for key in keys:
            pair = make_pair(family, {key: 0.2})
            batch = pair.batch()
            without = pair.ours.eval()(**batch).loss
            torch.manual_seed(0)
            assert (pair.ours.train()(**batch).loss - without).abs() > 1e-3, (family, key)


@pytest.mark.parametrize("packed", [False, True])
def test_every_level_of_activation_memory_drops_the_same_elements(dropping, packed):
    batch = dropping.batch()
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 5, batch["input_ids"].numel()], dtype=torch.int32)
    results = []
    for level in LEVELS:
        dropping.ours.set_activation_memory(level)
        results.append(run(dropping, dropping.run_ours, **batch))
    first, *others = results
    for level, other in zip(LEVELS[1:], others, strict=True):
        assert torch.equal(first.loss, other.loss), level
        for name, gradient in first.gradients.items():
            distance = (gradient - other.gradients[name]).norm()
            # Tiles add their parts of a sum in another order; other elements would change it entirely.
            assert distance <= 1e-5 * gradient.norm() + 1e-9, (level, name)


def test_evaluation_drops_nothing(dropping):
    batch = dropping.batch()
    dropping.ours.eval()
    assert torch.equal(dropping.ours(**batch).loss, dropping.ours(**batch).loss)
    config = {**dropping.config, **dict.fromkeys(KEYS[dropping.architecture.model_type], 0.0)}
    without = type(dropping.ours)(dropping.architecture.spec(HFConfig.load(config)))
    without.load_state_dict(dropping.ours.state_dict())
    assert torch.equal(dropping.ours(**batch).loss, without(**batch).loss)


def test_dropout_of_zero_on_request_leaves_no_dropout(dropping):
    spec = dropping.architecture.spec(HFConfig.load(dropping.config, dropout=0.0))
    assert not spec.draws_in_training
    assert dropping.ours.spec.draws_in_training


def test_attention_without_a_kernel_for_dropout_is_refused(make_pair):
    pair = make_pair("granite", asked("granite"), attention="triton")
    pair.ours.train()
    with pytest.raises(ValueError, match="does not drop weights"):
        pair.ours(**pair.batch())
    pair.ours.eval()(**pair.batch())


@pytest.mark.parametrize("value", [1.0, -0.1, "0.1", True])
def test_a_dropout_that_is_no_probability_is_refused(make_pair, value):
    with pytest.raises(ConfigError, match="attention_dropout must be a number"):
        HFConfig.load({"model_type": "x", "attention_dropout": value}).take_dropout("attention_dropout")


def test_tools_that_disable_dropout_find_it(dropping):
    """TRL sets the probability of every nn.Dropout to 0 for DPO."""
    for module in dropping.ours.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = dropping.batch()
    assert torch.equal(dropping.ours(**batch).loss, dropping.ours.eval()(**batch).loss)


def test_weights_of_attention_keep_their_expectation():
    from liger_models.layers.attention.backends import attend
    from liger_models.layers.sequences.sequences import Sequences

    torch.manual_seed(0)
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    spec, draws = AttentionSpec(2, 2, 8, 8**-0.5, dropout=0.4), 2000
    for bounds in (None, torch.tensor([0, 5, 12], dtype=torch.int32)):
        sequences = Sequences.from_call((1, 12), q.device, cu_seqlens=bounds)
        outs = torch.stack([attend(q, k, v, spec, sequences) for _ in range(draws)])
        expected = attend(q, k, v, AttentionSpec(2, 2, 8, 8**-0.5), sequences)
        # Five standard errors of a mean, for each of 192 elements.
        assert ((outs.mean(0) - expected).abs() <= 5 * outs.std(0) / draws**0.5 + 1e-6).all()
