"""Freezing parameters by the names that checkpoints use."""

from __future__ import annotations

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture, list_architectures


def tiny(family, device="meta", **changes):
    config = {key: value for key, value in find_architecture(family).tiny.items() if value is not ...}
    return liger_models.from_config({**config, **changes}, device=device)


def frozen(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


DIGITS = {f"layers.{digit}." for digit in range(10)}


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", num_hidden_layers=12)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embed_tokens"], lambda name: name == "embed_tokens.weight"),
        (["model.layers.1"], lambda name: name.startswith("layers.1.")),  # and not layers.10
        (["layers.0-9", "lm_head"], lambda name: name[:7] == "lm_head" or name[:9] in DIGITS),
        (["layers.[0-1].mlp"], lambda name: name.startswith(("layers.0.mlp.", "layers.1.mlp."))),
        (["layers.1?.*"], lambda name: name.startswith(("layers.10.", "layers.11."))),
        (["*norm*"], lambda name: "norm" in name),
        (["q_proj", "k_proj", "v_proj"], lambda name: "qkv_proj" in name),  # all that is fused
        (["model.layers.3.self_attn.o_proj.weight"], lambda name: name == "layers.3.self_attn.o_proj.weight"),
        (["language"], lambda name: True),
    ],
)
def test_patterns_are_globs_over_names_and_parts_of_them(patterns, expected, llama):
    every = {name for name, _ in llama.named_parameters()}
    chosen = {name for name in every if expected(name)}
    llama.freeze(*patterns)
    assert frozen(llama) == chosen
    llama.freeze(train_only=patterns)
    assert frozen(llama) == every - chosen
    llama.freeze("layers.2", train_only=patterns)
    assert frozen(llama) == every - {name for name in chosen if not name.startswith("layers.2.")}
    llama.freeze()
    assert not frozen(llama)


@pytest.mark.parametrize("family", [*list_architectures(), *list_architectures(vision=True, audio=True)])
def test_names_are_those_of_the_family_s_checkpoints(family):
    model = tiny(family)
    untrained = frozen(model)  # indexers, which no loss reaches
    weight_map, parameters = model.weight_map(), dict(model.named_parameters())
    own = {native: {ref.name for ref in weight_map[native].refs()} for native in parameters}
    for native in list(parameters)[:: max(1, len(parameters) // 5)]:
        # All that are in one tensor of the checkpoint.
        alike = {other for other, names in own.items() if names & own[native]}
        whole = set().union(*(own[other] for other in alike))
        model.freeze(*(name.replace("[", "[[]") for name in whole))
        assert frozen(model) == untrained | {other for other, names in own.items() if names <= whole}


def test_what_cannot_be_frozen_alone_is_refused(llama):
    split = r"q_proj.\w+ is not.*one parameter, layers.0.self_attn.qkv_proj.*projections='split'"
    with pytest.raises(ValueError, match=split):
        llama.freeze("layers.*.q_proj")
    assert not frozen(llama)  # nothing changed
    assert llama.freezing_divides_projections("q_proj")
    assert not llama.freezing_divides_projections("self_attn")
    llama.split_projections()
    llama.freeze("layers.*.q_proj")
    assert frozen(llama) == {name for name, _ in llama.named_parameters() if ".q_proj." in name}
    llama.freeze()
    llama.fuse_projections()
    experts = tiny("qwen3_moe")
    with pytest.raises(ValueError, match=r"experts.*in one parameter.*freeze or train all of them"):
        experts.freeze("experts.0")
    assert not experts.freezing_divides_projections("experts.0")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer.3", r"no tensor matches 'layer.3'; near names are .*layers\.\*"),
        ("qproj", "near names are .*q_proj"),
        ("layers.40", r"near names are layers\.\*"),
        ("layers.9-2", "smaller number first"),
        ("zzz", "expected names such as lm_head.weight, model.embed_tokens.weight"),
    ],
)
def test_a_pattern_that_matches_nothing_shows_near_names(pattern, message, llama):
    with pytest.raises(ValueError, match=message):
        llama.freeze("embed_tokens", pattern)
    assert not frozen(llama)


def test_a_tied_head_is_named_by_its_embedding():
    model = tiny("llama", tie_word_embeddings=True)
    with pytest.raises(ValueError, match="'lm_head' is the head, which is tied to the embedding"):
        model.freeze("lm_head")
    model.freeze("embed_tokens")
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma4_text"])
@pytest.mark.parametrize("level", ["lean", "checkpoint"])
def test_the_others_have_the_gradients_that_they_had(family, level):
    torch.manual_seed(0)
    model = tiny(family, "cpu")
    model.set_activation_memory(level)
    ids = torch.randint(5, 50, (2, 9))

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    for patterns in (["embed_tokens", "layers.0"], ["layers.1.self_attn", "norm"]):
        model.freeze(*patterns)
        found = gradients()
        assert found.keys() == expected.keys() - frozen(model)
        assert frozen(model)
        for name, gradient in found.items():  # float32, as everywhere: 1e-5 of the largest
            assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
        model.freeze()
