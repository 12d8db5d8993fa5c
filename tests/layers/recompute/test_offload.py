"""Activations on the host come back unchanged, in time, into memory without other users."""

from __future__ import annotations

import contextlib

import pytest
import torch

from liger_models.layers.attention import backends, kept_output
from liger_models.layers.memory import Step, StepMemory
from liger_models.layers.recompute import activation_memory, offload
from liger_models.layers.recompute.offload import Offload, host_bytes

GIB = 2**30
needs_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def no_memory_from_before(monkeypatch):
    monkeypatch.setattr(offload, "_MEMORIES", {})


def batch(device, rows=2, seq=11, seed=0):
    ids = torch.randint(0, 61, (rows, seq), generator=torch.Generator().manual_seed(seed))
    return ids.to(device)


def gradients(model, *batches):
    model.zero_grad()
    losses = [model(ids, labels=ids).loss for ids in batches]
    sum(losses).backward()
    return [p.grad.clone() for p in model.parameters()]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def buffers():
    """The number of buffers without a layer."""
    return sum(len(free) for memory in offload._MEMORIES.values() for free in memory.free.values())


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_are_reused_and_released(device, make_model, monkeypatch):
    monkeypatch.setattr(offload, "CHUNK", 1024)  # the input of a layer has 2816 bytes, so three buffers
    monkeypatch.setattr(offload, "_LEAST", 64)
    model = make_model(activation_memory="checkpoint").to(device)
    expected = gradients(model, batch(device))
    model.set_activation_memory("offload")
    for _ in range(3):
        assert same(gradients(model, batch(device)), expected)
        assert buffers() == 3 * 3
    loss = model(batch(device), labels=batch(device)).loss
    assert buffers() == 0
    del loss
    assert buffers() == 9
    model.set_activation_memory("lean")
    assert buffers() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("here", "there"), [("checkpoint", "offload"), ("lean", "lean@host")])
def test_two_calls_may_precede_their_backward_passes(here, there, device, make_model):
    model = make_model(6, activation_memory=here).to(device)
    batches = batch(device, 1), batch(device, 2, seed=1)
    expected = gradients(model, *batches)
    model.set_activation_memory(there)
    assert same(gradients(model, *batches), expected)
    # In the other order, with each graph used twice.
    model.zero_grad()
    losses = [model(ids, labels=ids).loss for ids in batches]
    for loss in losses:
        loss.backward(retain_graph=True)
    del loss
    assert same([p.grad for p in model.parameters()], expected)
    model.zero_grad()
    for loss in losses:
        loss.backward()
    assert same([p.grad for p in model.parameters()], expected)


def test_the_backward_pass_of_a_layer_prefetches_the_previous_one(make_model, monkeypatch):
    log = []
    fetch, get = offload.OnHost.fetch, offload.OnHost.get

    def noted(name, function):
        def run(kept):
            if name == "get" or kept._there is None:
                log.append((name, numbers.setdefault(id(kept), len(numbers))))
            return function(kept)

        return run

    numbers: dict[int, int] = {}
    monkeypatch.setattr(offload.OnHost, "fetch", noted("fetch", fetch))
    monkeypatch.setattr(offload.OnHost, "get", noted("get", get))
    model = make_model(4, activation_memory=["offload", "lean", "offload", "offload"])
    gradients(model, batch("cpu"))
    # The input of the last layer was not released in between.
    assert log == [("get", 0), ("fetch", 1), ("get", 1), ("fetch", 2), ("get", 2)]


def test_without_gradients_nothing_is_copied(make_model):
    model = make_model(activation_memory="offload")
    with torch.no_grad():
        model(batch("cpu"))
    assert not offload._MEMORIES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("level", "saved"), [("offload", 0), ("lean@host", 1)])
def test_a_modified_input_is_refused(level, saved, device, make_model):
    """The copy of it may have been on its way."""

    def edit(module, args):
        args[saved].mul_(1.5)

    model = make_model(activation_memory=level).to(device)
    model.layers[1].register_forward_pre_hook(edit)
    ids = batch(device)
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_the_host_needs_the_reported_bytes():
    assert host_bytes(3 * offload.CHUNK) == 3 * offload.CHUNK
    assert host_bytes(offload.CHUNK + 5000) == offload.CHUNK + 8192
    assert host_bytes(1) == 4096


def attention_calls(function):
    """The number of attention's forward passes while `function()` runs."""
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(event.name == forward for event in profile.events())


@pytest.fixture
def long_enough(monkeypatch):
    """Let attention's outputs for documents of at least 8 tokens go to the host."""
    monkeypatch.setattr(kept_output, "LEAST_TOKENS", 8)


@pytest.mark.parametrize(("longest_at_once", "groups"), [(64, 1), (16, 2)])
def test_attention_of_long_documents_runs_once(longest_at_once, groups, make_model, long_enough, monkeypatch):
    monkeypatch.setattr(backends, "LONG", longest_at_once)
    model = make_model(activation_memory="tiled")
    ids = batch("cpu")
    expected = gradients(model, ids)
    assert attention_calls(lambda: gradients(model, ids)) == 2 * 3 * groups
    model.set_activation_memory("offload")
    assert same(gradients(model, ids), expected)
    assert attention_calls(lambda: gradients(model, ids)) == 3 * groups
    assert attention_calls(lambda: gradients(model, ids[:, :7])) == 2 * 3


