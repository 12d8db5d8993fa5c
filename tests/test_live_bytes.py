"""A training step keeps what its level of activation memory promises, needs what is planned, and gives it
back, however it ends.

Live bytes are counted on a CPU that allocates as a GPU does, in tiles so short that tiny batches have many.
Each composition is measured with two numbers of layers and two of tokens: the second difference is bytes for
each token and layer, in which weights, gradients and constants are not. All at all levels, in some minutes:

    python tests/test_live_bytes.py [words of a composition's name]
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes, surroundings

import liger_models
from liger_models.architectures import find_architecture
from liger_models.layers.blocks.mixers import MIXERS
from liger_models.layers.experts.moe import Experts
from liger_models.layers.memory import Step, StepMemory
from liger_models.layers.recompute import activation_memory, offload
from liger_models.layers.recompute.activation_memory import LEVELS, RERUN
from liger_models.layers.specs import (
    CompressedAttentionSpec,
    ContextAttentionSpec,
    ConvolvedAttentionSpec,
    CrossAttentionSpec,
    DistanceAttentionSpec,
    GridAttentionSpec,
    GridConvSpec,
    LightConvSpec,
    LightningSpec,
    LocalAttentionSpec,
    RelativeAttentionSpec,
    SharedAttentionSpec,
    SSDSpec,
)

DTYPE, RANK = torch.bfloat16, 4
LAYERS, TOKENS = (2, 3), (256, 512)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Made:
    """Model, its part with `layers` and levels, and a function that calls it.

    Attributes:
        adapter_bytes: bytes per token and layer that adapters keep in layers that are not recomputed.
        planned: the model given to the planner, if another.
        step: further settings of the planned step.
        call: tokens -> the loss.
    """

    model: Any
    decoder: Any
    step: dict[str, Any]
    call: Callable[[int], Any]
    adapter_bytes: float = 0.0
    planned: Any = None


def config_of(family: str, layers: int, **changes: Any) -> dict[str, Any]:
    return {
        **find_architecture(family).tiny,
        "max_position_embeddings": 1024,
        **changes,
        "num_hidden_layers": layers,
    }


def of_labels(model: Any) -> Callable[[int], Any]:
    def call(tokens: int) -> Any:
        ids = torch.randint(12, 131, (1, tokens), generator=torch.Generator().manual_seed(0))
        return model(input_ids=ids, labels=ids).loss

    return call


def full(
    family: str, kinds: tuple[str, ...] = ("sliding_attention", "full_attention"), **changes: Any
) -> Callable[[int], Made]:
    """Build a full fine-tune. `kinds` are the repeating layer types, in families whose configs have them."""

    def make(layers: int) -> Made:
        config = config_of(family, layers, **changes)
        if "layer_types" in config:
            config["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
        model = liger_models.from_config(config, device="cpu", dtype=DTYPE).train()
        return Made(model, model, {}, of_labels(model))

    return make


def adapted(family: str = "llama", quantised: str | None = None, ours: bool = False, **settings: Any):
    """Build a model with PEFT adapters, on the transformers class or our native one."""

    def make(layers: int) -> Made:
        peft = pytest.importorskip("peft")
        transformers = pytest.importorskip("transformers")
        import liger_models.hf
        from liger_models.models.quantization import quantise

        config = config_of(family, layers, hidden_size=64, intermediate_size=128)
        liger_models.hf.register("split")
        try:
            config = transformers.AutoConfig.for_model(**config, use_cache=False)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).train()
        finally:
            liger_models.hf.unregister()
        if quantised == "torchao":
            quantization = pytest.importorskip("torchao.quantization")
            quantization.quantize_(model.base_decoder.layers, quantization.Int8WeightOnlyConfig(version=2))
        elif quantised:
            pytest.importorskip("bitsandbytes")
            quantise(model, quantised, torch.device("cpu"))
            for module in model.modules():  # packed for the product of a CPU
                state = getattr(getattr(module, "weight", None), "quant_state", None)
                if state is not None:
                    state.packing_format_for_cpu = False
        kind = getattr(peft, settings.get("kind", "LoraConfig"))
        own = {"r": RANK, "target_modules": LORA} if kind is peft.LoraConfig else {}
        own |= {name: value for name, value in settings.items() if name != "kind"}
        model = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **own)).train()
        decoder = model.get_base_model().base_decoder
        paths = sum(".lora_A." in name for name, _ in model.named_parameters()) / layers
        for module in model.modules():  # t of each of a token's experts, of at least 16 columns
            if isinstance(module, Experts):
                count = len(settings.get("target_parameters", ()))
                paths += (module.spec.experts_per_token * 16 / RANK - 1) * count / layers
        by_peft = quantised == "torchao" or not own.keys() <= {"r", "target_modules", "target_parameters"}
        adapter_bytes = RANK * paths * DTYPE.itemsize * (not by_peft)
        made = Made(model, decoder, {}, of_labels(model), adapter_bytes)
        planned = {"r", "target_modules", "use_dora"}
        if quantised != "torchao" and not own.keys() - planned:  # which can be planned without the adapters
            weight_bytes = {"nf4": 0.5, "int8": 1.0}.get(quantised)
            made.step = {"lora_rank": RANK, "weight_bytes": weight_bytes, "dora": "use_dora" in own}
            made.planned = liger_models.from_config(config.to_dict(), device="meta", dtype=DTYPE)
        return made

    return make


COMPOSITIONS: dict[str, Callable[[int], Made]] = {
    "full, dense": full("llama"),
    "full, experts": full("qwen3_moe", mlp_only_layers=[]),
    "full, latent experts": full("nemotron_h", ("moe",), layers_block_type=None, layer_types=()),
    "full, latent attention": full("deepseek_v3", first_k_dense_replace=0),
    "full, norms of heads": full("cohere"),
    "full, layers of the head": full("modernbert-decoder"),
    "full, inputs of each layer": full("gemma4_text", num_kv_shared_layers=0, enable_moe_block=False),
    "full, gated attention": full("qwen3_5_text", ("full_attention",)),
    "full, gated delta rule": full("qwen3_5_text", ("linear_attention",)),
    "full, gated convolution": full("lfm2", ("conv",)),
    "full, selective scan": full("jamba", attn_layer_period=9, attn_layer_offset=8, num_experts=1),
    "full, gated recurrence": full("recurrent_gemma", block_types=["recurrent"]),
    "full, channel delta rule": full("kimi_linear", ("linear_attention",), mlp_layer_types=None),
    "full, latent attention, gates of heads": full(
        "bailing_hybrid", ("full_attention",), mlp_layer_types=None, first_k_dense_replace=9
    ),
    "full, gates of heads": full("lfm3", ("full_attention",)),
    "full, differential attention": full("diffllama"),
    "LoRA, dense": adapted(),
    "LoRA, latent attention and experts": adapted("deepseek_v3", target_modules="all-linear"),
    "LoRA of experts": adapted(
        "qwen3_moe",
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "LoRA with a bias": adapted(lora_bias=True),
    "DoRA": adapted(use_dora=True),
    "QLoRA": adapted(quantised="nf4"),
    "QDoRA": adapted(quantised="nf4", use_dora=True),
    "LoRA on 8 bits": adapted(quantised="int8"),
    "LoRA on torchao's 8 bits": adapted(quantised="torchao"),
    "IA3": adapted(
        kind="IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


@dataclass
class Found:
    """Measured bytes."""

    kept: int
    peak: int
    after: int
    promised: float
    planned: int


def measure(made: Made, tokens: int, level: str, first: str | None = None) -> Found:
    """Measure a step at a level, with the first layer at another."""
    layers = made.decoder.layers
    levels = [first or level, *[level] * (len(layers) - 1)]
    made.decoder.set_activation_memory(levels)
    offload.drop_unused_buffers()
    made.model.zero_grad()
    promised = sum(layer.activation_bytes(level, DTYPE.itemsize) for layer in layers)
    promised += made.adapter_bytes * len(layers) * (level not in RERUN)
    step = Step(1, tokens, optimizer_bytes=0, **made.step)
    planned = StepMemory(made.planned or made.decoder, step).plan(levels).peak
    with LiveBytes([*made.model.parameters(), *made.model.buffers()], zero=True) as live:
        loss = made.call(tokens)
        kept = live.now
        loss.backward()
        after, peak = live.now, live.peak
    return Found(kept, peak, after, promised, planned)


def slopes(make: Callable[[int], Made], level: str) -> SimpleNamespace:
    """By token and layer: kept, peak, promised and planned. By token, of the deeper model: `slope` of the
    peak, planned, and what is left after the backward pass.
    """
    found = {}
    with surroundings():
        for layers in LAYERS:
            made = make(layers)
            for tokens in TOKENS:
                found[layers, tokens] = measure(made, tokens, level)
    (a, b), (s, t) = LAYERS, TOKENS

    def second(name: str) -> float:
        x = {size: getattr(one, name) for size, one in found.items()}
        return (x[b, t] - x[b, s] - x[a, t] + x[a, s]) / ((t - s) * (b - a))

    def first(name: str) -> float:
        return (getattr(found[b, t], name) - getattr(found[b, s], name)) / (t - s)

    return SimpleNamespace(
        kept=second("kept"),
        peak=second("peak"),
        promised=(found[b, t].promised - found[a, t].promised) / (b - a),
        slope=first("peak"),
        planned=first("planned"),
        planned_by_layer=second("planned"),
        after=first("after"),
    )


FEW = ("lean", "tiled", "offload")
CHOSEN = {
    "full, dense": LEVELS,
    "full, experts": FEW,
    "full, latent experts": ("lean", "offload"),
    "full, latent attention": FEW,
    "full, norms of heads": ("lean", "offload"),
    "full, layers of the head": ("lean",),
    "full, gated attention": ("all", "lean", "tiled"),
    "full, gated delta rule": LEVELS,
    "full, gated convolution": ("all", "lean", "mlp", "tiled"),
    "full, selective scan": ("all", "lean"),
    "full, gated recurrence": ("all", "lean"),
    "full, channel delta rule": ("all", "lean"),
    "full, latent attention, gates of heads": ("all",),
    "full, gates of heads": ("all", "lean"),
    "full, differential attention": ("lean", "tiled"),
    "LoRA, dense": FEW,
    "LoRA of experts": ("lean", "offload"),
    "LoRA with a bias": ("lean",),
    "DoRA": ("lean", "tiled"),
    "QLoRA": ("lean", "checkpoint", "offload"),
    "LoRA on 8 bits": ("lean", "offload"),
    "LoRA on torchao's 8 bits": ("lean", "checkpoint"),
    "IA3": ("lean",),
}


@pytest.mark.parametrize(("name", "level"), [(name, level) for name in CHOSEN for level in CHOSEN[name]])
def test_a_step_keeps_what_its_level_promises_and_needs_what_is_planned(name, level):
    found = slopes(COMPOSITIONS[name], level)
    # Where low-rank paths are made again with the rest of an MLP, the promise is a little more than is kept.
    assert found.kept <= found.promised + 0.5
    assert found.kept >= 0.95 * found.promised
    # Of another layer the peak grows by what it keeps; where two moments are nearly as high, by less.
    assert found.peak <= found.promised + 8
    # While the loss is alive, operations hold their tables of chunks: 8 bytes for each 64 tokens and layer.
    assert found.after < 0.5
    # Under a dispatch mode torch adds gradients out of place: a stream more, of at most 64 in bfloat16. A
    # plan leaves out numbers by token, such as norms' statistics, which at such widths are percents.
    assert found.slope <= 1.03 * found.planned + 64 * 2 + 16


def test_what_a_layer_saves_on_the_host_is_away_until_soon_before_its_backward_pass():
    with surroundings():
        made = COMPOSITIONS["full, dense"](6)
        at = {(t, first): measure(made, t, "lean", first) for t in TOKENS for first in (None, "lean@host")}
    few, many = TOKENS
    saved = (many - few) * made.decoder.layers[0].activation_bytes("lean", DTYPE.itemsize)
    for what in ("kept", "peak", "planned"):
        grown = {first: getattr(at[many, first], what) - getattr(at[few, first], what) for _, first in at}
        # Numbers by token, such as norms' statistics, stay.
        assert 0.97 * saved <= grown[None] - grown["lean@host"] <= saved
    assert at[many, "lean@host"].after <= at[many, None].after


# What is tested elsewhere.
OTHERS = {
    ConvolvedAttentionSpec: "torch's products by blocks of queries: tests/layers/blocks/test_blocks.py",
    SSDSpec: "its plain form: tests/kernels/recurrent/test_ssd.py",
    LightningSpec: "the scan of SSDSpec; its bytes: tests/layers/blocks/test_blocks.py",
    CrossAttentionSpec: "tests/vision/test_memory_plan.py",
    GridAttentionSpec: "attention of an image encoder: tests/layers/grids/test_grid_attention.py",
    LocalAttentionSpec: "attention of an encoder of sound; its bytes: tests/layers/blocks/test_blocks.py",
    DistanceAttentionSpec: "the same, with a table that layers share: tests/audio/test_phi4_multimodal.py",
    ContextAttentionSpec: "the same, within blocks: tests/audio/test_parakeet.py",
    RelativeAttentionSpec: "the same, with relative positions: tests/audio/test_parakeet.py",
    LightConvSpec: "convolutions of an encoder of sound: the same",
    GridConvSpec: "convolutions of an image encoder: tests/layers/grids/test_grid_conv.py",
    CompressedAttentionSpec: "plain torch by blocks of queries, whose bytes a plan estimates",
    SharedAttentionSpec: "attention of queries alone, which keeps less than AttentionSpec",
}


def test_every_mixer_is_among_those_whose_bytes_are_counted():
    made = [make(3) for name, make in COMPOSITIONS.items() if name.startswith("full") and name in CHOSEN]
    counted = {type(mixer) for one in made for layer in one.decoder.layers for mixer in layer.spec.mixers}
    assert counted | OTHERS.keys() == MIXERS.keys()


@pytest.mark.parametrize("level", ["lean", "checkpoint", "offload"])
def test_inputs_of_each_layer_are_planned_until_layer_0_has_gone_back(level):
    """One operation makes the inputs of all layers, so their gradients wait for the last of them."""
    found = slopes(COMPOSITIONS["full, inputs of each layer"], level)
    assert found.kept == pytest.approx(found.promised, abs=0.5)
    assert found.peak == pytest.approx(found.planned_by_layer, abs=0.5)
    assert found.slope <= 1.03 * found.planned + 64 * 2 + 16  # as above
    assert found.after == 0


# -- steps that end otherwise


class Stopped(BaseException):
    """Stands in for KeyboardInterrupt, which is not an Exception."""


def stop(module: torch.nn.Module, backward: bool, error: type[BaseException]) -> Any:
    """Make a module raise in the forward pass or during recomputation."""

    def hook(*_: Any) -> None:
        if (torch._C._current_graph_task_id() != -1) == backward:
            raise error

    return module.register_forward_pre_hook(hook)


def raising(made: Made, backward: bool, error: type[BaseException] = Stopped) -> None:
    handle = stop(made.decoder.layers[1].mlp, backward, error)
    with pytest.raises(error):
        made.call(TOKENS[0]).backward()
    handle.remove()


def raising_in_a_gradient(made: Made) -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise Stopped

    handle = next(p for p in made.decoder.layers[0].parameters() if p.requires_grad).register_hook(hook)
    with pytest.raises(Stopped):
        made.call(TOKENS[0]).backward()
    handle.remove()


def without(gradients: Any, made: Made) -> None:
    with gradients():
        made.call(TOKENS[0])


ENDS: dict[str, Callable[[Made], Any]] = {
    "no backward": lambda made: made.call(TOKENS[0]) and None,
    "no_grad": lambda made: without(torch.no_grad, made),
    "inference_mode": lambda made: without(torch.inference_mode, made),
    "stopped in the forward pass": lambda made: raising(made, backward=False),
    "stopped in the second run": lambda made: raising(made, backward=True),
    "interrupted in the forward pass": lambda made: raising(made, False, KeyboardInterrupt),
    "interrupted in the second run": lambda made: raising(made, True, KeyboardInterrupt),
    "stopped in a gradient": raising_in_a_gradient,
    "a usual one": lambda made: made.call(TOKENS[0]).backward(),
}


@pytest.mark.parametrize("level", ["lean", "tiled", "offload"])
@pytest.mark.parametrize("name", ["full, experts", "LoRA, dense"])
def test_however_a_step_ends_it_gives_everything_back_at_once(name, level):
    """Without the garbage collector, and the host's buffers too."""
    with surroundings():
        made = COMPOSITIONS[name](LAYERS[0])
        made.decoder.set_activation_memory(level)
        made.call(TOKENS[0]).backward()  # which makes what stays, such as tables of positions
        made.model.zero_grad()
        gc.collect()
        gc.freeze()  # so that the collections below skip what exists
        others = set(activation_memory._RECIPES)  # of tensors that other code of the process holds
        lean_ends = (end for end in ENDS if level != "lean" or "second run" not in end)
        for end in lean_ends:
            gc.collect()
            gc.disable()
            try:
                before = [*made.model.parameters(), *made.model.buffers()]
                with LiveBytes(before, zero=True) as live:
                    ENDS[end](made)
                    # torch drops what an error left in its queue when the next backward pass begins.
                    torch.zeros((), requires_grad=True).mul(2).backward()
                    made.model.zero_grad()
                    assert live.now <= STAYS, end
                    assert live.on_host == 0, end
            finally:
                gc.enable()
            assert activation_memory._RECIPES.keys() <= others, end


# Counts of experts and the like, whatever the number of tokens.
STAYS = 2048


def main(words: list[str]) -> None:
    for name, make in COMPOSITIONS.items():
        if all(word in name for word in words):
            for level in LEVELS:
                try:
                    found = slopes(make, level)
                    print(
                        f"{name}, {level}:",
                        ", ".join(f"{k} {v:.0f}" for k, v in vars(found).items()),
                        flush=True,
                    )
                except Exception as error:
                    print(f"{name}, {level}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # in which a folder of tests is called liger_models
    main(sys.argv[1:])
