"""Families at the widths of their published models, with few layers: in bfloat16 they are as accurate as the
reference. The truth is the reference in float32 with the same weights.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from mutations import spec_fields
from older import installed_release
from pairs import (
    Pair,
    Run,
    copy_parameters,
    in_comparable_mode,
    map_like,
    names_of,
    reference_class,
    skip_groups_normalised_together,
)
from torch import Tensor, nn

import liger_models
from liger_models.architectures import Architecture, find_architecture
from liger_models.cards.published import layers_of_every_kind, with_layers
from liger_models.cards.workshop import FOLLOWING
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import AltUpSpec, ModelSpec, TiledVisionSpec
from liger_models.models.verification import config_class, mask_as_family

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PUBLISHED = Path(__file__).parent / "published"
VOCABULARY, WINDOW, EXPERTS = 32768, 512, 16  # at most; widths do not depend on these
PARAMETERS = 2_500_000_000  # at most, by fewer experts: three models and gradients need memory
MOST = 40_000_000_000  # parameters with all kinds of layers
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Layers of an encoder: enough for windows and for the outputs of lower layers.
FEW: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers"), 3),
    "num_global_layers": 1,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "intermediate_layers_indices": [0, 2],
}
IDS: dict[str, Any] = {
    "image_token_id": 3,
    "image_token_index": 3,
    "video_token_id": 4,
    "video_token_index": 4,
}
IDS |= {
    "image_start_token_id": 5,
    "image_end_token_id": 6,
    "video_start_token_id": 7,
    "video_end_token_id": 8,
}
IDS["visual_indicator_token_ids"] = [2, 5, 6, 7, 8]
IDS |= {"audio_token_id": 2, "audio_token_index": 2, "audio_start_token_id": 5, "vision_start_token_id": 6}
LAYERS_OF_SOUNDS = "encoder_layers", "num_hidden_layers", "conf_num_hidden_layers", "num_layers"
# Of Molmo 2, after the vocabulary.
IDS_OF_MOLMO = (
    *("image_start_token_id", "image_end_token_id", "image_patch_id", "image_high_res_id"),
    *("image_low_res_id", "image_col_id", "low_res_image_start_token_id"),
    *("frame_start_token_id", "frame_end_token_id"),
)


def wide_config(family: str, having: str | None = None) -> dict[str, Any]:
    """The family's published config with a width nearest to 4096, cut to the first layers of all kinds; of
    those with the key `having`, if there are any.
    """
    own: list[dict[str, Any]] = []
    for path in sorted(PUBLISHED.glob("*.json")):
        published = json.loads(path.read_text())
        if published["config"]["model_type"] == family:  # some ask for dropout
            own.append({**published["config"], **dict.fromkeys(published.get("dropout", ()), 0.0)})
    if not own:
        pytest.skip(f"tests/architectures/published has no config of {family}")
    has = [config for config in own if having and config.get(having)]
    config = min(has or own, key=lambda config: abs(_spec(config).hidden_size - 4096))
    # Rounded weights have tests of their own: a class made from a config alone does not round.
    config.pop("quantization_config", None)
    cut = with_layers(config, max(2, layers_of_every_kind(config)))
    if media := not {"vision_config", "audio_config", "encoder_config"}.isdisjoint(cut):
        _cut_encoders(cut)
    if _parameters(cut) > MOST:  # layers that differ by decays of their own (MiniMax)
        cut = with_layers(cut, 2)
    text = cut.get("text_config", cut)
    if "image_patch_id" in cut:
        fewer = max(0, _spec(config).vocab_size - VOCABULARY)
        cut |= {key: config[key] - fewer for key in IDS_OF_MOLMO if key in config}
    if cut.get("vocab_size"):  # stated for the whole model, too
        cut["vocab_size"] = min(VOCABULARY, cut["vocab_size"])
    whole = _spec(config).vocab_size
    padded = media or text.get("pad_token_id") is not None  # some classes refuse None
    text |= {"vocab_size": min(VOCABULARY, whole), "pad_token_id": 0 if padded else None}
    for part in ("vision_config", "audio_config"):  # with vocabularies at the end of the whole
        if "vocab_offset" in (own_part := cut.get(part) or {}):
            cut[part] = own_part | {"vocab_offset": own_part["vocab_offset"] - whole + text["vocab_size"]}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    # transformers 5.17 does not read it
    if {"head_dim", "rope_theta"} <= text.keys() and (turning := text.pop("rotary_dim", None)):
        turns = {"rope_type": "default", "partial_rotary_factor": turning / text["head_dim"]}
        text["rope_parameters"] = turns | {"rope_theta": text.pop("rope_theta")}
    # The reference's plain form of a state space makes products for all pairs of a chunk's tokens and for all
    # pairs of chunks. Chunks of 64, which change no result, take the least memory.
    text |= {key: 64 for key in ("chunk_size", "mamba_chunk_size") if key in text}
    experts = max(EXPERTS, text.get("num_experts_per_tok") or 0)
    for most, keys in ((WINDOW, ["sliding_window"]), (experts, NUMBERS_OF_EXPERTS)):
        text |= {key: min(most, text[key]) for key in keys if text.get(key)}
    if "activation_sparsity_pattern" in text:  # the rounding of 25 layers leaves gradients nothing but noise
        text |= {"num_hidden_layers": 6, "num_kv_shared_layers": 1, "layer_types": text["layer_types"][:6]}
        text |= {"activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4}
        text["intermediate_size"] = text["intermediate_size"][:6]
    if "ple_layer_ids" in text:  # tables of n-grams as small as the vocabulary
        text |= {"ple_layer_ids": [1], "ngram_vocab_size_base": 2000, "eos_token_id": 1}
        text["split_ngram_parts"] = 2
    if "zero_expert_num" in text:  # transformers makes matrices for these experts that released files lack
        text["zero_expert_num"] = 0
    fewest = 4 * text.get("num_experts_per_tok", EXPERTS)  # so that routers have a choice
    for key in NUMBERS_OF_EXPERTS:
        while (text.get(key) or 0) > fewest and _parameters(cut) > PARAMETERS:
            text[key] //= 2
    return cut


def _cut_encoders(config: dict[str, Any]) -> None:
    """Cut the encoders to few layers, and use small ids for images and sounds."""
    if "vision_config" in config:
        config["vision_config"] = _cut_vision(config["vision_config"])
    if "insert_layer_id" in config:  # between two of these
        config["insert_layer_id"] = 1
    if "deepstack_layer_map" in config:
        config |= {"deepstack_layer_map": [[-2, 1]], "spatial_target_layers": [0]}
    config |= {key: value for key, value in {**IDS, "pad_token_id": 0}.items() if key in config}
    for part in ("vision_config", "audio_config"):  # which hold the ids in Phi-4-multimodal
        own = config.get(part) or {}
        if moved := {key: value for key, value in IDS.items() if key in own}:
            config[part] = {**own, **moved}
    for part in ("audio_config", "encoder_config"):
        if audio := config.get(part):
            config[part] = {**audio, **{key: 3 for key in LAYERS_OF_SOUNDS if key in audio}}
    if isinstance(_spec(config).vision, TiledVisionSpec):  # its id is the first after the vocabulary
        config["image_token_index"] = VOCABULARY


def _cut_vision(config: Mapping[str, Any]) -> dict[str, Any]:
    vision = {**config, **{key: value for key, value in FEW.items() if key in config}}
    for part in ("sam_config", "encoder_config"):
        if part in vision:
            vision[part] = _cut_vision(vision[part])
    if "layer_types" in vision:
        vision["layer_types"] = vision["layer_types"][: vision["num_hidden_layers"]]
    if taken := vision.get("intermediate_layers_indices"):
        vision["vision_output_dim"] = vision["hidden_size"] * (1 + len(taken))
    return vision


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    return find_architecture(config["model_type"]).spec(HFConfig.load(config))


def _parameters(config: dict[str, Any]) -> int:
    return liger_models.from_config(config, device="meta").num_parameters()


def batches_of(spec: ModelSpec) -> int:
    """Number of batches. Rounding decides the expert of a token near a tie, in any program: over four batches
    the differences average out. So do errors of an encoder's queries and keys without positions: they are
    those of few directions, which move all scores of a query alike, and not of as many numbers as there are,
    and those of the few coefficients of AltUp, to which all tokens' streams contribute.
    """
    encoders = (spec.vision, spec.audio)
    blind = any(not block.ropes for encoder in encoders for block in getattr(encoder, "blocks", ()))
    few = blind or isinstance(spec.streams, AltUpSpec) or any(block.mixture for block in spec.blocks)
    return 4 if few else 1


@pytest.fixture(scope="module", autouse=True)
def exact_float32() -> Iterator[None]:
    """Disable TF32: products and convolutions of float32 keep its precision."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def emptied() -> None:
    """Free the memory of the previous family, even if its test failed."""
    gc.collect()
    torch.cuda.empty_cache()


