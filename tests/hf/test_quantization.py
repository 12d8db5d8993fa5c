"""Quantised models match transformers' own with the same quantisation: bitsandbytes, 4 and 8 bits.

They are compared in training mode: for inference, bitsandbytes uses other arithmetic on some CPUs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from live_bytes import LiveBytes
from randomised import randomise_trained
from rounding import beyond_bound
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import CheckpointError

transformers = pytest.importorskip("transformers")
bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "ffn_config"}
DENSE = [
    name
    for name in list_architectures()
    if not EXPERTS & find_architecture(name).tiny.keys()
    and name != "olmo"  # the reference clamps what 4-bit layers return in place, which autograd refuses
]

TRANSPOSED = (
    "gpt2",
    "openai-gpt",
)  # weights in checkpoints
# Plain, packed and joined projections, experts, and names that differ from checkpoints'.
READ_BACK = "llama", "gemma2", "phi3", "gpt_neox", "qwen3_moe", "glm4", "nemotron_h"


def settings(bits, **more):
    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True, **more)
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    four |= {"bnb_4bit_compute_dtype": torch.float32, **more}
    return transformers.BitsAndBytesConfig(load_in_4bit=True, **four)


@pytest.fixture
def make_quantised(make_both, hf):
    """Factory of transformers' own quantised model, ours, and the folder that both were loaded from."""

    def make(family, bits, task="CausalLM", **more):
        both = make_both(family, task, "split", load=False)
        auto = getattr(transformers, f"AutoModelFor{task}")
        hf.unregister()
        both.reference = read(auto, both.folder, settings(bits, **more), attn_implementation="eager")
        hf.register("split")
        both.ours = read(auto, both.folder, settings(bits, **more))
        return both

    return make


def read(auto, folder, quantization_config=None, **options):
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    return auto.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"}, **options).train()


def quantised_layers(model):
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


def make_dense(model):
    """Replace layers of four bits by dense ones. Each weight is decoded as one row: on CPUs with AVX-512
    bitsandbytes decodes rows that end within a block wrongly.
    """
    for name in quantised_layers(model):
        layer = model.get_submodule(name)
        state = copy.copy(layer.weight.quant_state)
        shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
        dense = torch.nn.Linear(shape[1], shape[0], bias=layer.bias is not None)
        dense.weight.data = bnb.functional.dequantize_4bit(layer.weight.data, state).view(shape)
        if layer.bias is not None:
            dense.bias.data = layer.bias.data
        model.set_submodule(name, dense)


def gradients(model):
    """Return the gradients of unquantised weights under checkpoint names."""
    from transformers.core_model_loading import revert_weight_conversion

    there = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return revert_weight_conversion(model, there)


def check_files(both, hf, batch):
    """Check that our files equal theirs byte for byte, and that each library reads the other's.

    transformers reads its own tensors, whose names and bytes ours equal: a few families show that it does.
    """
    auto = transformers.AutoModelForCausalLM
    both.ours.save_pretrained(both.folder / "ours")
    both.reference.save_pretrained(both.folder / "reference")
    mine, theirs = (load_file(both.folder / name / "model.safetensors") for name in ("ours", "reference"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert_copy(read(auto, both.folder / "reference"), both.ours, batch)
    if both.reference.config.model_type not in READ_BACK:
        return
    hf.unregister()
    assert_copy(read(auto, both.folder / "ours", attn_implementation="eager"), both.reference, batch)


def assert_copy(found, model, batch):
    """Assert equal tensors, and losses equal up to rounding.

    Matrix products of the copies may differ in bits: on some CPUs the order of their sums depends on the
    alignment of an operand.
    """
    tensors, expected = found.state_dict(), model.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert relative_distance(found(**batch).loss, model(**batch).loss) <= BOUND


@pytest.mark.supports("bitsandbytes", "every dense family in 4 bits", "saving and loading 4 bits")
@pytest.mark.of_layers("tokens")
@pytest.mark.parametrize("family", DENSE)
def test_dense_families_in_four_bits_match_the_reference(family, make_quantised, batch, hf):
    # transformers cannot run these with all layers quantised: it multiplies by a packed weight, or clamps it.
    of_family = {"mamba": ["dt_proj"], "gemma3n_text": ["correction_coefs", "prediction_coefs"]}
    skipped = {"llm_int8_skip_modules": ["lm_head", *of_family[family]]} if family in of_family else {}
    both = make_quantised(family, 4, **skipped)
    if not quantised_layers(both.reference):
        pytest.skip("the reference's linear layers are of a class that bitsandbytes passes over")
    check_model(both, batch)
    if family in TRANSPOSED:
        with pytest.raises(CheckpointError, match="cannot be saved; save their adapters"):
            both.ours.save_pretrained(both.folder / "ours")
        return
    check_files(both, hf, batch)


@pytest.mark.supports("bitsandbytes", "8 bits", "saving and loading 8 bits")
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "phi3"])
def test_families_in_eight_bits_match_the_reference(family, make_quantised, batch, hf):
    both = make_quantised(family, 8)
    check_model(both, batch)
    check_files(both, hf, batch)


