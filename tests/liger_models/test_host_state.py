"""AdamW with its state on the host takes the same steps, bit for bit, and has an ordinary state dict."""

import copy
import pickle

import pytest
import torch
from torch import nn

from liger_models.kernels.optimizer.adamw import WEIGHTS
from liger_models.optim import host_state
from liger_models.optim.adamw import AdamW, state_bytes

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Make buckets small: more of them than lanes, with one parameter or several."""
    monkeypatch.setattr(host_state, "BUCKET", 512)


def network(device, dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 331), nn.LayerNorm(331), nn.Linear(331, 5)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model.to(device)


def train(model, optimizer, steps, first=0):
    device, dtype = model[0].weight.device, model[0].weight.dtype
    for step in range(first, first + steps):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x.to(device, dtype)).square().mean().backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 3e-3},
    ]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "weights", "moments"),
    [
        *((BF16, weights, "auto") for weights in WEIGHTS),
        (BF16, "master", "float32"),
        (torch.float32, "master", "auto"),
        (torch.float32, "master", "bfloat16"),
    ],
)
def test_every_step_equals_one_with_its_state_on_the_device(dtype, weights, moments, device):
    models = network(device, dtype), network(device, dtype)
    options = {"lr": 1e-2, "weights": weights, "moments": moments}
    optimizers = (
        AdamW(groups(models[0]), **options),
        AdamW(groups(models[1]), **options, state_device="cpu"),
    )
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 5)
    assert same(*models)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        state = optimizers[1].state[q]
        for name, value in optimizers[0].state[p].items():
            assert torch.equal(state[name].cpu(), value.cpu()), name
            assert name == "step" or state[name].device.type == "cpu"
            assert name == "step" or state[name].is_pinned() == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [("cpu", None), (None, "cpu"), ("cpu", "cpu")])
def test_a_state_can_move_between_host_and_device(way, device):
    model, straight = network(device, BF16), network(device, BF16)
    train(straight, AdamW(groups(straight), lr=1e-2), 4)
    first = AdamW(groups(model), lr=1e-2, state_device=way[0])
    train(model, first, 2)
    second = AdamW(groups(model), lr=1e-2, state_device=way[1])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state_device == way[1]
    train(model, second, 2, first=2)
    assert same(model, straight)


def test_a_copy_keeps_its_state_where_it_was():
    model = network("cpu", BF16)
    optimizer = AdamW(model.parameters(), state_device="cpu")
    train(model, optimizer, 1)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert again.state_device == "cpu"
        assert len(again.state) == len(optimizer.state)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="state_device is 'cuda'; expected 'cpu' or None"):
        AdamW(network("cpu", BF16).parameters(), state_device="cuda")


@pytest.mark.gpu
def test_the_state_of_shards_is_on_the_host_too(tmp_path):
    """FSDP2 with one process; test_optim.py has two processes on CPUs."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    meeting = (tmp_path / "meeting").as_uri()
    torch.distributed.init_process_group("nccl", init_method=meeting, rank=0, world_size=1)
    try:
        straight, model = network("cuda", BF16), fully_shard(network("cuda", BF16))
        train(straight, AdamW(groups(straight), lr=1e-2), 4)
        first, second = (AdamW(groups(model), lr=1e-2, state_device="cpu") for _ in range(2))
        train(model, first, 2)
        set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first))
        train(model, second, 2, first=2)
        for expected, p in zip(straight.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), expected)
            state = [value.to_local() for name, value in second.state[p].items() if name != "step"]
            assert all(value.is_pinned() and value.device.type == "cpu" for value in state)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_large_states_leave_the_gpu(monkeypatch):
    """Only three lanes are used, and slow copies do not change the result."""
    monkeypatch.setattr(host_state, "BUCKET", 1 << 20)
    models = [nn.Linear(4096, 4099, device="cuda", dtype=BF16) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = AdamW(models[0].parameters()), AdamW(models[1].parameters(), state_device="cpu")
    copy_ = host_state._copy

    def slowly(pairs):
        torch.cuda._sleep(1_000_000)
        copy_(pairs)

    monkeypatch.setattr(host_state, "_copy", slowly)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for p in model.parameters():
                drawn = torch.Generator("cuda").manual_seed(step)
                p.grad = torch.randn(p.shape, device="cuda", generator=drawn).to(BF16)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            optimizer.step()
    assert same(*models)
    more = torch.cuda.max_memory_allocated() - before
    assert more <= host_state.lane_bytes(state_bytes(BF16)) + (1 << 20)
