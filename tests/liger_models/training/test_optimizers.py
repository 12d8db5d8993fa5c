"""Optimizers of other libraries: their own steps on the reference's tensors, resumed to the bit."""

import importlib.util
import math

import pytest
import torch
from torch import nn

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError
from liger_models.optim.library import LibraryOptimizer
from liger_models.training.optimizer import BETAS, EPS, _forms, build_optimizer, optimizer_memory

needs_bitsandbytes = pytest.mark.skipif(
    not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed"
)
LIBRARIES = [pytest.param("adamw_8bit", marks=needs_bitsandbytes), "muon", "adafactor", "sgd"]
LR, DECAY = 0.01, 0.1


@pytest.fixture(scope="module")
def model_of_experts():
    """GLM-4.5's tiny form: fused projections, stacked experts, routers, norms of heads."""
    torch.manual_seed(0)
    model = liger_models.from_config(find_architecture("glm4_moe").tiny, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    return model


def test_heads_of_values_have_their_own_width():
    tiny = find_architecture("mimo_v2_flash").tiny
    model = liger_models.from_config({**tiny, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    weight = model.layers[0].self_attn.qkv_proj.weight
    rows = [ref.shape[0] for ref in _forms(model, by_head=True)[weight].refs()]
    assert rows == [tiny["head_dim"]] * 6 + [tiny["v_head_dim"]] * 2


def by_their_library(name, tensors):
    """The library's own optimizers of the reference's tensors, as its users call them."""
    ends = {n for n in tensors if "embed_tokens" in n or "lm_head" in n}
    hidden = [t for n, t in tensors.items() if t.ndim == 2 and n not in ends]
    embedded = [t for n, t in tensors.items() if t.ndim == 2 and n in ends]
    vectors = [t for t in tensors.values() if t.ndim < 2]
    options = {"lr": LR, "weight_decay": DECAY}
    groups = [
        {"params": [t for t in tensors.values() if t.ndim >= 2]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if name in ("muon", "muon_heads"):
        adamw = [{"params": embedded}, {"params": vectors, "weight_decay": 0.0}]
        return [
            torch.optim.Muon(hidden, momentum=0.95, adjust_lr_fn="match_rms_adamw", **options),
            torch.optim.AdamW(adamw, betas=BETAS, eps=EPS, **options),
        ]
    if name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(groups, betas=BETAS, eps=EPS, **options)]
    if name == "sgd":
        return [torch.optim.SGD(groups, momentum=0.9, **options)]
    return [torch.optim.Adafactor(groups, **options)]


@pytest.mark.parametrize("name", [*LIBRARIES, "muon_heads"])
def test_a_step_is_the_librarys_own_on_the_reference(name, model_of_experts):
    """The reference's tensors are separate: query, key, value, and each expert's three matrices."""
    head_dim = model_of_experts.layers[0].self_attn.spec.head_dim
    model = model_of_experts
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    # Blocks of 8 bits follow the tensors of the model that is trained.
    forms = {n: f for n, f in model.weight_map().items() if n in parameters and name != "adamw_8bit"}

    def separate(tensors):
        found = {}
        for n, tensor in tensors.items():
            found |= forms[n].write(tensor.detach()) if n in forms else {n: tensor.detach()}
        if name == "muon_heads":
            ends = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
            for n in [n for n in found if n.endswith(ends)]:
                found |= {f"{n}.{head}": rows for head, rows in enumerate(found.pop(n).split(head_dim))}
        return {n: t.clone() for n, t in found.items()}

    theirs = {n: nn.Parameter(t) for n, t in separate(parameters).items()}
    options = {"weights": "master", "moments": "auto", "seed": 0}
    ours, reference = (
        build_optimizer(model, name=name, lr=LR, weight_decay=DECAY, **options),
        by_their_library(name, theirs),
    )
    try:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            for n, gradient in separate({n: p.grad for n, p in parameters.items()}).items():
                theirs[n].grad = gradient
            norm = ours.clip_grad_norm(1.0)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(list(theirs.values()), 1.0))
            ours.step()
            for optimizer in reference:
                optimizer.step()
        for n, found in separate(parameters).items():
            # Muon rounds to bfloat16 in each of five iterations, whose slope is up to 3.4 at first; a number
            # that is rounded another way differs by 1/256. A step of all projections at once is another one.
            matrix = name.startswith("muon") and found.ndim == 2
            size = LR * 0.2 * math.sqrt(max(found.shape)) if matrix else 0.0
            bound = {"rtol": 1e-5, "atol": max(1e-6, size * 5 * 3.4 / 256)}
            torch.testing.assert_close(found, theirs[n].detach(), msg=lambda m, n=n: f"{n}: {m}", **bound)
    finally:
        with torch.no_grad():
            for n, p in parameters.items():
                p.copy_(before[n])
                p.grad = None


def test_muon_leaves_embeddings_heads_and_kernels_of_convolutions_to_adamw():
    model = liger_models.from_config(find_architecture("qwen3_vl_moe").tiny, device="meta", dropout=0.0)
    options = {"weights": "master", "moments": "auto", "seed": 0}
    optimizer = build_optimizer(model, name="muon", lr=LR, weight_decay=DECAY, **options)
    names = {p: n for n, p in model.named_parameters()}
    found = {True: set(), False: set()}
    for group in optimizer.param_groups:
        found[group["library"] == "muon"] |= {names[p] for p in group["params"] if p.ndim > 1}
    left = ("embed_tokens.weight", "lm_head.weight", "patch_embed.weight", "encoder.table.weight")
    assert len(found[False]) == len(left)
    assert all(name.endswith(left) for name in found[False])
    assert any("experts" in name for name in found[True])
    assert any("router" in name for name in found[True])


@pytest.mark.parametrize("name", ["muon", "adafactor", "sgd"])
def test_bfloat16_weights_keep_what_rounding_would_lose(name):
    """Weights of 1 under steps of a thousandth of bfloat16's spacing there."""
    start, generator = torch.ones(8, 8), torch.Generator().manual_seed(0)
    lr = {"muon": 4e-6, "adafactor": 4e-6, "sgd": 4e-7}[name]
    kept, lost = (nn.Parameter(start.bfloat16()) for _ in range(2))
    exact = nn.Parameter(start.clone())
    optimizers = []
    for parameter, weights in (kept, "master"), (lost, "plain"), (exact, "master"):
        group = {"params": [parameter], "library": name, "weight_decay": 0.0}
        optimizers.append(LibraryOptimizer([group], lr, BETAS, EPS, weights=weights, forms={}))
    gradient = torch.randn(8, 8, generator=generator).bfloat16()
    for _ in range(1500):
        for parameter, optimizer in zip((kept, lost, exact), optimizers, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    assert torch.equal(lost, start.bfloat16())
    assert torch.equal(kept, exact.bfloat16())
    assert not torch.equal(kept, lost)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_resumes_to_the_bit(name, run, settings, losses, tiny_checkpoint, bfloat16, tmp_path):
    options = {
        "model": bfloat16,
        "optimizer": name,
        "steps": 4,
        "keep": 0,
        "eval_fraction": 0.0,
        "eval_every": 0,
    }
    whole = run(settings(**options))
    first = tmp_path / "run" / "checkpoint-2"
    again = run(settings(resume=str(first), **options))
    assert losses(again) == losses(whole)
    assert len({loss for _, loss, *_ in losses(whole)}) == 4
    other = "sgd" if name != "sgd" else "adamw"
    with pytest.raises(ConfigError, match=f"was trained with optimizer={name}, but this run has {other}"):
        run(settings(resume=str(first), **options | {"optimizer": other}))


@pytest.fixture(scope="module")
def bfloat16(tiny_checkpoint):
    return str(tiny_checkpoint(torch.bfloat16))


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planner_counts_the_bytes_of_the_state(name, dtype, model_of_experts):
    model = liger_models.from_config(find_architecture("glm4_moe").tiny, device="cpu", dtype=dtype)
    options = {"lr": LR, "weight_decay": DECAY, "moments": "auto", "seed": 0, "weights": "master"}
    optimizer = build_optimizer(model, name=name, **options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    # Besides, there are numbers of steps, and the two tables of 256 numbers that all 8-bit moments share.
    state = [s for p in optimizer.state.values() for k, s in p.items() if "step" not in k and "qmap" not in k]
    found = sum(tensor.nbytes for tensor in state)
    per_element, work = optimizer_memory(model, name, dtype, "master", "auto")
    assert found == pytest.approx(per_element * sum(p.numel() for p in model.parameters()))
    assert work > 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optimizer": "lion"}, "optimizer is 'lion'; expected one of adamw, adamw_8bit, muon"),
        ({"optimizer": "sgd", "lr": None}, "optimizer sgd has no default learning rate; pass lr"),
        ({"optimizer": "muon", "weights": "stochastic"}, "expected one of master, plain with optimizer muon"),
        ({"optimizer": "sgd", "moments": "float32"}, "moments is 'float32'; expected auto"),
        (
            {"optimizer": "adafactor", "optimizer_memory": "host"},
            "optimizer_memory is 'host'; expected device",
        ),
        ({"optimizer": "muon", "lora": "r=4"}, "adapters are factors of one"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(settings, options, error):
    with pytest.raises(ConfigError, match=error):
        settings(**options)


def test_default_rates_follow_the_optimizer(settings):
    assert settings(lr=None, optimizer="muon").lr == 2e-5
    assert settings(lr=None, optimizer="adafactor").lr == pytest.approx(1e-3)
    assert settings(lr=None, optimizer="adafactor", objective="dpo").lr == pytest.approx(5e-5)


def test_parameters_that_bitsandbytes_cannot_number_are_refused():
    """It counts elements in 32 bits, and would update few of them."""
    stack = nn.Parameter(torch.empty(2**16, 2**15, device="meta", dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"shapes \[\(65536, 32768\)\] have more than 2147483647 elements"):
        LibraryOptimizer([{"params": [stack], "library": "adamw_8bit"}], lr=LR, forms={})
