"""The parity comparison notices faults: each of these, brought into a native model, makes it fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from liger_models.architectures import list_architectures
from liger_models.convert.checkpoints.weight_map import Cat
from liger_models.layers.norm import LigerRMSNorm

EQUAL_HEADS = {"num_key_value_heads": 4}


@pytest.fixture(params=list_architectures())
def family(request):
    return request.param


@pytest.fixture
def assert_noticed(failures):
    def check(pair):
        missed = failures(pair.distances(**pair.batch()))
        assert "logits" in missed
        assert "loss" in missed

    return check


def swap_parts(native, first, second):
    """Exchange two parts of one parameter's expression: they are read in the other order."""

    def change(weight_map):
        parts = list(weight_map[native].parts)
        parts[first], parts[second] = parts[second], parts[first]
        return {**weight_map, native: Cat(tuple(parts))}

    return change


def swap_parameters(first, second):
    return lambda weight_map: {
        **weight_map,
        first: weight_map[second],
        second: weight_map[first],
    }


def test_without_a_fault_the_comparison_passes(family, make_pair, failures):
    pair = make_pair(family, EQUAL_HEADS)
    assert not failures(pair.distances(**pair.batch()))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(swap_parts("layers.1.self_attn.qkv_proj.weight", 0, 1), id="query_and_key"),
        pytest.param(swap_parts("layers.1.self_attn.qkv_proj.weight", 1, 2), id="key_and_value"),
        pytest.param(swap_parts("layers.1.mlp.gate_up_proj.weight", 0, 1), id="gate_and_up"),
        pytest.param(
            swap_parameters("layers.0.mlp.down_proj.weight", "layers.2.mlp.down_proj.weight"), id="two_layers"
        ),
        pytest.param(
            swap_parameters("layers.1.input_layernorm.weight", "layers.1.post_attention_layernorm.weight"),
            id="two_norms",
        ),
        pytest.param(swap_parameters("embed_tokens.weight", "lm_head.weight"), id="embedding_and_head"),
        pytest.param(swap_parameters("norm.weight", "layers.0.input_layernorm.weight"), id="final_norm"),
    ],
)
def test_two_weights_swapped(change, family, make_pair, assert_noticed):
    assert_noticed(make_pair(family, EQUAL_HEADS, change_map=change))


@pytest.mark.parametrize("norm", ["layers.1.input_layernorm", "layers.2.post_attention_layernorm", "norm"])
def test_a_norm_dropped(norm, family, make_pair, assert_noticed, monkeypatch):
    pair = make_pair(family)
    dropped, forward = pair.ours.get_submodule(norm), LigerRMSNorm.forward

    def skip(self, x, residual=None):
        if self is not dropped:
            return forward(self, x, residual)
        x = x if residual is None else x + residual
        scaled = x * self.weight  # the weight stays in use, so that its gradient can be compared
        return scaled if residual is None else (scaled, x)

    monkeypatch.setattr(LigerRMSNorm, "forward", skip)
    assert_noticed(pair)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_residual_connection_dropped(layer, family, make_pair, assert_noticed, monkeypatch):
    pair = make_pair(family)
    norm, forward = pair.ours.layers[layer].post_attention_layernorm, LigerRMSNorm.forward

    def without(self, x, residual=None):
        return forward(self, x, residual * 0 if self is norm else residual)

    monkeypatch.setattr(LigerRMSNorm, "forward", without)
    assert_noticed(pair)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda settings: settings["rope_type"],
)
def test_a_rope_scaling_dropped(settings, family, make_pair, change_blocks, assert_noticed):
    settings = {"rope_theta": 500.0, **settings}
    drop = change_blocks("attention", lambda spec: replace(spec, rope=replace(spec.rope, type="default")))
    assert_noticed(make_pair(family, {"rope_parameters": settings}, change_spec=drop))


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda spec: replace(spec, scale=spec.scale * 1.001), id="scale"),
        pytest.param(lambda spec: replace(spec, rope=replace(spec.rope, theta=9000.0)), id="theta"),
        pytest.param(lambda spec: replace(spec, rope=replace(spec.rope, interleaved=True)), id="interleaved"),
        pytest.param(lambda spec: replace(spec, rope=None), id="no_positions"),
    ],
)
def test_an_attention_setting_wrong(edit, family, make_pair, change_blocks, assert_noticed):
    assert_noticed(make_pair(family, change_spec=change_blocks("attention", edit)))


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one(off, family, make_pair, change_blocks, assert_noticed):
    pair = make_pair(family)
    window = pair.ours.spec.blocks[0].attention.window
    if window is None:
        pytest.skip("this family's tiny config has no window")
    edit = change_blocks("attention", lambda spec: replace(spec, window=window + off))
    assert_noticed(make_pair(family, change_spec=edit))


@pytest.mark.parametrize("off", [10.0, 0.1])
def test_a_wrong_eps(off, family, make_pair, change_blocks, assert_noticed):
    assert_noticed(
        make_pair(
            family, change_spec=change_blocks("norm", lambda spec: replace(spec, eps=spec.eps * off + 1e-4))
        )
    )


def test_a_wrong_activation(family, make_pair, change_blocks, assert_noticed):
    edit = change_blocks("mlp", lambda spec: replace(spec, activation="gelu"))
    assert_noticed(make_pair(family, change_spec=edit))
