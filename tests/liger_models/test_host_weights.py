"""Frozen weights in host memory: the same bits at every level, two layers on the device, and errors."""

import copy
import gc

import pytest
import torch
from live_bytes import LiveBytes, as_on_a_gpu

import liger_models
from liger_models.convert.errors import ConfigError
from liger_models.layers.memory import Step, StepMemory
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.training.config import TrainConfig

pytest.importorskip("peft")
from liger_models.training.lora import Adapters, LoraSettings

LAYERS = 3
SHAPE = liger_models.preset("llama-demo") | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
SHAPE |= {"num_hidden_layers": LAYERS}


def adapted(dtype=torch.float32, attention="auto", rank=4, **changes):
    """A model with adapters whose paths are not zero."""
    torch.manual_seed(0)
    model = liger_models.from_config(
        SHAPE | changes, device="cpu", dtype=dtype, attention=attention, projections="split"
    ).train()
    Adapters(model, LoraSettings(r=rank), "none", seed=0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_()
    return model


def step_of(model):
    ids = torch.randint(model.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    loss = model(ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


def watch(weights):
    """The numbers of the units with copies on the device, whenever one is fetched."""
    seen, fetch = [], weights._fetch

    def fetch_and_note(number):
        fetch(number)
        seen.append(sorted(weights._here))

    weights._fetch = fetch_and_note
    return seen


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_has_the_same_bits_and_holds_two_layers_at_a_time(level, tied):
    here, there = (adapted(tie_word_embeddings=tied) for _ in range(2))
    before = {name: p.clone() for name, p in there.state_dict().items()}
    there.keep_weights_on_host()
    for model in (here, there):
        model.set_activation_memory(level)
    seen = watch(there.host_weights)
    for a, b in zip(step_of(here), step_of(there), strict=True):
        assert torch.equal(a, b)  # the same code, on copies with the same alignment
    assert max(map(len, seen)) == 2
    assert [0, 1] in seen  # the first layer is copied while the embedding runs
    assert [LAYERS - 1, LAYERS] in seen
    assert not there.host_weights._here
    assert all(torch.equal(p, before[name]) for name, p in there.state_dict().items())


def test_generation_has_the_same_tokens():
    here, there = adapted(), adapted()
    there.keep_weights_on_host()
    ids = torch.arange(5)[None]
    assert there.generate(ids, max_new_tokens=4).equal(here.generate(ids, max_new_tokens=4))


def test_a_pass_may_be_repeated_and_interrupted():
    expected, model = step_of(adapted()), adapted()
    model.keep_weights_on_host()
    ids = torch.randint(model.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    model(ids)  # without a backward pass
    loss = model(ids, labels=ids).loss
    for _ in range(2):
        for p in model.parameters():
            p.grad = None
        loss.backward(retain_graph=True)
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_from_hub_reads_into_host_memory_and_adapters_stay_on_the_device(tmp_path):
    config = liger_models.preset("llama-demo") | {"hidden_size": 256, "num_hidden_layers": 2}
    liger_models.from_config(config, device="cpu").save_pretrained(tmp_path)
    model = liger_models.from_hub(tmp_path, device="cpu", projections="split", weights_memory="host")
    assert not any(p.requires_grad for p in model.parameters())
    assert model.device == torch.device("cpu")
    weights = model.host_weights
    assert weights.has(model.layers[0].mlp.down_proj.weight)
    assert weights.has(model.embed_tokens.weight)
    Adapters(model, LoraSettings(r=4), "none", seed=0)
    model.keep_weights_on_host()
    assert not any(weights.has(p) for p in model.parameters() if p.requires_grad)
    assert len(step_of(model)) > 1
    with pytest.raises(ConfigError, match="found 'disk'"):
        liger_models.from_hub(tmp_path, weights_memory="disk")


def test_what_would_go_wrong_is_refused():
    model = adapted()
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="all of this model's are trained"):
        model.keep_weights_on_host()
    model = adapted()
    model.keep_weights_on_host()
    with pytest.raises(RuntimeError, match="cannot be moved or cast"):
        model.to(torch.float64)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="streams frozen weights"):
        step_of(model)
    with pytest.raises(ConfigError, match="require lora"):
        TrainConfig("llama-demo", ("data",), "out", steps=1, weights_memory="host")
    with pytest.raises(ConfigError, match="int8 stays on the GPU"):
        TrainConfig("llama-demo", ("data",), "out", steps=1, weights_memory="host", lora="", quantize="int8")


@pytest.mark.parametrize(
    ("vocab_size", "tied", "moment"), [(512, True, "backward of layer 1"), (8192, False, "the forward pass")]
)
def test_a_plan_is_what_a_step_with_streamed_weights_allocates(vocab_size, tied, moment):
    """With gradients of adapters as they come; and, with a head larger than a layer, the head while the last
    layer runs forward.
    """
    sizes = {"intermediate_size": 1280, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    model = adapted(rank=16, **sizes)
    model.keep_weights_on_host()
    model.set_activation_memory("offload")
    weights, ids = model.host_weights, torch.zeros(1, 256, dtype=torch.long)
    there = [*model.parameters(), *model.buffers(), *weights._homes.values()]
    with as_on_a_gpu(), LiveBytes(there, zero=True) as live:
        model(ids, labels=ids).loss.backward()
    stay = sum(p.nbytes for p in model.parameters() if not weights.has(p))
    skeleton = liger_models.from_config(SHAPE | sizes, device="meta", dtype=torch.float32)
    on_device, on_host = (
        StepMemory(skeleton, Step(1, 256, 0, lora_rank=16, weights_on_host=host)).plan(["offload"] * LAYERS)
        for host in (False, True)
    )
    assert on_host.moment == moment
    assert on_host.peak == pytest.approx(live.peak + stay, rel=0.01)
    assert on_host.host - on_device.host == weights.host_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["lean", "offload"])
def test_on_a_gpu_a_step_has_the_same_bits_in_the_planned_memory(level):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4096}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    results, peaks = [], []
    for host in (False, True):
        model = adapted(dtype=torch.bfloat16, attention="triton", **sizes)  # cuDNN's order of sums varies
        model.to("cuda")  # takes packed weights apart, and so their products
        if host:
            model.keep_weights_on_host("cuda")
        model.set_activation_memory(level)
        torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(4096, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(2):
            loss = model(ids, labels=ids).loss
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        peaks.append(torch.cuda.max_memory_allocated())
        del model, loss
        gc.collect()  # split projections and their owners refer to each other
    assert [n for n, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)] == []
    # Eight layers of 16.8 million weights in 16 bits, of which two are on the device at a time.
    assert peaks[1] < peaks[0] - 5 * 2 * 16.8e6