def fill(model: nn.Module) -> None:
    """Matrices as in a fresh model, norms and variances around one, biases and other buffers around zero,
    bounds at 1.5.
    """
    torch.manual_seed(0)
    parameters, saved = dict(model.named_parameters()), model.state_dict().keys()
    with torch.no_grad():
        for p in parameters.values():
            p.normal_(0.0, 0.02)
        for name, p in parameters.items():
            if p.dim() == 1 and not name.endswith("bias"):
                p.normal_(1.0, 0.2)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point() and not name.endswith(FOLLOWING):
                if buffer.isinf().any():  # a bound that clips nothing
                    buffer.copy_(1.5 * buffer.sign())
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 1.5)
                elif name.endswith("layer_scalar"):  # small ones of many layers leave nothing of the stream
                    buffer.normal_(1.0, 0.2)
                else:
                    buffer.normal_(0.0, 0.02)


def farther_than_reference(
    family: str,
    config: dict[str, Any],
    make_batches: Callable[[Pair], Sequence[Mapping[str, Tensor]]],
    kind: type[Pair] = Pair,
) -> dict[str, tuple[float, float]]:
    """Find the logits, loss and gradients farther from the truth than 1.1 times the reference's. Return our
    relative distance and the reference's by the checkpoint's names.
    """
    architecture, spec = find_architecture(family), _spec(config)
    reference = _reference(architecture, config, torch.bfloat16, "eager" if _needs_eager(spec) else "sdpa")
    fill(reference)
    state = reference.state_dict()
    with torch.device("meta"):
        ours = CausalLM(spec)
    in_comparable_mode(spec, ours, reference)
    ours.materialize(DEVICE, torch.bfloat16)
    carried = architecture.carried(HFConfig.load(config))
    names = {n for n in names_of(reference) if not any(fnmatchcase(n, pattern) for pattern in carried)}
    weight_map = map_like(architecture, ours, names)
    copy_parameters(weight_map, ours, state)
    pair = kind(architecture, config, ours, reference, weight_map)
    exact = _reference(architecture, config, torch.float32, "eager")
    of_config = {name for name in state if name.endswith(FOLLOWING)}  # rounded there
    missing = exact.load_state_dict({name: x for name, x in state.items() if name not in of_config}, False)
    assert {*missing.missing_keys, *missing.unexpected_keys} == of_config
    in_comparable_mode(spec, exact)
    batches = make_batches(pair)
    # One batch at a time: the gradients of all batches would fill a GPU's memory.
    compared = [
        _compared(pair, {torch.bfloat16: reference, torch.float32: exact}, batch) for batch in batches
    ]
    sizes = compared[0]

    farther, count = {}, len(batches)
    distances = {name: _mean_distances([one[name] for one in compared]) for name in sizes}
    for name, (own, theirs) in distances.items():
        numel = sizes[name].numel
        # Both are noise of n numbers each: by chance the logarithm of the ratio of two such means deviates by
        # 1 / sqrt(n), which is negligible for a matrix but not for a bias. With experts the errors are large
        # and few, those of tokens that go to another expert: the deviation is estimated from the batches.
        deviation = max((numel * count) ** -0.5, _of_the_mean([one[name] for one in compared]))
        chance = math.exp(3 * deviation)
        # A loss is one number, and the reference's may be close by luck: a mean of the tokens' errors, of
        # either sign, deviates by its standard error, here the reference's.
        luck = 3 * sizes[name].deviation
        # Without positions, a key's bias shifts all scores of a query equally and its gradient is rounding
        # only, of terms that the weight's gradient sums too, times inputs of order one. With positions that
        # rotate slowly the terms cancel in part.
        weight = name.removesuffix("bias") + "weight"
        if name.endswith(".bias") and weight in sizes:
            terms, norm = sizes[weight].norm / math.sqrt(sizes[weight].width), sizes[name].norm
            if norm < (1 if name.endswith(".k_proj.bias") else 2**-16) * terms:
                luck = 1.1 * distances[weight][1] * (terms / norm)
        if not own <= max(1.1 * chance * theirs, luck) and (numel > 1 or name == "loss"):
            farther[name] = (own, theirs)
    # A single number may be close by luck, too: all of them are compared together.
    numbers = [both for name, both in distances.items() if sizes[name].numel == 1 and name != "loss"]
    if numbers:
        own, theirs = (math.hypot(*side) for side in zip(*numbers, strict=True))
        if not own <= 1.1 * math.exp(3 / len(numbers) ** 0.5) * theirs:
            farther["single numbers"] = (own, theirs)
    return farther


