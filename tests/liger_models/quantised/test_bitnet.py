"""Models of three values (BitNet): those of transformers, with master weights and with packed ones."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from randomised import randomise, randomise_trained
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import AutoBitLinear, pack_weights

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.checkpoints.shards import checkpoint_tensors
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.stored_linear import StoredLinear
from liger_models.layers.projections.ternary import is_ternary
from liger_models.models.float8 import set_float8
from liger_models.models.quantization import quantise
from liger_models.models.stored_weights import decode_stored
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters

peft = pytest.importorskip("peft")

ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
OFFLINE = ONLINE | {"quantization_mode": "offline"}
IDS = torch.arange(2 * 7).view(2, 7) * 5 % 131
FAMILIES = ["bitnet", "llama"]


def config_of(family, settings=ONLINE):
    tiny = {**find_architecture(family).tiny, "num_hidden_layers": 2, "torch_dtype": "bfloat16"}
    return tiny | {"attention_bias": False, "mlp_bias": False, "quantization_config": settings}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by family and mode: master weights in bfloat16, and the same packed."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = liger_models.from_config(config_of(family), dtype="bfloat16")
        randomise(model, torch.Generator().manual_seed(0)).save_pretrained(folder / "online")
        shutil.copytree(folder / "online", folder / "offline")
        rewrite(folder / "offline", pack, quantization_config=OFFLINE)
        found |= {(family, mode): folder / mode for mode in ("online", "offline")}
    return found


def rewrite(folder, change=lambda tensors: None, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pack(tensors):
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        mean = tensors[name].float().abs().mean()
        tensors[name] = pack_weights((tensors[name] / mean).round().clamp(-1, 1))
        tensors[name + "_scale"] = mean.bfloat16().reshape(1)


@pytest.fixture
def altered(checkpoints, tmp_path):
    """Copies of a checkpoint of BitNet, changed by `rewrite`."""

    def alter(mode, *change, **settings):
        shutil.copytree(checkpoints["bitnet", mode], tmp_path / "altered")
        rewrite(tmp_path / "altered", *change, **settings)
        return tmp_path / "altered"

    return alter


@pytest.fixture(autouse=True)
def eager():
    """transformers compiles its rounding functions."""
    with torch.compiler.set_stance("force_eager"):
        yield


def load(folder, **options):
    return liger_models.from_hub(folder, **{"device": "cpu", "dtype": torch.float64, **options})


def reference_of(folder):
    """transformers' own model in float64, with the weights that the files hold in bfloat16. Its norms compute
    in float32 otherwise.
    """
    model = in_float64(AutoModelForCausalLM.from_pretrained(folder)).train()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module.weight, module.variance_epsilon)
    return model


def norm(weight, eps, x):
    return F.rms_norm(x, weight.shape, weight, eps)


def in_float64(model):
    for module in model.double().modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale = module.weight_scale.double()
    return model


def run(model):
    """Logits, and the loss and its gradients, by the checkpoint's names."""
    model.zero_grad()
    logits, ours = model(input_ids=IDS).logits, hasattr(model, "weight_map")
    # transformers rounds logits to float32 before the loss.
    loss = model(input_ids=IDS, labels=IDS).loss if ours else mean_loss(logits)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if ours:
        held = {name: expr for name, expr in model.weight_map().items() if name in grads}
        grads = dict(checkpoint_tensors(grads.__getitem__, held))
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


