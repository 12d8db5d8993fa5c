"""The layers that `--lora` adapts, and those that cannot have an adapter."""

from __future__ import annotations

import pytest

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.adapters.lora_targets import find_targets
from liger_models.training.loop import Run
from liger_models.training.processes.world import World

pytest.importorskip("peft")


def test_all_linear_layers_of_deepseek_v3_are_adapted(checkpoints, settings):
    adapters = Run(settings(model=str(checkpoints("deepseek_v3")), lora="r=4"), World("cpu")).adapters
    adapted = {name.partition("layers.")[2] for own in adapters.layers.values() for name in own.rows}
    assert {f"0.mlp.{name}_proj" for name in ("gate", "up", "down")} <= adapted
    assert {f"1.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")} <= adapted


def test_indexers_which_no_loss_reaches_get_no_adapter(checkpoints, settings):
    folder = str(checkpoints("deepseek_v32"))
    run = Run(settings(model=folder, lora="r=4"), World("cpu"))
    assert any(".indexer." in name for name, _ in run.model.named_parameters())
    assert not any(".indexer." in name for name in run.adapters.layers)
    with pytest.raises(ConfigError, match="no linear layer is called 'weights_proj'"):
        Run(settings(model=folder, lora="r=4,targets=weights_proj"), World("cpu"))


@pytest.mark.parametrize(
    ("family", "left_out", "reason"),
    [
        ("aria", "vision.projector.out_proj", "multiplies by their weights without calling them"),
        ("jamba", "layers.0.mamba.dt_proj", "multiplies by their weights without calling them"),
        ("minimax_m3_vl", "layers.0.mlp.gate_proj", "joins their weights with those of other layers"),
        ("gemma3", "vision.projector.linear", "holds their weights as plain parameters"),
        ("zamba2", "shared.1.shared_transformer.self_attn.q_proj", "several layers share their weights"),
    ],
)
def test_layers_whose_adapters_peft_cannot_read_get_none(family, left_out, reason):
    model = liger_models.from_config(find_architecture(family).tiny, device="meta")
    model.split_projections()
    with pytest.warns(UserWarning, match=rf"layers \({left_out}, ...\) get no adapter: .*{reason}"):
        layers, _ = find_targets(model, LoraSettings.parse(""), ())
    assert layers
    assert left_out not in layers
    stored = next(model.weight_map()[f"{left_out}.weight"].refs()).name.removesuffix(".weight")
    with pytest.raises(ConfigError, match=f"{left_out} cannot have this adapter: .*{reason}"):
        find_targets(model, LoraSettings.parse(f"targets={stored}"), ())


def test_targets_that_also_fit_layers_without_adapters_say_so():
    model = liger_models.from_config(find_architecture("aria").tiny, device="meta")
    model.split_projections()
    with pytest.warns(UserWarning, match=r"1 layers \(vision.projector.out_proj, ...\) get no adapter"):
        layers, _ = find_targets(model, LoraSettings.parse("targets=out_proj"), ())
    assert layers
    assert "vision.projector.out_proj" not in layers


def test_a_layer_that_is_several_in_transformers_is_adapted_as_a_whole():
    model = liger_models.from_config(find_architecture("kimi_k25").tiny, device="meta")
    model.split_projections()
    encoder = {"q_proj", "k_proj", "v_proj"}

    def adapted(targets):
        found = find_targets(model, LoraSettings.parse(f"targets={targets}"), ())[0]
        return {path for path in found if path.startswith("vision.encoder.layers.0.")}

    whole = {"vision.encoder.layers.0.self_attn.qkv_proj"}
    assert adapted("wqkv") == adapted("attn.q_proj+attn.k_proj+attn.v_proj") == whole
    with pytest.raises(ConfigError, match=r"qkv_proj is one layer here, .* name all of them, or none"):
        adapted("attn.q_proj")
    found = find_targets(model, LoraSettings.parse(""), ())[0]
    assert {name.rpartition(".")[2] for name in found[whole.pop()].rows} == encoder


@pytest.mark.parametrize(
    ("family", "lora", "error"),
    [
        ("llama", "r=4,experts", "all experts are frozen, or the model has none"),
        ("qwen3_moe", "r=4,dora,experts", "neither dropout nor DoRA"),
    ],
)
def test_experts_that_cannot_be_adapted_are_refused(family, lora, error, checkpoints, settings):
    with pytest.raises(ConfigError, match=error):
        Run(settings(model=str(checkpoints(family)), lora=lora), World("cpu"))


@pytest.mark.parametrize("option", ["dropout=0.1", "dora"])
def test_layers_that_peft_could_not_adapt_as_parameters_are_named(option, checkpoints, settings):
    folder = str(checkpoints("deepseek_v3"))
    with pytest.warns(UserWarning, match=r"6 layers \(.*mlp.*\) get no adapter: .*without dropout"):
        adapters = Run(settings(model=folder, lora=f"r=4,{option}"), World("cpu")).adapters
    assert not any(".mlp." in name for name in adapters.layers)
    with pytest.raises(ConfigError, match=r"down_proj cannot have this adapter: .*stacks of experts"):
        Run(settings(model=folder, lora=f"r=4,targets=o_proj+down_proj,{option}"), World("cpu"))