def distance(found: Tensor, truth: Tensor) -> float:
    error, size = (found.float() - truth).norm().item(), truth.norm().item()
    if not error:
        return 0.0  # also if both are zero, as the gradients of a table that no token reads
    return error / size if size else math.inf


class _Compared(NamedTuple):
    """One result of a batch: the distances of ours and of the reference's from the truth, and sizes of the
    result.
    """

    own: float
    theirs: float
    numel: int
    norm: float
    width: int
    deviation: float = 0.0  # relative standard error of a mean


def _compared(
    pair: Pair, references: Mapping[torch.dtype, Any], batch: Mapping[str, Tensor]
) -> dict[str, _Compared]:
    """Compare results of both models in bfloat16 with the reference in float32, which is the truth."""
    # Thousands of tokens in bfloat16 are never clear of ties; differences average out (`batches_of`).
    found = _results_of(partial(pair.run_ours, near_ties=True), batch, torch.bfloat16)
    results = []
    for dtype, reference in references.items():
        pair.reference = reference
        results.append(_results_of(pair.run_reference, batch, dtype))
    expected, truth = results
    assert found.keys() == truth.keys() == expected.keys()
    compared = {
        name: _Compared(
            distance(found[name], exact),
            distance(expected[name], exact),
            exact.numel(),
            exact.norm().item(),
            exact.shape[-1] if exact.dim() else 1,
        )
        for name, exact in truth.items()
    }
    error = _token_losses(expected["logits"], batch) - _token_losses(truth["logits"], batch)
    deviation = error.std() / error.numel() ** 0.5 / truth["loss"]
    return {**compared, "loss": compared["loss"]._replace(deviation=deviation.item())}