def mean_loss(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def with_reference_layers(model):
    """Put transformers' layers over the same weights in the place of ours."""
    for path, module in list(model.named_modules()):
        if is_ternary(module):
            layer = AutoBitLinear(
                module.in_features, module.out_features, bias=False, device="meta", online_quant=True
            )
            layer.weight = module.weight
            model.set_submodule(path, layer)
    return model


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_references(checkpoints, family, mode):
    """In float64, where an input differs by less than rounding it in float32 notices."""
    found = run(load(checkpoints[family, mode]))
    expected = run(reference_of(checkpoints[family, mode]))
    for name, value in found.items():
        bound = 2**-23 if name == "loss" else 1e-9  # ours is returned in float32
        torch.testing.assert_close(value.double(), expected[name], rtol=bound, atol=1e-9, msg=name)
    frozen = {name for name in expected if mode == "offline" and name.endswith("_proj.weight")}
    assert found.keys() == expected.keys() - frozen


@pytest.mark.parametrize("level", ["all", "lean", "mlp", "checkpoint"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_have_the_references_bits_within_a_model(checkpoints, family, level):
    options = {"projections": "split", "activation_memory": level, "dtype": "bfloat16"}
    model = load(checkpoints[family, "online"], **options)
    found, expected = run(model), run(with_reference_layers(model))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_come_back_byte_for_byte(checkpoints, family, mode, tmp_path):
    load(checkpoints[family, mode], dtype="auto").save_pretrained(tmp_path / "out")
    for file in ("config.json", "model.safetensors"):
        written, read = (folder / file for folder in (tmp_path / "out", checkpoints[family, mode]))
        if file == "config.json":
            assert json.loads(written.read_text()) == json.loads(read.read_text())
        else:
            assert written.read_bytes() == read.read_bytes()


def test_packed_documents_equal_separate_ones(checkpoints):
    model = load(checkpoints["bitnet", "online"])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    whole = model(input_ids=IDS[:1], position_ids=positions).logits
    parts = [model(input_ids=part).logits for part in IDS[:1].split([3, 4], 1)]
    torch.testing.assert_close(whole, torch.cat(parts, 1), rtol=1e-10, atol=1e-10)


def test_split_and_fused_projections_agree(checkpoints):
    model = load(checkpoints["bitnet", "online"])
    expected = run(model)
    model.split_projections()
    assert all(is_ternary(m) for m in model.layers.modules() if isinstance(m, Linear))
    split = run(model)
    model.fuse_projections()
    for found in (split, run(model)):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


def test_training_from_scratch_rounds_the_weights(checkpoints):
    model = liger_models.from_config(config_of("bitnet"), dtype="float32")
    layer = model.layers[0].mlp.down_proj
    assert layer.ternary.rounds_weights
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_packed_weights_are_exact_frozen_and_few_bytes(checkpoints):
    folder = checkpoints["bitnet", "offline"]
    dense, kept = load(folder, dtype="auto"), load(folder, projections="split", keep_quantised=True)
    codes = load_file(folder / "model.safetensors")
    scale = codes["model.layers.1.mlp.down_proj.weight_scale"]
    weight = dense.layers[1].mlp.down_proj.weight
    assert not weight.requires_grad
    assert dense.layers[1].mlp.down_norm.weight.requires_grad
    assert (weight / scale).unique().tolist() == [-1, 0, 1]
    layer = kept.layers[1].mlp.down_proj
    assert isinstance(layer, StoredLinear)
    assert torch.equal(layer.dense(layer.weight), weight.double())
    stored = codes["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(layer.weight, stored)
    found = run(kept)
    decode_stored(kept)
    for model in (load(folder), kept):
        for name, value in run(model).items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_adapters_read_inputs_that_are_not_rounded(checkpoints, mode):
    """As PEFT's on transformers' layers, and on packed weights as on dense ones."""
    model = load(checkpoints["bitnet", mode], projections="split")
    if mode == "online":
        other = with_reference_layers(load(checkpoints["bitnet", mode], projections="split"))
    else:
        other = load(checkpoints["bitnet", mode], projections="split", keep_quantised=True)
    found, expected = (grads_of(with_adapters(own)) for own in (model, other))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def with_adapters(model):
    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(model, settings)
    for parameter in model.parameters():
        if parameter.requires_grad:  # by default as narrow as the base's
            parameter.data = parameter.data.double()
    return randomise_trained(model)


def grads_of(model):
    output = model(input_ids=IDS, labels=IDS)
    output["loss"].backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert named
    assert all(".lora_" in name for name in named)
    return {"loss": output["loss"].detach(), **named}


def test_adapters_are_trained_on_packed_projections_and_not_merged(checkpoints):
    model = load(checkpoints["bitnet", "online"], dtype="float32")
    adapters = Adapters(model, LoraSettings(r=2), "base", 0, set())
    randomise_trained(model)
    grads_of(model)
    with pytest.raises(ConfigError, match="rounds its weight"):
        adapters.merge()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_our_class_of_transformers_runs_its_layers(checkpoints, mode):
    import liger_models.hf

    folder = checkpoints["bitnet", mode]
    liger_models.hf.register(projections="split")
    try:
        ours = AutoModelForCausalLM.from_pretrained(folder)
        assert type(ours).__module__.startswith("liger_models")
        liger_models.hf.register()
        with pytest.raises(ConfigError, match="split"):
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        liger_models.hf.unregister()
    kinds = {type(m) for m in ours.modules() if isinstance(m, nn.Linear) and m is not ours.lm_head}
    assert kinds == {AutoBitLinear}
    ours = in_float64(ours)
    expected = load(folder)(input_ids=IDS).logits
    torch.testing.assert_close(ours(input_ids=IDS).logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ONLINE | {"linear_class": "bitlinear"}, "linear_class 'bitlinear'; expected 'autobitlinear'"),
        ({"quant_method": "bitnet"}, "linear_class 'bitlinear'"),
        (ONLINE | {"use_rms_norm": True}, "use_rms_norm"),
        (ONLINE | {"modules_to_not_convert": ["model.layers.0"]}, "modules_to_not_convert"),
        (ONLINE | {"modules_to_not_convert": []}, "modules_to_not_convert"),
        (ONLINE | {"quantization_mode": "sometimes"}, "quantization_mode 'sometimes'"),
        (ONLINE | {"num_bits": 3}, "unknown settings"),
    ],
)
def test_other_products_are_refused(altered, settings, message):
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        load(altered("online", quantization_config=settings))


@pytest.mark.parametrize("family", ["mixtral", "phi3", "gpt2", "qwen3_next", "gemma3"])
def test_models_with_other_layers_are_refused(family):
    config = {**find_architecture(family).tiny, "quantization_config": ONLINE}
    with pytest.raises(UnsupportedModelError, match="language models of attention and dense MLPs"):
        liger_models.from_config(config, device="meta")


def test_only_the_text_of_images_is_refused(tmp_path):
    config = {**find_architecture("gemma3").tiny, "quantization_config": ONLINE}
    with pytest.raises(UnsupportedModelError, match="in checkpoints of language models alone"):
        liger_models.from_config(config, device="meta", text_only=True)


def test_fresh_models_have_master_weights():
    with pytest.raises(ConfigError, match="expected 'online'"):
        liger_models.from_config(config_of("bitnet", OFFLINE), device="meta")


def test_other_forms_of_the_weights_are_refused(checkpoints, tmp_path):
    model = load(checkpoints["bitnet", "online"], dtype="bfloat16")
    reasons = set_float8(model, "rowwise", emulate=True, all_sizes=True)
    assert {reason for path, reason in reasons.items()} == {
        "its operands are rounded to three values and 8 bits"
    }
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match="rounds its weights to three values"):
        quantise(model, "nf4", torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="rounds its weights to three values"):
        model.save_pretrained(tmp_path / "out", quantization="fp8-block")


def test_an_adapter_is_not_merged_as_it_is_read(checkpoints, tmp_path):
    model = load(checkpoints["bitnet", "online"], projections="split", dtype="float32")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="cannot be merged"):
        load(tmp_path / "adapter", base=checkpoints["bitnet", "online"])
    with pytest.raises(ConfigError, match="Keep the adapter apart"):
        wrapped.merge_and_unload()


def test_packed_weights_that_changed_are_not_written(checkpoints, tmp_path):
    model = load(checkpoints["bitnet", "offline"], dtype="auto")
    with torch.no_grad():
        model.layers[0].mlp.down_norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "norms")
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(2)
    with pytest.raises(UnsupportedModelError, match="weights of three values have changed"):
        model.save_pretrained(tmp_path / "weights")


PROJECTION = "model.layers.1.mlp.up_proj.weight"


def fill(value):
    return lambda tensors: tensors[PROJECTION].fill_(value)


def scale_of(value):
    return lambda tensors: tensors.update({PROJECTION + "_scale": torch.tensor(value)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fill(255), "holds a fourth value"),
        (scale_of([-1.0]), "scales of weights are finite and positive"),
        (scale_of([1.0, 1.0]), r"expected .* of shape \(1,\)"),
        (lambda tensors: tensors.pop(PROJECTION + "_scale"), "is not in the checkpoint"),
        (lambda tensors: tensors.update({PROJECTION: torch.zeros(80, 48)}), "belongs to no weight"),
    ],
)
def test_damaged_files_are_refused(altered, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(altered("offline", change))
