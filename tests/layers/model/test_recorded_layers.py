"""Layers recorded as CUDA graphs: recording, replaying and refusals, with graphs that a CPU can run."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from fake_cuda_graphs import record_on_a_cpu
from randomised import randomise

import liger_models
from benchmarks.training.batches import IMAGES, make_batch
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError
from liger_models.layers.model import recorded_layers

TOKENS = 24


@pytest.fixture
def captured(monkeypatch):
    """The functions that were recorded so far, two for each recording."""
    return record_on_a_cpu(monkeypatch)


def make(family="llama", **options):
    config = {key: value for key, value in find_architecture(family).tiny.items() if value is not ...}
    if family == "qwen3_moe":
        config |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = liger_models.from_config(config, **options)
    return randomise(model, torch.Generator().manual_seed(7)).train()


def batch(model, number, documents=None):
    ids = torch.randint(
        3, model.spec.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(number)
    )
    labels = ids.clone()
    labels[0, : 2 + number] = -100  # another number of labels each time
    bounds = {} if documents is None else {"cu_seqlens": torch.tensor([0, *documents, 2 * TOKENS])}
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": 40, **bounds}


PACKED = ((5, 24), (20, 24), (), (2, 24), (24,), (11, 24))  # in room for three documents


def train(model, documents=PACKED, accumulate=2):
    """Losses of some steps of two micro-batches, the gradients of the last, and the weights."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, gradients = [], {}
    for number, bounds in enumerate(documents):
        loss = model(**batch(model, number, bounds)).loss
        loss.backward()
        losses.append(loss.detach())
        if number % accumulate == accumulate - 1:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": torch.stack(losses), **gradients}, dict(model.named_parameters())


def assert_alike(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


# Tied embeddings and a window; experts with a loss of their routers; inputs of every layer; shared layers.
@pytest.mark.parametrize(
    ("family", "level"),
    [("gemma2", "lean"), ("qwen3_moe", "checkpoint"), ("gemma4_text", "lean"), ("zamba2", "mlp")],
)
def test_recorded_steps_have_the_bits_of_unrecorded_ones(captured, family, level):
    model, other = make(family, activation_memory=level), make(family, activation_memory=level)
    model.set_cuda_graphs()
    assert_alike(train(model), train(other))
    assert len(captured) == 2


@pytest.mark.parametrize("family", ["gemma3", "internvl"])
def test_steps_with_images_have_the_same_bits(captured, family):
    """In Gemma 3 the tokens of an image also attend to one another. InternVL's encoder has class tokens."""
    config = find_architecture(family).tiny
    call = make_batch(IMAGES, 2, 16, config, torch.device("cpu"))

    def steps(model):
        for _ in range(3):
            model.zero_grad()
            loss = model(**call).loss
            loss.backward()
        return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}, {}

    model = make(family)
    model.set_cuda_graphs()
    assert_alike(steps(model), steps(make(family)))
    assert len(captured) == 4  # the encoder, and the language model


def test_a_form_of_batch_runs_once_is_recorded_once_and_then_replayed(captured):
    model = make()
    model.set_cuda_graphs()
    recordings = []
    for number in range(3):
        model(**batch(model, number)).loss.backward()
        recordings.append(len(captured))
    model(**batch(model, 0, (5, 24))).loss.backward()  # packed: another form
    assert [*recordings, len(captured)] == [0, 2, 2, 2]


def test_one_recording_serves_different_numbers_of_documents(captured):
    model = make()
    model.set_cuda_graphs()
    for number, bounds in enumerate([(24,), (3, 24), (24, 30), (20, 24), (2, 24, 44)]):
        model(**batch(model, number, bounds)).loss.backward()
    assert len(captured) == 2


def test_two_recordings_share_the_places_of_gradients(captured):
    documents = (None, None, (5, 24), (20, 24), None, (24,), (2, 24), None)
    model = make()
    model.set_cuda_graphs()
    assert_alike(train(model, documents), train(make(), documents))
    assert len(captured) == 4


def test_frozen_layers_run_unrecorded(captured):
    model = make()
    model.freeze(train_only=["lm_head"])
    model.set_cuda_graphs()
    for number in range(2):
        model(**batch(model, number)).loss.backward()
    assert not captured


def test_a_call_runs_unrecorded_while_a_recorded_one_waits_for_its_backward_pass(captured):
    def both(model):
        train(model, documents=(None, None))
        first, second = (model(**batch(model, number)).loss for number in (3, 4))
        (first + 2 * second).backward()
        return {name: p.grad for name, p in model.named_parameters()}, {}

    model = make()
    model.set_cuda_graphs()
    assert_alike(both(model), both(make()))