def test_results_come_back_for_every_backward_pass_and_in_any_order(make_model, long_enough):
    model = make_model(activation_memory="checkpoint")
    batches = batch("cpu", 1), batch("cpu", 2, seed=1)
    expected = gradients(model, *batches)
    model.set_activation_memory("offload")
    for _ in range(2):
        model.zero_grad()
        losses = [model(ids, labels=ids).loss for ids in batches]
        for loss in losses:
            loss.backward(retain_graph=True)
        assert same([p.grad for p in model.parameters()], expected)
    model.zero_grad()
    for loss in losses:
        loss.backward()
    assert same([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize(("tokens", "window"), [(24, None), (96, None), (24, 7)])
def test_the_host_memory_of_a_pass_is_planned(tokens, window, make_model, long_enough, monkeypatch):
    monkeypatch.setattr(offload, "CHUNK", 1 << 10)
    monkeypatch.setattr(backends, "LONG", 64)  # from which on heads are computed in groups
    model = make_model(window=window, max_positions=128, activation_memory="offload")
    gradients(model, batch("cpu", 1, tokens))
    used = sum(
        size * len(free) for memory in offload._MEMORIES.values() for size, free in memory.free.items()
    )
    assert StepMemory(model, Step(1, tokens)).plan(["offload"] * 3, host_budget=GIB).host == used


def test_results_are_kept_only_in_half_of_the_hosts_memory(make_model, long_enough, monkeypatch):
    model = make_model(activation_memory="offload")
    memory = StepMemory(model, Step(2, 11))
    needed = memory.plan(["offload"] * 3, host_budget=GIB).host
    for left, runs in ((2 * needed, 3), (2 * needed - 2, 6)):
        monkeypatch.setattr(offload, "host_memory_left", lambda left=left: left)
        assert attention_calls(lambda: gradients(model, batch("cpu"))) == runs
        planned = memory.plan(["offload"] * 3, host_budget=left)
        assert (planned.host == needed) == (runs == 3)
    assert planned.host < needed  # the inputs alone


def test_a_modified_output_of_attention_is_refused(make_model, long_enough):
    def edit(module, args):
        with torch.no_grad():
            args[0].mul_(1.5)

    model = make_model(activation_memory="offload")
    model.layers[1].self_attn.o_proj.register_forward_pre_hook(edit)
    ids = batch("cpu")
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


# On a GPU, a copy without a wait, or memory reused too early, gives wrong numbers only now and then. So these
# tests slow down the copies, or the work.


@contextlib.contextmanager
def slow(what, monkeypatch):
    """While active each copy, or each layer, takes a millisecond longer."""
    cycles = 2_000_000
    copy = offload._HostMemory.copy

    def slowly(memory, *args, **kwargs):
        if what == "copies":
            memory.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(memory.stream):
                torch.cuda._sleep(cycles)
        elif what == "work":
            torch.cuda._sleep(cycles)
        copied = copy(memory, *args, **kwargs)
        if what == "both":
            torch.cuda._sleep(cycles)
            with torch.cuda.stream(memory.stream):
                torch.cuda._sleep(cycles)
                return memory.stream.record_event()
        return copied

    with monkeypatch.context() as patch:
        patch.setattr(offload._HostMemory, "copy", slowly)
        yield


@needs_gpu
@pytest.mark.parametrize("what", ["nothing", "copies", "work", "both"])
@pytest.mark.parametrize("tokens", [7, 4096])
def test_many_layers_and_steps_give_the_bits_of_checkpointing(tokens, what, make_model, monkeypatch):
    model = make_model(24, max_positions=8192, activation_memory="checkpoint").to("cuda", torch.bfloat16)
    batches = [batch("cuda", 1, tokens, seed) for seed in range(6)]
    expected = [gradients(model, ids) for ids in batches]
    model.set_activation_memory("offload")
    with slow(what, monkeypatch):
        found = [gradients(model, ids) for ids in batches]  # without waits in between
        for ids in batches:  # nor for graphs without a backward pass
            model(ids, labels=ids)
        found += [gradients(model, ids) for ids in batches]
    assert all(same(*pair) for pair in zip(found, expected * 2, strict=True))


def test_the_random_state_is_restored_on_the_inputs_device(monkeypatch):
    """torch's checkpoint does it for the devices of its arguments, which do not include a layer's own
    input.
    """
    given, checkpoint = [], activation_memory.checkpoint

    def noting(run, *args, **options):
        given.extend(args)
        return checkpoint(run, *args, **options)

    monkeypatch.setattr(activation_memory, "checkpoint", noting)
    x = torch.ones(3, requires_grad=True)
    Offload().recompute(lambda x, rate: torch.dropout(x, rate, train=True), x, 0.5).sum().backward()
    assert [tensor.device for tensor in given if isinstance(tensor, torch.Tensor)] == [x.device]
    assert not any(tensor is x for tensor in given)


@needs_gpu
def test_wide_inputs_give_the_bits_of_checkpointing_and_leave_the_gpu(make_model):
    """16,384 tokens of 32 bfloat16 are 1 MiB, of which 24 layers keep none. (Of so many tokens cuDNN sums in
    no fixed order.)
    """
    options = {"activation_memory": "checkpoint", "attention": "triton"}
    model = make_model(24, max_positions=1 << 14, **options).to("cuda", torch.bfloat16)
    ids = batch("cuda", 1, 1 << 14)
    kept, found = {}, {}
    for level in ("checkpoint", "offload", "offload"):
        model.set_activation_memory(level)
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(ids, labels=ids).loss
        kept[level] = torch.cuda.memory_allocated() - before
        loss.backward()
        found[level] = [p.grad.clone() for p in model.parameters()]
    assert same(found["offload"], found["checkpoint"])
    layer = ids.numel() * 32 * 2
    assert kept["checkpoint"] - kept["offload"] == pytest.approx(
        23 * layer, rel=0.01
    )  # except the last one's