def check_model(both, batch):
    assert len(quantised_layers(both.ours)) == len(quantised_layers(both.reference)) > 0

    def results(model):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return {"loss": loss, **gradients(model)}

    theirs, ours = results(both.reference), results(both.ours)
    assert theirs.keys() == ours.keys()
    largest = max(gradient.norm() for gradient in theirs.values())
    # A parameter that shifts all scores of a query alike, such as a key bias without rotary, has a gradient
    # of zero.
    some = {name for name in theirs if max(theirs[name].norm(), ours[name].norm()) > 1e-6 * largest}

    def of_reference():
        return {name: value for name, value in results(both.reference).items() if name in some}

    assert not beyond_bound({name: ours[name] for name in some}, of_reference)


@pytest.mark.supports("bitsandbytes", "experts, which are not quantised")
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v2", "bailing_hybrid", "lfm2_moe"]
)
def test_experts_are_not_quantised(family, make_quantised, batch, hf):
    both = make_quantised(family, 4)
    check_model(both, batch)
    check_files(both, hf, batch)
    experts = {name: p.dtype for name, p in both.ours.named_parameters() if ".experts." in name}
    assert experts
    assert set(experts.values()) == {torch.float32}


@pytest.mark.parametrize("family", ["gemma4_text", "hunyuan_v1_moe"])
def test_quantised_routers_are_read_natively_and_refused_in_transformers(family, make_quantised, batch, hf):
    """They are linear layers in transformers, and parameters here."""
    both = make_quantised(family, 4)
    assert any(name.endswith((".router.proj", ".gate.wg")) for name in quantised_layers(both.reference))
    both.reference.eval().save_pretrained(both.folder / "reference")
    make_dense(both.reference)
    with torch.no_grad():
        expected = both.reference(input_ids=batch["input_ids"], use_cache=False).logits
        native = liger_models.from_hub(both.folder / "reference", dtype=torch.float32, device="cpu").eval()
        found = native(input_ids=batch["input_ids"], return_logits=True).logits
    assert relative_distance(found, expected) <= BOUND
    with pytest.raises(RuntimeError, match="no linear layers here"):
        read(transformers.AutoModelForCausalLM, both.folder / "reference")


@pytest.mark.supports("bitsandbytes", "QLoRA through PEFT at every level of activation memory")
@pytest.mark.parametrize(
    ("family", "bits", "level"),
    [
        *(("llama", 4, level) for level in ("all", "lean", "mlp", "checkpoint")),
        *(("llama", 8, level) for level in ("lean", "checkpoint")),
        ("gemma2", 4, "mlp"),
        ("phi3", 4, "lean"),
    ],
)
def test_gradients_of_adapters_on_quantised_layers_match_the_reference(
    family, bits, level, make_quantised, batch, tmp_path
):
    compare_adapters(make_quantised(family, bits), level, batch, tmp_path)


