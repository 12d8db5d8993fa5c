"""liger_models.optim.AdamW in custom loops: equality with torch's AdamW, clipping, states, shards."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from liger_models.kernels.optimizer.adamw import WEIGHTS
from liger_models.optim.adamw import AdamW
from liger_models.optim.library import LibraryOptimizer

RANK = Path(__file__).with_name("optimizer_rank.py")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def network(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 5)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def batches(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 7, generator=generator).to(dtype) for _ in range(steps)]


def train(model, optimizer, data, clip=None):
    for x in data:
        model(x).square().mean().backward()
        if clip is not None:
            clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def bits(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 400), (torch.float64, 400)])
def test_it_matches_torchs_adamw_with_groups_and_a_schedule(dtype, roundings):
    """20 steps of at most 0.01, with 20 roundings each of a weight of up to 4.

    A step itself rounds about ten times, and the gradients are of weights that differ by as much."""
    models = network(dtype), network(dtype)
    optimizers = AdamW(groups(models[0]), **OPTIONS), torch.optim.AdamW(groups(models[1]), **OPTIONS)
    for model, optimizer in zip(models, optimizers, strict=True):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for x in batches(20, dtype):
            train(model, optimizer, [x])
            schedule.step()
    difference = (bits(models[0]) - bits(models[1])).abs().max()
    assert difference <= roundings * torch.finfo(dtype).eps / 2 * bits(models[1]).abs().max()


def test_parameters_without_a_gradient_do_not_change():
    model = network()
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model[0].parameters()]
    optimizer = AdamW(model.parameters(), **OPTIONS)
    train(model, optimizer, batches(2))
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True))
    assert set(optimizer.state) == {*model[1].parameters(), *model[2].parameters()}


# Clipping.


def test_clipping_matches_torch_without_modifying_the_gradients():
    models = network(), network()
    optimizers = (
        AdamW(models[0].parameters(), **OPTIONS),
        torch.optim.AdamW(models[1].parameters(), **OPTIONS),
    )
    norms = [], []

    def ours(model, optimizer):
        before = [p.grad.clone() for p in model.parameters()]
        norms[0].append(optimizer.clip_grad_norm(0.1).item())
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))

    train(models[0], optimizers[0], batches(10), ours)
    train(
        models[1],
        optimizers[1],
        batches(10),
        lambda model, _: norms[1].append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()),
    )
    assert min(norms[0]) > 0.2  # so that clipping applied
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    # A factor rounds once more than clipping the gradient; the rest is as without clipping.
    assert (bits(models[0]) - bits(models[1])).abs().max() <= 400 * 2.0**-24 * bits(models[1]).abs().max()


def test_the_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16():
    parameters = [nn.Parameter(torch.zeros(n, dtype=BF16)) for n in (1, 0, 1000, 77)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    norm = AdamW(parameters).clip_grad_norm(1.0)
    true = sum(p.grad.double().square().sum() for p in parameters).sqrt()
    assert norm.item() == pytest.approx(true.item(), rel=1e-6)
    assert norm.dtype == torch.float32


def test_a_norm_below_the_limit_changes_nothing():
    models = network(), network()
    train(models[0], AdamW(models[0].parameters()), batches(2), lambda _, o: o.clip_grad_norm(1e6))
    train(models[1], AdamW(models[1].parameters()), batches(2))
    assert torch.equal(bits(models[0]), bits(models[1]))


@pytest.mark.parametrize("forget", ["step", "zero_grad"])
def test_a_clipping_factor_applies_to_one_step(forget):
    model = network()
    optimizer = AdamW(model.parameters(), **OPTIONS)
    (x,) = batches(1)
    model(x).square().mean().backward()
    norm = optimizer.clip_grad_norm(1e-3)
    if forget == "step":
        optimizer.step()
    else:
        optimizer.zero_grad()
        model(x).square().mean().backward()
    optimizer.step()
    moments = torch.cat([s["exp_avg"].flatten() for s in optimizer.state.values()])
    # Unclipped, a first moment is 1 - beta1 times the gradient; the previous moment is negligible.
    assert moments.norm() > 0.09 * norm


def test_without_gradients_the_norm_is_zero():
    assert AdamW(network().parameters()).clip_grad_norm(1.0).item() == 0.0


# GradScaler.


def test_a_grad_scaler_scales_and_skips():
    models = network(), network()
    optimizers = [AdamW(m.parameters(), **OPTIONS) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    data = batches(6)
    for i, x in enumerate(data):
        loss = models[0](x).square().mean()
        scaler.scale(loss).backward()
        if i == 3:
            models[0][0].weight.grad[2, 2] = float("inf")
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
    train(models[1], optimizers[1], [x for i, x in enumerate(data) if i != 3])
    # A loss scale that is a power of two is removed exactly.
    assert torch.equal(bits(models[0]), bits(models[1]))
    assert scaler.get_scale() == 512.0
    assert {state["step"].item() for state in optimizers[0].state.values()} == {5.0}


def test_clipping_works_with_a_grad_scaler():
    models = network(), network()
    optimizers = [AdamW(m.parameters(), **OPTIONS) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in batches(3):
        scaler.scale(models[0](x).square().mean()).backward()
        scaler.unscale_(optimizers[0])
        optimizers[0].clip_grad_norm(0.1)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
    train(models[1], optimizers[1], batches(3), lambda _, o: o.clip_grad_norm(0.1))
    assert torch.equal(bits(models[0]), bits(models[1]))


@pytest.mark.parametrize("library", ["muon", "adafactor", "sgd"])
def test_a_grad_scaler_scales_and_skips_steps_of_libraries(library):
    def optimizer_of(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return LibraryOptimizer([{"params": matrices, "library": library}, {"params": others}], forms={})

    models = network(), network()
    optimizers = [optimizer_of(m) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = batches(4)
    for i, x in enumerate(data):
        scaler.scale(models[0](x).square().mean()).backward()
        if i == 2:
            models[0][0].weight.grad[2, 2] = float("inf")
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
    train(models[1], optimizers[1], [x for i, x in enumerate(data) if i != 2])
    assert torch.equal(bits(models[0]), bits(models[1]))


# States.


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", ["auto", "float32"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(weights, moments, tmp_path):
    options = {**OPTIONS, "weights": weights, "moments": moments, "seed": 5}
    data = batches(6, BF16)
    unstopped, stopped = network(BF16), network(BF16)
    train(unstopped, AdamW(groups(unstopped), **options), data)

    optimizer = AdamW(groups(stopped), **options)
    train(stopped, optimizer, data[:3])
    torch.save({"model": stopped.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt")
    resumed = network(BF16)
    resumed.load_state_dict(saved["model"])
    again = AdamW(groups(resumed))  # the settings are in the state
    again.load_state_dict(saved["optimizer"])
    for a, b in zip(stopped.parameters(), resumed.parameters(), strict=True):
        old, new = optimizer.state[a], again.state[b]
        assert {k: v.dtype for k, v in old.items()} == {k: v.dtype for k, v in new.items()}
        assert all(torch.equal(old[name], new[name]) for name in old)
    train(resumed, again, data[3:])
    assert torch.equal(bits(resumed), bits(unstopped))


def test_another_seed_rounds_differently():
    results = []
    for seed in (0, 0, 1):
        model = network(BF16)
        train(model, AdamW(model.parameters(), weights="stochastic", seed=seed), batches(3, BF16))
        results.append(bits(model))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_equal_parameters_are_rounded_independently():
    parameters = [nn.Parameter(torch.ones(1000, dtype=BF16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    AdamW([{"params": [parameter]} for parameter in parameters], weights="stochastic").step()
    assert not torch.equal(*parameters)


def test_copied_and_pickled_optimizers_keep_working():
    model = network()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, batches(1))
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for parameter in clone.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        clone.clip_grad_norm(1.0)
        clone.step()


def test_the_state_of_torchs_adamw_can_be_loaded():
    models = network(), network()
    others = torch.optim.AdamW(models[0].parameters(), **OPTIONS), AdamW(models[1].parameters())
    train(models[0], others[0], batches(3))
    models[1].load_state_dict(models[0].state_dict())
    others[1].load_state_dict(copy.deepcopy(others[0].state_dict()))  # torch keeps references to the tensors
    for model, optimizer in zip(models, others, strict=True):
        train(model, optimizer, batches(3))
    assert (bits(models[0]) - bits(models[1])).abs().max() <= 60 * 2.0**-24 * bits(models[0]).abs().max()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.update(exp_avg=s["exp_avg"][1:]), r"exp_avg of parameter 0 is torch.bfloat16 \(32, 7\)"),
        (lambda s: s.update(exp_avg=s["exp_avg"].float()), "expected torch.bfloat16"),
        (lambda s: s.pop("residue"), "has exp_avg, exp_avg_sq, residue, step"),
        (lambda s: s.update(max_exp_avg_sq=s["exp_avg"]), "is exp_avg, exp_avg_sq, max_exp_avg_sq"),
    ],
)
def test_a_mismatched_state_is_refused(damage, message):
    model = network(BF16)
    optimizer = AdamW(model.parameters(), weights="master")
    train(model, optimizer, batches(1, BF16))
    state = copy.deepcopy(optimizer.state_dict())
    damage(state["state"][0])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)


# Supported and unsupported parameters.


def test_a_transposed_parameter_is_updated_in_place():
    straight, transposed = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 5).T)
    transposed.data.copy_(straight.data)
    for parameter in (straight, transposed):
        optimizer = AdamW([parameter], **OPTIONS)
        for factor in (1.0, -2.0):
            parameter.grad = factor * torch.arange(15.0).view(5, 3)
            optimizer.step()
    assert transposed.stride() == (1, 5)
    assert torch.equal(straight, transposed)


def test_a_closure_computes_the_loss():
    model = network()
    optimizer = AdamW(model.parameters())

    def closure():
        loss = model(batches(1)[0]).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert model[0].weight.grad is not None


def test_a_step_between_forward_and_backward_is_detected():
    model = network()
    optimizer = AdamW(model.parameters())
    loss = model(batches(1)[0]).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("parameter", "options", "error", "message"),
    [
        (torch.zeros(3).half(), {}, TypeError, "load the model in bfloat16 or float32"),
        (torch.zeros(3, dtype=torch.complex64), {}, TypeError, "expected float32, bfloat16 or float64"),
        (torch.zeros(6)[::2], {}, ValueError, "has gaps"),
        (torch.zeros(1).expand(3), {}, ValueError, "has gaps or overlaps"),
        (torch.zeros(3), {"weights": "kahan"}, ValueError, "expected one of stochastic"),
        (torch.zeros(3), {"moments": "int8"}, ValueError, "expected one of auto, float32, bfloat16"),
        (torch.zeros(3), {"lr": -1.0}, ValueError, "lr is -1.0; expected 0 or more"),
        (torch.zeros(3), {"lr": torch.tensor(0.1)}, TypeError, "lr is a tensor"),
        (torch.zeros(3), {"betas": (0.9, 1.0)}, ValueError, "betas is"),
        (torch.zeros(3), {"seed": 1 << 63}, ValueError, "a 64-bit integer"),
    ],
)
def test_unsupported_parameters_are_refused_at_once(parameter, options, error, message):
    with pytest.raises(error, match=message):
        AdamW([nn.Parameter(parameter)], **options)


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="is sparse"):
        AdamW(table.parameters()).step()


# Shards.


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    """Both ranks train on the same batches, so the mean of their gradients equals each of them."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    return run_ranks(RANK, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.slow
def test_two_ranks_with_fsdp2_have_the_bits_of_one_process(of_two_ranks):
    for weights in ("stochastic None", "master None", "master cpu"):
        for one in (result[weights] for result in of_two_ranks):
            assert one["norms"] == pytest.approx(one["expected norms"], rel=1e-6)
            for name, parameter in one["expected"].items():
                assert torch.equal(one["sharded"][name], parameter), (weights, name)
                assert torch.equal(one["resumed"][name], parameter), (weights, name)


