"""On a GPU, bfloat16 results at real widths are as accurate as the reference's, in the promised memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairs import Pair
from wide import (  # noqa: F401  (some are fixtures)
    batches_of,
    distance,
    emptied,
    exact_float32,
    farther_than_reference,
    fill,
    wide_config,
)

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.attention.backends import attend, attend_plain
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS, LENGTH = 2, 1024
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


def native(changes: dict[str, Any], dtype: torch.dtype, **options: Any) -> CausalLM:
    """A model on the GPU whose parameters are not yet set."""
    architecture = find_architecture("llama")
    with torch.device("meta"):
        model = CausalLM(architecture.spec(HFConfig.load({**WIDE, **changes})), **options)
    model.materialize("cuda", dtype)
    return model


def run(model: CausalLM, batch: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Loss, logits and gradients."""
    output = model(**batch, **options)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **gradients}


# -- every family at real widths


def test_bfloat16_at_real_widths_is_as_accurate_as_the_reference(family, emptied):  # noqa: F811
    """Logits, loss and every gradient. The truth is the reference in float32, of the same weights."""

    def batches(pair: Pair) -> list[dict[str, torch.Tensor]]:
        spec = pair.ours.spec
        size = (batches_of(spec), ROWS, min(LENGTH, spec.position_limit or LENGTH))
        ids = torch.randint(0, pair.vocab_size, size, generator=torch.Generator().manual_seed(0))
        return [{"input_ids": rows, "labels": rows} for rows in ids]

    assert not farther_than_reference(family, wide_config(family), batches)


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
def test_attention_backends_are_as_accurate_as_the_plain_twin(form, window, backend):
    if backend == "sdpa" and (form == "packed" or window is not None):
        pytest.skip("not supported by this backend")
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
    # Plain attention, since fused kernels sum float32 gradients in no fixed order.
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


def test_lean_keeps_less_than_100_kilobytes_per_token_and_layer():
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
    assert len(set(kept[1:])) == len(LEVELS) - 1  # so few tokens fit in one tile


def test_windows_on_the_gpu_are_as_accurate_as_plain_attention():
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