@pytest.mark.parametrize(
    ("settings", "lora"),
    [
        ({"bnb_4bit_use_double_quant": False}, {"use_rslora": True}),
        ({}, {"use_dora": True}),
        ({"bnb_4bit_quant_type": "fp4"}, {"target_modules": ["q_proj", "down_proj"]}),
    ],
)
def test_adapters_of_all_kinds_match_the_reference(settings, lora, make_quantised, batch, tmp_path):
    compare_adapters(make_quantised("llama", 4, **settings), "lean", batch, tmp_path, **lora)


def test_products_use_the_requested_dtype(make_quantised, batch, tmp_path):
    both = make_quantised("llama", 4, bnb_4bit_compute_dtype=torch.bfloat16)
    # A few inputs halfway between two bfloat16 values may be rounded to either, by 2^-8 of an element. With
    # products in float32, every gradient would be off by more than that, by at least 1.5 times.
    compare_adapters(both, "lean", batch, tmp_path, bound=2**-8)


def test_adapters_run_through_our_operation(make_quantised, batch, monkeypatch):
    from liger_models.layers.projections import low_rank

    both, kept = make_quantised("llama", 4), []
    ours = peft.get_peft_model(both.ours, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert {type(m).__name__ for m in ours.modules() if hasattr(m, "lora_A")} == {"LowRankLinear4bit"}
    run = low_rank.run_low_rank
    monkeypatch.setattr(
        low_rank, "run_low_rank", lambda x, *rest, **more: kept.append(x) or run(x, *rest, **more)
    )
    ours(**batch).loss.backward()
    layers = len(both.ours.model.layers)
    assert len(kept) == 4 * layers  # query, key and value run as one, and so do gate and up


def compare_adapters(both, level, batch, tmp_path, bound=BOUND, **lora):
    theirs = peft.prepare_model_for_kbit_training(both.reference, use_gradient_checkpointing=False)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora}))
    randomise_trained(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    both.ours.set_activation_memory(level)
    ours = peft.prepare_model_for_kbit_training(both.ours, use_gradient_checkpointing=False)
    ours = peft.PeftModel.from_pretrained(ours, tmp_path / "adapter", is_trainable=True).train()

    def results(model):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return {"loss": loss, **{name: p.grad for name, p in model.named_parameters() if p.requires_grad}}

    assert not beyond_bound(results(ours), lambda: results(theirs.train()), bound)


@pytest.mark.parametrize("rows", [(7,), (2, 5)], ids=str)
def test_an_8_bit_product_saves_no_tensor_and_matches_bitsandbytes_gradient(rows):
    from liger_models.hf.adapters import quantised_lora

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, threshold=6.0)
    layer.weight = bnb.nn.Int8Params(torch.randn(32, 64), False, has_fp16_weights=False).to("cpu")
    layer.bias = torch.nn.Parameter(torch.randn(32))
    x, dy = torch.randn(*rows, 64, requires_grad=True), torch.randn(*rows, 32)
    layer(x)  # the first call prepares the weights
    theirs = layer(x)
    expected = [theirs, *torch.autograd.grad(theirs, x, dy)]
    quantised_lora.take_over(layer)
    with LiveBytes([x, *layer.parameters(), layer.state.CB, layer.state.SCB]) as live:
        ours = layer(x)
        assert live.now == ours.nbytes
    found = [ours, *torch.autograd.grad(ours, (x, layer.bias), dy)]
    for one, other in zip(found, expected, strict=False):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[2], dy.flatten(0, -2).sum(0))


