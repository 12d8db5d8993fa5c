"""The mixture of experts against the blocks of transformers, and its weights against their checkpoints."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_models.convert.checkpoints.layout import Layout, canonical_forms
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.specs import MLPSpec, MoESpec

TOKENS, HIDDEN, INNER, SHARED, EXPERTS, TOP_K = 40, 16, 12, 20, 8, 3


@dataclass
class Disk:
    """A checkpoint's names of a block's tensors, written out (`{e}`: the expert), and the layout for them."""

    layout: Layout
    router: str = "mlp.gate.weight"
    gate_proj: str = "mlp.experts.{e}.gate_proj.weight"
    up_proj: str = "mlp.experts.{e}.up_proj.weight"
    down_proj: str = "mlp.experts.{e}.down_proj.weight"
    gate_up_proj: str | None = None
    inputs_first: bool = False
    alternating: bool = False


GATE = ("mlp.router.", "mlp.gate.")
ONE_BY_ONE = Disk(Layout((GATE,), root="mlp."))
STACKED = Disk(
    Layout((GATE,), whole=("experts.*",), root="mlp."),
    gate_up_proj="mlp.experts.gate_up_proj",
    down_proj="mlp.experts.down_proj",
)
INPUTS_FIRST = replace(
    STACKED, layout=replace(STACKED.layout, permuted=(("experts.*", "e i o -> e o i"),)), inputs_first=True
)
GPT_OSS = replace(
    INPUTS_FIRST,
    layout=replace(
        STACKED.layout,
        permuted=(
            ("experts.gate_up_proj", "e h (i 2) -> e (2 i) h"),
            ("experts.down_proj", "e i h -> e h i"),
        ),
    ),
    alternating=True,
)
MIXTRAL = Disk(
    Layout(
        (GATE, ("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
        root="mlp.",
    ),
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{e}.w1.weight",
    "block_sparse_moe.experts.{e}.w3.weight",
    "block_sparse_moe.experts.{e}.w2.weight",
)
GRANITE = Disk(
    Layout(
        (
            ("router.", "router.layer."),
            ("experts.gate_up_proj", "input_linear.weight"),
            ("experts.down_proj", "output_linear.weight"),
        ),
        whole=("experts.*",),
        root="block_sparse_moe.",
    ),
    "block_sparse_moe.router.layer.weight",
    gate_up_proj="block_sparse_moe.input_linear.weight",
    down_proj="block_sparse_moe.output_linear.weight",
)
BIAS = ("router.correction_bias", "gate.e_score_correction_bias")
DEEPSEEK_V3 = Disk(Layout((BIAS, GATE, ("shared_expert.", "shared_experts.")), root="mlp."))


@dataclass
class Family:
    """A block of transformers: its class, its config, and what our layer is made of to be the same."""

    module: str
    block: str
    config: dict[str, Any]
    spec: dict[str, Any] = field(default_factory=dict)
    disk: Disk = field(default_factory=lambda: ONE_BY_ONE)


QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": INNER}
DEEPSEEK = {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "n_shared_experts": 2}
FAMILIES = {
    "mixtral": Family("mixtral", "MixtralSparseMoeBlock", {"num_local_experts": EXPERTS}, disk=MIXTRAL),
    "qwen3_moe": Family("qwen3_moe", "Qwen3MoeSparseMoeBlock", QWEN | {"norm_topk_prob": True}),
    "qwen3_moe, not renormalised": Family(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock", QWEN | {"norm_topk_prob": False}, {"renormalize": False}
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        QWEN | {"norm_topk_prob": False, "shared_expert_intermediate_size": SHARED},
        {"renormalize": False, "shared_expert": MLPSpec(SHARED), "shared_gate": True},
    ),
    "olmoe": Family(
        "olmoe",
        "OlmoeSparseMoeBlock",
        {"num_experts": EXPERTS, "norm_topk_prob": False, "hidden_act": "gelu"},
        {"renormalize": False, "activation": "gelu"},
    ),
    "granitemoe": Family(
        "granitemoe",
        "GraniteMoeMoE",
        {"num_local_experts": EXPERTS},
        {"softmax_after_top_k": True, "renormalize": False},
        GRANITE,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3MoE",
        DEEPSEEK | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {
            "score": "sigmoid",
            "correction_bias": True,
            "num_groups": 4,
            "top_groups": 2,
            "routed_scaling_factor": 2.5,
            "float32_router": True,
            "shared_expert": MLPSpec(2 * INNER),
        },
        DEEPSEEK_V3,
    ),
    "glm4_moe": Family(
        "glm4_moe",
        "Glm4MoeMoE",
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        {
            "score": "sigmoid",
            "correction_bias": True,
            "renormalize": False,
            "float32_router": True,
            "shared_expert": MLPSpec(2 * INNER),
        },
        DEEPSEEK_V3,
    ),
}


def reference_block(family: Family, hidden_size: int = HIDDEN) -> nn.Module:
    modeling = pytest.importorskip(f"transformers.models.{family.module}.modeling_{family.module}")
    configuration = pytest.importorskip(f"transformers.models.{family.module}.configuration_{family.module}")
    config_class = next(
        value
        for name, value in vars(configuration).items()
        if name.endswith("Config") and getattr(value, "model_type", None) == family.module
    )
    config = config_class(
        hidden_size=hidden_size, intermediate_size=INNER, num_experts_per_tok=TOP_K, **family.config
    )
    config._experts_implementation = "eager"
    return getattr(modeling, family.block)(config)


def spec_of(family: Family) -> MoESpec:
    return MoESpec(EXPERTS, TOP_K, INNER, **family.spec)


def as_checkpoint(tensors: dict[str, torch.Tensor], disk: Disk) -> dict[str, torch.Tensor]:
    """A block's tensors (or their gradients) under the names of its family's checkpoints, cut by hand."""
    checkpoint = {}
    for name, tensor in tensors.items():
        if name in ("gate.weight", "router.weight"):
            checkpoint[disk.router] = tensor
        elif not name.startswith("experts."):
            checkpoint[f"mlp.{name}"] = tensor
        elif disk.gate_up_proj is not None:
            checkpoint[disk.gate_up_proj if "gate_up" in name else disk.down_proj] = tensor
        else:
            for e, matrix in enumerate(tensor):
                if "gate_up" in name:
                    checkpoint[disk.gate_proj.format(e=e)] = matrix[:INNER]
                    checkpoint[disk.up_proj.format(e=e)] = matrix[INNER:]
                else:
                    checkpoint[disk.down_proj.format(e=e)] = matrix
    return checkpoint


def load(layer: MixtureOfExperts, disk: Disk, tensors: dict[str, torch.Tensor]) -> None:
    expressions = disk.layout.weight_map(canonical_forms(layer))
    assert checkpoint_shapes(expressions).keys() == tensors.keys()
    own = layer.state_dict()
    assert expressions.keys() == own.keys()
    for name, expression in expressions.items():
        own[name].copy_(expression.read(tensors.__getitem__))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_values_and_every_gradient_match_transformers(family, randomised):
    block = randomised(reference_block(family))
    layer = MixtureOfExperts(HIDDEN, spec_of(family))
    load(layer, family.disk, as_checkpoint(dict(block.state_dict()), family.disk))
    x = torch.randn(2, TOKENS // 2, HIDDEN)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = block(theirs), layer(ours.flatten(0, 1)).view_as(x)
    upstream = torch.randn_like(x)
    expected.backward(upstream)
    found.backward(upstream)

    gradients = {name: p.grad for name, p in block.named_parameters()}
    expected_gradients = as_checkpoint(gradients, family.disk)
    found_gradients = {}
    parameters = dict(layer.named_parameters())
    for name, expression in family.disk.layout.weight_map(canonical_forms(layer)).items():
        if name in parameters:
            found_gradients |= expression.write(parameters[name].grad)
    assert found_gradients.keys() == expected_gradients.keys()
    pairs = {"y": (found, expected), "x": (ours.grad, theirs.grad)}
    pairs |= {name: (grad, expected_gradients[name]) for name, grad in found_gradients.items()}
    for name, (a, b) in pairs.items():
        assert (a - b).norm() <= 1e-5 * b.norm(), name
    assert layer.experts.down_proj.grad.flatten(1).any(1).sum() > TOP_K  # tokens chose different experts


# Weights


@pytest.mark.parametrize(
    "disk",
    [ONE_BY_ONE, STACKED, INPUTS_FIRST, GPT_OSS, MIXTRAL],
    ids=["one by one", "stacked", "inputs first", "inputs first, gate and up alternating", "renamed"],
)
def test_every_layout_of_a_checkpoint_round_trips_bit_for_bit(disk, randomised):
    spec = MoESpec(
        EXPERTS,
        TOP_K,
        INNER,
        correction_bias=True,
        shared_expert=MLPSpec(SHARED, bias=True),
        shared_gate=True,
    )
    layer = randomised(MixtureOfExperts(HIDDEN, spec))
    expressions = disk.layout.weight_map(canonical_forms(layer))
    assert expressions.keys() == layer.state_dict().keys()
    written = {}
    for name, tensor in layer.state_dict().items():
        written |= expressions[name].write(tensor)
    assert len(written) == len(checkpoint_shapes(expressions))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(expressions[name].read(written.__getitem__), tensor)
    gate_up, down = layer.experts.gate_up_proj[3], layer.experts.down_proj[3]
    if disk.alternating:
        gate_up = torch.stack(gate_up.split(INNER), dim=1).flatten(0, 1)
    if disk.inputs_first:
        gate_up, down = gate_up.T, down.T

    def third(name):
        return written[name.replace("{e}", "3")] if "{e}" in name else written[name][3]

    assert torch.equal(third(disk.down_proj), down)
    if disk.gate_up_proj is not None:
        assert torch.equal(third(disk.gate_up_proj), gate_up)
    else:
        assert torch.equal(third(disk.gate_proj), gate_up[:INNER])
        assert torch.equal(third(disk.up_proj), gate_up[INNER:])


# The router


@pytest.mark.parametrize("autocast", [False, True])
def test_a_float32_router_computes_in_float32_and_keeps_no_copies(autocast, randomised, moe_spec):
    layer = randomised(MixtureOfExperts(HIDDEN, moe_spec)).bfloat16()
    router = layer.router
    x = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        logits, _, _ = router(x)
    wide = [t.detach().float().requires_grad_() for t in (x, router.weight)]
    expected = F.linear(*wide)
    assert torch.equal(logits, expected)
    assert not any(t.dtype == torch.float32 and t.shape == x.shape for t in kept)
    upstream = torch.randn_like(logits)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = torch.autograd.grad(logits, [x, router.weight], upstream)
    for a, b in zip(found, torch.autograd.grad(expected, wide, upstream), strict=True):
        assert torch.equal(a, b.bfloat16())


def test_a_float32_router_refuses_a_graph_of_its_gradient(randomised, moe_spec):
    router = randomised(MixtureOfExperts(HIDDEN, moe_spec)).router
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(router(x)[0].sum(), x, create_graph=True)


def test_a_router_in_the_models_dtype_does_not(randomised):
    layer = randomised(MixtureOfExperts(HIDDEN, MoESpec(EXPERTS, TOP_K, INNER))).bfloat16()
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    logits, weights, experts = layer.router(x)
    assert torch.equal(logits, F.linear(x, layer.router.weight))
    assert (logits.dtype, weights.dtype, experts.dtype) == (torch.bfloat16, torch.float32, torch.int32)
    assert layer(x).dtype == torch.bfloat16


# The rest


def test_it_passes_gradcheck_in_float64(randomised, moe_spec):
    sizes = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 3}
    spec = replace(moe_spec, **sizes, shared_expert=MLPSpec(2))
    layer = randomised(MixtureOfExperts(5, spec)).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    trained = [p for p in layer.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *trained), fast_mode=True)


def test_zero_tokens_and_one_token_work(randomised, moe_spec):
    layer = randomised(MixtureOfExperts(HIDDEN, moe_spec))
    x = torch.randn(9, HIDDEN)
    y = layer(x)
    assert layer(x[:0]).shape == (0, HIDDEN)
    # Sums over HIDDEN and INNER elements in another order.
    torch.testing.assert_close(layer(x[4:5]), y[4:5], rtol=1e-5, atol=1e-6)


def test_incompatible_inputs_raise_clear_errors():
    with pytest.raises(ValueError, match="shared_gate and shared_scale belong to a shared expert"):
        MixtureOfExperts(HIDDEN, MoESpec(EXPERTS, TOP_K, INNER, shared_gate=True))
    with pytest.raises(ValueError, match="top_k is 9; expected 1 to 8"):
        MixtureOfExperts(HIDDEN, MoESpec(EXPERTS, 9, INNER))(torch.randn(3, HIDDEN))


@pytest.mark.gpu
def test_on_a_gpu_it_is_as_accurate_as_transformers(randomised):
    """Both in bfloat16, against ours in float64."""
    device, tokens, hidden = "cuda", 2000, 256
    family = FAMILIES["qwen2_moe"]
    block = randomised(reference_block(family, hidden)).to(device, torch.bfloat16)
    layer = MixtureOfExperts(hidden, spec_of(family)).to(device, torch.bfloat16)
    load(layer, family.disk, as_checkpoint(dict(block.state_dict()), family.disk))
    truth = copy.deepcopy(layer).double()
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    # Where logits nearly tie, rounding decides the expert: tokens for which the three models differ get no
    # gradient.
    choices = block.gate(x)[2], layer.router(x)[2], truth.router(x.double())[2]
    theirs, ours, true = (choice.long().sort(1).values for choice in choices)
    same = ((theirs == true) & (ours == true)).all(1)
    assert same.float().mean() > 0.9
    upstream = torch.randn(tokens, hidden, device=device) * same[:, None]

    def outputs(module, names):
        inputs = x.clone().to(next(module.parameters()).dtype).requires_grad_()
        y = module(inputs[None])[0] if module is block else module(inputs)
        y.backward(upstream.to(y.dtype))
        parameters = dict(module.named_parameters())
        return [y[same], inputs.grad, *(parameters[name].grad for name in names)]

    names = ["router.weight", "experts.gate_up_proj", "experts.down_proj", "shared_expert_gate.weight"]
    their_names = ["gate.weight", *names[1:]]
    results = zip(outputs(layer, names), outputs(block, their_names), outputs(truth, names), strict=True)
    for name, (found, other, true) in zip(["y", "x", *names], results, strict=True):
        error, other_error = ((t.double() - true).norm() for t in (found, other))
        assert error <= 1.1 * other_error, name


def test_experts_that_return_their_input_equal_their_formula():
    torch.manual_seed(0)
    spec = MoESpec(EXPERTS, TOP_K, INNER, renormalize=False, correction_bias=True, identity_experts=5)
    moe = MixtureOfExperts(HIDDEN, spec).double()
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    scores = F.linear(x, moe.router.weight).softmax(-1)
    chosen = (scores + moe.router.correction_bias).topk(TOP_K).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    gate, up = torch.einsum("th,eih->tei", x, moe.experts.gate_up_proj).chunk(2, -1)
    of_mlps = torch.einsum("tei,ehi->teh", F.silu(gate) * up, moe.experts.down_proj)
    expected = torch.einsum("te,teh->th", weights[:, :EXPERTS], of_mlps)
    expected = expected + x * weights[:, EXPERTS:].sum(1, keepdim=True)
    assert 0 < (chosen >= EXPERTS).sum() < chosen.numel()
    inputs = x, moe.router.weight, moe.experts.gate_up_proj, moe.experts.down_proj
    cotangent = torch.randn_like(x)
    found = moe(x)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        *(torch.autograd.grad(y, inputs, cotangent) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