def _token_losses(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"][:, 1:].to(logits.device)
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels, reduction="none")
    return losses[labels != -100]


def _mean_distances(compared: Sequence[_Compared]) -> tuple[float, float]:
    """Root mean squares over batches."""
    sides = ([one.own for one in compared], [one.theirs for one in compared])
    own, theirs = (math.hypot(*side) / math.sqrt(len(side)) for side in sides)
    return own, theirs


def _of_the_mean(compared: Sequence[_Compared]) -> float:
    """The standard error, over batches, of the logarithm of our distance divided by the reference's."""
    if len(compared) == 1 or not all(one.own and one.theirs for one in compared):
        return 0.0
    return statistics.stdev(math.log(one.own / one.theirs) for one in compared) / len(compared) ** 0.5


def _needs_eager(spec: ModelSpec) -> bool:
    """Whether the reference has only plain attention for the spec: soft caps, sinks, or no attention."""
    named = [(field, value) for _, field, value, _ in spec_fields(spec)]
    if not any("AttentionSpec." in field for field, _ in named):
        return True
    return any(field.endswith((".softcap", ".sinks")) and value for field, value in named)


def _reference(architecture: Architecture, config: dict[str, Any], dtype: torch.dtype, kind: str) -> Any:
    made = reference_class(architecture)
    settings = config_class(architecture)(**copy.deepcopy(config))
    settings._attn_implementation = kind if getattr(made, f"_supports_{kind}", True) else "eager"
    by_sdpa = dtype == torch.bfloat16 and getattr(made, "_supports_sdpa", True)
    if by_sdpa and hasattr(settings, "vision_config"):  # as in a loaded model
        settings.vision_config._attn_implementation = "sdpa"
    if "attention_chunk_size" in (config.get("audio_config") or {}):
        # A conformer reads masks of numbers, which only "eager" has, or before 5.18 masks of booleans.
        settings.audio_config._attn_implementation = "sdpa" if installed_release() < (5, 18) else "eager"
    with torch.device(DEVICE):
        model = made(settings)
    skip_groups_normalised_together(model, settings)
    # Rotary frequencies are not saved and stay in float32, as in a loaded model; masks of GPT do not.
    saved = model.state_dict().keys()
    for p in model.parameters():
        p.data = p.data.to(dtype)
    for name, buffer in list(model.named_buffers()):
        module, _, own = name.rpartition(".")
        if (name in saved or own == "bias") and buffer.is_floating_point():
            setattr(model.get_submodule(module), own, buffer.to(dtype))
    mask_as_family(architecture, model)
    return model


def _results_of(
    run: Callable[..., Run], batch: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Logits, loss and gradients, by the checkpoint's names. All models get pixels and sounds rounded to
    bfloat16.
    """
    call = {
        name: x.to(DEVICE).bfloat16().to(dtype)
        if name.startswith("pixel_values") or name == "input_features"
        else x.to(DEVICE)
        for name, x in batch.items()
    }
    result = run(**call)
    named = {"loss": result.loss, "logits": result.logits, **result.gradients}
    return {name: value.detach() for name, value in named.items() if value is not None}