def test_preparing_for_training_switches_checkpointing_on_and_gradients_flow(make_quantised, batch):
    both = make_quantised("llama", 4)
    ours = peft.prepare_model_for_kbit_training(both.ours)
    assert set(both.ours.activation_memory) == {"checkpoint"}
    ours = peft.get_peft_model(ours, peft.LoraConfig(r=4, target_modules="all-linear"))
    ours(**batch).loss.backward()
    assert all(p.grad is not None for name, p in ours.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("skipped", [["o_proj"], ["lm_head", "model.layers.1"]])
def test_skipped_modules_and_the_head_are_quantised_as_in_the_reference(skipped, make_quantised, batch, hf):
    both = make_quantised("llama", 4, llm_int8_skip_modules=skipped)
    assert quantised_layers(both.ours) == quantised_layers(both.reference)
    assert ("lm_head" in quantised_layers(both.ours)) is ("lm_head" not in skipped)
    check_model(both, batch)
    check_files(both, hf, batch)


def test_modules_to_skip_are_given_by_the_references_names(make_quantised, batch):
    both = make_quantised("phi", 4, llm_int8_skip_modules=["fc1", "lm_head"])
    assert quantised_layers(both.ours) == quantised_layers(both.reference)
    assert not any("fc1" in name for name in quantised_layers(both.ours))
    check_model(both, batch)


def test_packed_projections_are_refused_with_a_remedy(make_quantised, hf):
    both = make_quantised("llama", 4)
    hf.register("fused")
    for folder, given in ((both.folder, settings(4)), (both.folder, settings(8))):
        with pytest.raises(liger_models.ConfigError, match=r'register\(projections="split"\)'):
            read(transformers.AutoModelForCausalLM, folder, given)
    both.ours.save_pretrained(both.folder / "quantised")
    with pytest.raises(liger_models.ConfigError, match=r'register\(projections="split"\)'):
        read(transformers.AutoModelForCausalLM, both.folder / "quantised")


def test_projections_that_a_checkpoint_packs_as_we_do_are_quantised_packed(make_quantised, hf, batch):
    both = make_quantised("phi3", 4)
    expected = both.ours(**batch).loss
    hf.register("fused")
    again = read(transformers.AutoModelForCausalLM, both.folder, settings(4))
    assert quantised_layers(again) == quantised_layers(both.ours)
    assert relative_distance(again(**batch).loss, expected) <= BOUND


def test_other_quantisation_methods_are_refused(hf):
    hf.register("split")
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(liger_models.ConfigError, match=r"'gptq'.*unregister"):
        hf.classes_of("llama").causal_lm(config)


def test_classifiers_in_four_bits_match_the_reference(make_quantised, batch):
    both = make_quantised("llama", 4, "SequenceClassification")
    ids = batch["input_ids"]
    found, expected = (model(ids[:1]).logits for model in (both.ours, both.reference))
    assert relative_distance(found, expected) <= BOUND
    assert quantised_layers(both.ours) == quantised_layers(both.reference)


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
def test_in_bfloat16_it_is_as_accurate_as_peft_with_bitsandbytes(adapters, make_both, hf):
    """Loss and all gradients in 4 bits on a GPU, against the same weights with everything else in float32."""
    both = make_both("llama", projections="split")
    both.reference.bfloat16().save_pretrained(both.folder)

    def adapted(dtype, wide):
        options = {
            "quantization_config": settings(4, bnb_4bit_compute_dtype=dtype),
            "device_map": {"": "cuda"},
        }
        model = transformers.AutoModelForCausalLM.from_pretrained(both.folder, dtype=dtype, **options)
        lora = peft.LoraConfig(r=4, target_modules="all-linear")
        model = peft.get_peft_model(model.train(), lora, autocast_adapter_dtype=wide)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.copy_((torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5).bfloat16())
        return model

    ours = adapted(torch.bfloat16, adapters == torch.float32)
    assert "LowRankLinear4bit" in {type(module).__name__ for module in ours.modules()}
    hf.unregister()
    theirs = adapted(torch.bfloat16, adapters == torch.float32)
    truth = adapted(torch.float32, True)
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {adapters}
    distances = {"ours": 0.0, "theirs": 0.0}
    for seed in range(8):
        ids = torch.randint(3, 131, (2, 13), generator=torch.Generator().manual_seed(seed)).cuda()
        found = {}
        for name, model in (("truth", truth), ("ours", ours), ("theirs", theirs)):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found[name] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad} | {"loss": loss}
        for name in distances:
            for key, value in found["truth"].items():
                distances[name] += relative_distance(found[name][key], value) ** 2
    print(distances)
    # Two random walks of roundings may differ by this much.
    assert distances["ours"] ** 0.5 <= 1.1 * distances["theirs"] ** 0.5