def test_a_second_backward_pass_is_refused(captured):
    model = make()
    model.set_cuda_graphs()
    for number in range(2):
        loss = model(**batch(model, number)).loss
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once for each forward pass"):
        loss.backward()


def test_gradients_take_their_places_without_a_copy(captured):
    model = make()
    model.set_cuda_graphs()
    train(model, documents=(None, None), accumulate=1)
    model(**batch(model, 2)).loss.backward()
    places = model.recorded._places
    assert {p.grad.data_ptr() for p in model.layers.parameters()} <= places


def freeze(model):
    model.freeze("layers.0")


def exchange(model):
    model.layers[1].mlp.down_proj = copy.deepcopy(model.layers[1].mlp.down_proj)


def move(model):
    model.layers[1].mlp.down_proj.weight.data = model.layers[1].mlp.down_proj.weight.data.clone()


def scale(model):
    model.layers[0].spec = dataclasses.replace(model.layers[0].spec, residual_scale=0.5)


def recompute(model):
    model.set_activation_memory("checkpoint")


@pytest.mark.parametrize("change", [freeze, exchange, move, scale, recompute])
def test_layers_are_recorded_anew_after_a_change(captured, change):
    def steps(model):
        train(model, documents=(None, None))
        change(model)
        model.zero_grad()
        return train(model, documents=(None, None, None), accumulate=1)

    model = make()
    model.set_cuda_graphs()
    assert_alike(steps(model), steps(make()))
    assert len(captured) == 4


def test_gradients_reach_embeddings_of_the_caller(captured):
    def gradient(model):
        for number in range(3):
            given = batch(model, number)
            embeds = model.embed_tokens(given.pop("input_ids")).detach().requires_grad_()
            model(inputs_embeds=embeds, **given).loss.backward()
        return {"embeds": embeds.grad}, {}

    model = make()
    model.set_cuda_graphs()
    assert_alike(gradient(model), gradient(make()))


def test_calls_without_gradients_run_unrecorded(captured):
    model = make()
    model.set_cuda_graphs()
    with torch.no_grad():
        for number in range(3):
            model(**batch(model, number))
    assert not captured


def test_copies_of_a_model_have_no_recordings(captured):
    model = make()
    model.set_cuda_graphs()
    assert copy.deepcopy(model).recorded is None
    assert pickle.loads(pickle.dumps(model.recorded)) is None


def with_hook(model):
    model.layers[1].mlp.register_forward_hook(lambda *_: None)


def offloaded(model):
    model.set_activation_memory("offload")


def on_host(model):
    model.requires_grad_(False)
    model.norm.requires_grad_()
    model.keep_weights_on_host()


def drawing(model):
    model.set_activation_memory("checkpoint")
    model.layers[0].self_attn.weight_dropout = torch.nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (with_hook, "GatedMLP with hooks"),
        (offloaded, "activation_memory='offload'"),
        (on_host, "weights in host memory"),
        (drawing, "dropout"),
    ],
)
def test_layers_that_cannot_be_recorded_are_named(captured, change, found):
    model = make()
    change(model)
    model.set_cuda_graphs()
    with pytest.raises(ConfigError, match=f"{found}.*set_cuda_graphs\\(False\\)"):
        model(**batch(model, 0))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"cu_seqlens": torch.tensor([0, 24, 48]), "parents": [-1, 0]}, "documents that continue others"),
        ({"output_routed_experts": True}, "routed_experts"),
    ],
)
def test_calls_that_cannot_be_recorded_are_named(captured, options, found):
    model = make("qwen3_moe" if "output_routed_experts" in options else "llama")
    model.set_cuda_graphs()
    with pytest.raises(ConfigError, match=f"{found}.*set_cuda_graphs\\(False\\)"):
        model(**{**batch(model, 0), **options})


def test_contexts_that_cannot_be_recorded_are_named(captured):
    model = make()
    model.set_cuda_graphs()
    with torch.autograd.graph.save_on_cpu(), pytest.raises(ConfigError, match="saved_tensors_hooks"):
        model(**batch(model, 0))
    with liger_models.batch_invariant(), pytest.raises(ConfigError, match="batch_invariant"):
        model(**batch(model, 0))


def test_a_cpu_has_no_graphs():
    model = make()
    model.set_cuda_graphs()
    with pytest.raises(ConfigError, match="a model on cpu cannot be recorded: move it to an NVIDIA GPU"):
        model(**batch(model, 0))


def test_an_error_while_recording_says_what_to_do(captured, monkeypatch):
    def fails(function, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded_layers, "capture", fails)
    model = make()
    model.set_cuda_graphs()
    model(**batch(model, 0)).loss.backward()
    with pytest.raises(ConfigError, match=r"stream is capturing.*reads a value on the host"):
        model(**batch(model, 1))
