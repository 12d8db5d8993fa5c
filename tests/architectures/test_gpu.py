"""On a GPU: as near to the truth as the reference in bfloat16 at real widths, within the promised memory."""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import spec_fields
from pairs import Pair, Run, copy_parameters, in_comparable_mode, map_like, names_of, reference_class
from torch import nn

import liger_models
from liger_models.architectures import Architecture, find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.activation_memory import LEVELS
from liger_models.layers.attention_backends import attend, attend_plain
from liger_models.layers.model import CausalLM
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import AttentionSpec, ModelSpec

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS, LENGTH = 2, 1024
PUBLISHED = Path(__file__).parent / "published"
# Llama-3-8B with 2 of its 32 layers.
WIDE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


@pytest.fixture(scope="module", autouse=True)
def exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def native(changes: dict[str, Any], dtype: torch.dtype, **options: Any) -> CausalLM:
    """A model on the GPU whose parameters are not yet set."""
    architecture = find_architecture("llama")
    with torch.device("meta"):
        model = CausalLM(architecture.spec(HFConfig.load({**WIDE, **changes})), **options)
    model.materialize("cuda", dtype)
    return model


def fill(model: nn.Module) -> None:
    """Matrices as in a fresh model, norms around one, biases and saved buffers around zero."""
    torch.manual_seed(0)
    parameters, saved = dict(model.named_parameters()), model.state_dict().keys()
    with torch.no_grad():
        for p in parameters.values():
            p.normal_(0.0, 0.02)
        for name, p in parameters.items():
            if p.dim() == 1 and not name.endswith("bias"):
                p.normal_(1.0, 0.2)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.normal_(0.0, 0.02)