@pytest.mark.slow
def test_optimizers_of_libraries_update_shards_as_they_update_the_whole(of_two_ranks):
    """Up to float32's rounding; of Muon's matrix to 5% of a step, whose numbers are rounded to bfloat16."""
    for result in of_two_ranks:
        for name, (sharded, expected, state) in result["libraries"].items():
            steps = 3 * 1e-2 * 0.2 if name.startswith("muon") else 0.0
            for key, parameter in expected.items():
                torch.testing.assert_close(sharded[key], parameter, rtol=1e-5, atol=max(1e-6, 0.05 * steps))
            kept = {"adamw_8bit": ["state1", "state2"], "adafactor": []}.get(name, ["momentum_buffer"])
            assert state == kept, name


@pytest.mark.slow
def test_muon_orthogonalises_on_shards_as_on_whole_matrices(of_two_ranks):
    """Only columns are gathered. Products of another batch may round otherwise: 5% of a step."""
    for result in of_two_ranks:
        expected, _ = result["muon"]["alone"]
        for name in ("rows", "replicated rows", "columns"):
            found, gathered = result["muon"][name]
            assert gathered == (15 if name == "columns" else 0), name
            for key, parameter in expected.items():
                torch.testing.assert_close(
                    found[key], parameter, rtol=2**-8, atol=0.05 * 3 * 1e-2, msg=f"{name} {key}"
                )