def run(model: CausalLM, batch: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Loss, logits and gradients."""
    output = model(**batch, **options)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **gradients}


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.float() - truth).norm() / truth.norm()).item()


# -- every family at real widths

VOCABULARY, WINDOW, EXPERTS = 32768, 512, 16  # at most: what widths do not depend on is cut
PARAMETERS = 2_500_000_000  # and experts further: gradients of four batches are kept, thrice


def wide_config(family: str) -> dict[str, Any]:
    """The widest published config of a family up to 4096, with the first layers that show all its kinds."""
    own = []
    for path in PUBLISHED.glob("*.json"):
        published = json.loads(path.read_text())
        if published["config"]["model_type"] == family:  # without the dropout of which some speak
            own.append({**published["config"], **dict.fromkeys(published.get("dropout", ()), 0.0)})
    if not own:
        pytest.skip(f"tests/architectures/published has no config of {family}")
    config = min(own, key=lambda config: abs(config["hidden_size"] - 4096))
    spec = find_architecture(family).spec(HFConfig.load(config))
    kinds = list(dict.fromkeys(spec.blocks))
    layers = max(2, 1 + max(spec.blocks.index(kind) for kind in kinds))
    cut = {
        key: value[:layers] if isinstance(value, list) and len(value) == len(spec.blocks) else value
        for key, value in config.items()
    }
    cut |= {"num_hidden_layers": layers, "pad_token_id": None}
    if cut.get("moe_layers"):
        cut["moe_layers"] = [i for i in config["moe_layers"] if i < layers]
    if turning := cut.pop("rotary_dim", None):  # which transformers 5.17 does not read
        turns = {"rope_type": "default", "partial_rotary_factor": turning / cut["head_dim"]}
        cut["rope_parameters"] = turns | {"rope_theta": cut.pop("rope_theta")}
    for most, keys in (
        (VOCABULARY, ["vocab_size"]),
        (WINDOW, ["sliding_window"]),
        (EXPERTS, ["num_experts", "num_local_experts", "n_routed_experts"]),
    ):
        cut |= {key: min(most, cut[key]) for key in keys if cut.get(key)}
    fewest = 4 * cut.get("num_experts_per_tok", EXPERTS)  # to choose from
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        while cut.get(key, 0) > fewest and _parameters(cut) > PARAMETERS:
            cut[key] //= 2
    return cut


def _parameters(config: dict[str, Any]) -> int:
    return liger_models.from_config(config, device="meta").num_parameters()


def needs_eager(spec: ModelSpec) -> bool:
    """Whether the reference has nothing better than plain attention for it: soft caps and sinks."""
    return any(field.endswith((".softcap", ".sinks")) and value for _, field, value, _ in spec_fields(spec))


@pytest.fixture
def emptied():
    """The memory of one family is free before the next begins, whatever came of it."""
    gc.collect()
    torch.cuda.empty_cache()


def wide_reference(architecture: Architecture, config: dict[str, Any], dtype: torch.dtype, kind: str) -> Any:
    made = reference_class(architecture)
    settings = made.config_class(**copy.deepcopy(config))
    settings._attn_implementation = kind
    with torch.device(DEVICE):
        model = made(settings).to(dtype)
    return model


def results_of(run: Callable[..., Run], batches: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Of every batch logits, loss and gradients, by the checkpoint's names."""
    found = []
    for batch in batches:
        result = run(**batch)
        named = {"loss": result.loss, "logits": result.logits, **result.gradients}
        found.append({name: value.detach() for name, value in named.items()})
    return found


def test_bfloat16_at_real_widths_is_as_near_to_the_truth_as_the_reference(family, emptied):
    """Logits, loss and every gradient. The truth is the reference in float32, of the same weights."""
    architecture = find_architecture(family)
    config = wide_config(family)
    spec = architecture.spec(HFConfig.load(config))
    # A token near the border of two experts goes to one or the other by a rounding, in any program: of four
    # batches the differences average.
    count = 4 if any(block.mixture for block in spec.blocks) else 1
    ids = torch.randint(0, spec.vocab_size, (count, ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": rows, "labels": rows} for rows in ids.to(DEVICE)]

    reference = wide_reference(architecture, config, torch.bfloat16, "eager" if needs_eager(spec) else "sdpa")
    fill(reference)
    state = reference.state_dict()
    with torch.device("meta"):
        ours = CausalLM(spec)
    in_comparable_mode(spec, ours, reference)
    ours.materialize(DEVICE, torch.bfloat16)
    weight_map = map_like(architecture, ours, names_of(reference))
    copy_parameters(weight_map, ours, state)
    pair = Pair(architecture, config, ours, reference, weight_map)
    found, expected = results_of(pair.run_ours, batches), results_of(pair.run_reference, batches)
    del ours, reference
    pair.reference = wide_reference(architecture, config, torch.float32, "eager")
    pair.reference.load_state_dict(state)
    in_comparable_mode(spec, pair.reference)
    truth = results_of(pair.run_reference, batches)

    assert found[0].keys() == truth[0].keys() == expected[0].keys()
    farther = {}
    for name, exact in truth[0].items():
        own, theirs = (mean_distance(results, truth, name) for results in (found, expected))
        # Of tokens that go to another expert the errors are large and few: by chance the logarithm of the
        # ratio of two such means, of n numbers each, strays by 1 / sqrt(n).
        chance = math.exp(3 / (exact.numel() * count) ** 0.5) if count > 1 else 1.0
        # A loss is one number and can be near by luck, which does not bind: a rounding of a logit a token,
        # 2^-9 and of either sign, is what bfloat16 allows.
        luck = 2**-9 / (ROWS * LENGTH) ** 0.5 if name == "loss" else 0.0
        if not own <= max(1.1 * chance * theirs, luck):
            farther[name] = (own, theirs)
    assert not farther, farther


def mean_distance(found: list[dict[str, Any]], truth: list[dict[str, Any]], name: str) -> float:
    """The root mean square over batches."""
    squares = [distance(f[name], t[name]) ** 2 for f, t in zip(found, truth, strict=True)]
    return (sum(squares) / len(squares)) ** 0.5


@pytest.mark.parametrize("form", ["rows", "packed"])
def test_compiled_kernels_agree_with_the_reference_in_float32(form, family, make_pair, failures):
    pair = make_pair(family)
    lengths = [7, 1, 11, 12, 7]
    batch = pair.batch()
    if form == "packed":
        expected = pair.run_reference_by_document(**batch, lengths=lengths)
        batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    else:
        expected = pair.run_reference(**batch)
    pair.ours.cuda()
    found = pair.run_ours(**{name: value.cuda() for name, value in batch.items()})
    assert not failures(found.distances(expected))


# -- attention

PACKED = [0, 300, 300, 301, 1400, 2048]


def attention_results(backend: str, dtype: torch.dtype, window: int | None, form: str) -> list[torch.Tensor]:
    """Output and gradient of one call, on values that bfloat16 holds."""
    spec = AttentionSpec(32, 8, 128, 128**-0.5, window=window)
    cu_seqlens = torch.tensor(PACKED) if form == "packed" else None
    sequences = Sequences.from_call((ROWS, LENGTH), torch.device("cuda"), cu_seqlens=cu_seqlens)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (ROWS * LENGTH, heads, 128)
        return torch.randn(shape, device="cuda", generator=generator).bfloat16().to(dtype)

    packed, cotangent = draw(48).requires_grad_(), draw(32)
    q, k, v = (packed * 1).split([32, 8, 8], dim=1)  # strided views of one row, as in a model
    if backend == "eager":
        out = attend_plain(q, k, v, spec, sequences)
    else:
        out = attend(q, k, v, spec, sequences, backend)  # type: ignore[arg-type]
    out.backward(cotangent)
    assert packed.grad is not None
    return [out.detach(), packed.grad]


@pytest.mark.parametrize("backend", ["auto", "sdpa", "varlen", "triton", "masked"])
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("form", ["rows", "packed"])
def test_attention_backends_are_as_near_to_the_truth_as_the_plain_twin(form, window, backend):
    if backend == "sdpa" and (form == "packed" or window is not None):
        pytest.skip("not what this backend does")
    truth = attention_results("eager", torch.float32, window, form)
    plain = attention_results("eager", torch.bfloat16, window, form)
    found = attention_results(backend, torch.bfloat16, window, form)
    for ours, twin, exact in zip(found, plain, truth, strict=True):
        assert distance(ours, exact) <= 1.1 * distance(twin, exact)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("form", ["rows", "packed"])
def test_attention_in_float32_is_exact(form, window, backend):
    truth = attention_results("eager", torch.float32, window, form)
    for ours, exact in zip(attention_results(backend, torch.float32, window, form), truth, strict=True):
        assert distance(ours, exact) <= 1e-5


# -- activation memory


def test_levels_give_the_same_bits():
    # Plain attention, since the fused ones add up gradients in no fixed order in float32.
    model = native({"vocab_size": 1024}, torch.float32, attention="eager", activation_memory="all")
    fill(model)
    ids = torch.randint(0, 1024, (2, 256), device="cuda")
    batch = {"input_ids": ids, "labels": ids}

    def results() -> dict[str, torch.Tensor]:
        model.zero_grad()
        return {name: value.clone() for name, value in run(model, batch, return_logits=True).items()}

    expected = results()
    for levels in ("all", *LEVELS, ["mlp", "lean"]):
        model.set_activation_memory(levels)
        found = results()
        assert all(torch.equal(found[name], expected[name]) for name in expected), levels


def test_lean_keeps_less_than_100_kilobytes_a_token_and_layer():
    """Two sums of the residual stream, q|k|v, attention's output, gate and up, in bfloat16: 94.2 KB; and the
    statistics of norms and attention, 0.1 KB.
    """
    rows, length, kept = 1, 4096, []
    for layers in (2, 4):
        model = native({"vocab_size": 1024, "num_hidden_layers": layers}, torch.bfloat16)
        fill(model)
        ids = torch.randint(0, 1024, (rows, length), device="cuda")
        model(ids, labels=ids).loss.backward()  # workspaces and gradients exist from here on
        before = torch.cuda.memory_allocated()
        loss = model(ids, labels=ids).loss
        kept.append(torch.cuda.memory_allocated() - before)
        del model, loss
        gc.collect()
    assert (kept[1] - kept[0]) / 2 / (rows * length) <= 100_000


def test_each_level_keeps_less_than_the_one_before():
    model = native({"vocab_size": 1024}, torch.bfloat16)
    fill(model)
    ids = torch.randint(0, 1024, (1, 4096), device="cuda")
    kept = []
    for level in ("all", *LEVELS):  # the first call makes the workspaces
        model.set_activation_memory(level)
        before = torch.cuda.memory_allocated()
        loss = model(ids, labels=ids).loss
        kept.append(torch.cuda.memory_allocated() - before)
        del loss
    assert kept[1:] == sorted(kept[1:], reverse=True)
    assert len(set(kept[1:])) == len(LEVELS) - 1  # so few tokens are one tile


def test_a_spec_may_ask_for_a_window_on_the_gpu():
    """The whole model with windows and packed documents, against plain attention in float32."""
    results = []
    for attention, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("auto", torch.bfloat16)):
        model = native({"vocab_size": 1024}, dtype, attention=attention)
        for layer in model.layers:
            layer.self_attn.spec = replace(layer.self_attn.spec, window=100)
        fill(model)
        if dtype == torch.float32:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
            state = model.state_dict()
        else:
            model.load_state_dict(state)
        ids = torch.arange(1024, device="cuda").view(1, 1024) * 7 % 1024
        cu_seqlens = torch.tensor([0, 300, 1024])
        results.append(
            run(model, {"input_ids": ids, "labels": ids, "cu_seqlens": cu_seqlens}, return_logits=True)
        )
    truth, plain, found = results
    for name in truth:
        if name != "loss":
            assert distance(found[name], truth[name]) <= 1.1 * distance(plain[name], truth[name]), name
