"""PEFT's LoRA layers run by our operation keep PEFT's results, files and switches."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from live_bytes import LiveBytes
from ranks import run_ranks
from torch import nn

from liger_models.layers.recompute.activation_memory import LEVELS

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from peft.tuners.lora.layer import Linear as PeftLinear  # noqa: E402

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.fixture
def lora(hf):
    import liger_models.hf.adapters.lora

    return liger_models.hf.adapters.lora


@pytest.fixture
def calls(lora, monkeypatch):
    """Count the operation's runs for single layers and for several split ones."""
    seen = []
    own = lora.low_rank_linear

    def counted(x, *projections):
        seen.append(len(projections))
        return own(x, *projections)

    monkeypatch.setattr(lora, "low_rank_linear", counted)
    monkeypatch.setattr("liger_models.layers.projections.packed_linear.low_rank_linear", counted)
    return seen


def config(targets, **settings):
    settings = {"r": 3, "lora_alpha": 7, "target_modules": targets, "task_type": "CAUSAL_LM", **settings}
    return peft.LoraConfig(**settings)


def fill(model):
    """Fill every adapter with random values, which change the model's output."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if "lora_" in name:
                noise = 0.3 * torch.randn(p.shape, generator=generator)
                p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else p * (1 + noise))
    return model


def as_peft_has_it(model, copied=True):
    """Return the same model with PEFT's own LoRA layers."""
    model = copy.deepcopy(model) if copied else model
    for module in model.modules():
        if isinstance(module, PeftLinear):
            module.__class__ = PeftLinear
    return model


def run(model, batch):
    """Return the loss and every gradient, with the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_distance(found[name], value) <= BOUND, name


WAYS = {
    "default": {},
    "rslora": {"use_rslora": True},
    "ranks": {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"down_proj": 5}},
    "some": {"targets": ["q_proj", "v_proj", "up_proj"]},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "dora": {"use_dora": True},
    "head": {"targets": ["o_proj", "lm_head"]},
}


@pytest.mark.parametrize("projections", ["split", "fused"])
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_match_pefts_own_layers(way, projections, make_both, batch, calls):
    settings = dict(WAYS[way])
    targets = settings.pop("targets", USUAL)
    if projections == "fused":
        targets = FUSED if targets == USUAL else ["qkv_proj", "o_proj"]
    model = make_both("llama", projections=projections, attention_bias=True, mlp_bias=True).ours
    adapted = fill(peft.get_peft_model(model, config(targets, **settings))).train()
    expected = run(as_peft_has_it(adapted), batch)
    assert not calls
    assert_near(run(adapted, batch), expected)
    # Variants that are not a plain low-rank path are left to PEFT.
    assert bool(calls) == (way not in ("dora", "lora_bias"))
    if projections == "split" and way in ("default", "some"):
        assert set(calls) >= {2, 3}  # gate and up, and query, key and value, are one operation each


@pytest.mark.parametrize("variant", ["use_dora", "lora_bias"])
def test_pefts_own_forward_keeps_only_its_input(variant, make_both, batch):
    """PEFT's forward pass casts, and would keep several tensors as wide as the output."""
    model = make_both("llama", projections="split").ours
    settings = {variant: True, "lora_dropout": 0.3}
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["up_proj"], **settings)).train()
    fill(model)
    (layer, *_) = (module for module in model.modules() if hasattr(module, "lora_A"))
    x = torch.randn(500, layer.in_features, requires_grad=True)
    trained = [x, *(p for p in layer.parameters() if p.requires_grad)]
    results = []
    for level in ("all", "lean"):
        layer.activation_memory = level
        torch.manual_seed(0)
        with LiveBytes([x, *layer.parameters()]) as live:
            y = layer(x)
            kept = live.now - y.nbytes
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), trained)))
        assert (kept > x.nbytes) == (level == "all")  # besides x; else only the random state
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_switching_adapters_before_the_backward_pass_is_an_error(make_both, batch):
    model = make_both("llama", projections="split").ours
    dora = peft.LoraConfig(r=3, target_modules=["up_proj"], use_dora=True)
    model = peft.get_peft_model(model, dora).train()
    model.add_adapter("other", dora)
    loss = model(**batch).loss
    model.set_adapter("other")
    with pytest.raises(RuntimeError, match="before switching adapters"):
        loss.backward()


def test_other_models_keep_pefts_own_layers(make_both):
    both = make_both("llama", projections="split")
    theirs = peft.get_peft_model(both.reference, config(USUAL))
    ours = peft.get_peft_model(both.ours, config(USUAL))
    kinds = [
        {type(m).__name__ for m in model.modules() if isinstance(m, PeftLinear)} for model in (theirs, ours)
    ]
    assert kinds == [{"Linear"}, {"LowRankLinear"}]


@pytest.mark.parametrize("projections", ["split", "fused"])
def test_files_equal_pefts_own_byte_for_byte(projections, make_both, tmp_path):
    model = make_both("llama", projections=projections).ours
    adapted = fill(peft.get_peft_model(model, config(USUAL if projections == "split" else FUSED)))
    adapted.save_pretrained(tmp_path / "ours")
    # Not a copy, in which the set of targets in the config could be in another order.
    as_peft_has_it(adapted, copied=False).save_pretrained(tmp_path / "pefts")
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "pefts").iterdir())
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "pefts" / name).read_bytes(), name


def test_merging_and_unloading_match_peft(make_both, batch):
    adapted = fill(peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL))).eval()
    with torch.no_grad():
        expected = adapted(**batch).loss
        merged = as_peft_has_it(adapted).merge_and_unload().state_dict()
        adapted.merge_adapter()
        assert relative_distance(adapted(**batch).loss, expected) <= BOUND
        adapted.unmerge_adapter()
        assert relative_distance(adapted(**batch).loss, expected) <= BOUND
    fresh = copy.deepcopy(adapted).unload()
    assert not any(isinstance(module, PeftLinear) for module in fresh.modules())
    found = adapted.merge_and_unload().state_dict()
    assert found.keys() == merged.keys()
    # Merging and unmerging rounds twice in float32.
    assert all(relative_distance(found[name], tensor) <= BOUND for name, tensor in merged.items())


def test_several_adapters_switch_as_in_peft(make_both, batch, calls):
    adapted = peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL))
    adapted.add_adapter("other", config(["q_proj", "down_proj"], r=2, use_rslora=True))
    fill(adapted).eval()
    pefts = as_peft_has_it(adapted)
    seen = []
    for names in (["default"], ["other"], ["default", "other"]):
        for model in (pefts, adapted):
            model.base_model.set_adapter(names)
            model.requires_grad_(True)
        expected = run(pefts, batch)
        assert_near(run(adapted, batch), expected)
        seen.append(expected["loss"])
    assert calls
    with adapted.disable_adapter(), pefts.disable_adapter():
        seen.append(pefts(**batch).loss)
        assert relative_distance(adapted(**batch).loss, seen[-1]) <= BOUND
    assert len(set(map(float, seen))) == 4


def test_rows_of_a_batch_may_have_different_adapters(make_both, batch):
    adapted = peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL))
    adapted.add_adapter("other", config(USUAL, r=2))
    fill(adapted).eval()
    ids, names = batch["input_ids"][:, :9], ["other", "__base__"]
    try:
        expected = as_peft_has_it(adapted)(input_ids=ids, adapter_names=names).logits
    except (ValueError, IndexError, RuntimeError):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            adapted(input_ids=ids, adapter_names=names)
        return
    assert relative_distance(adapted(input_ids=ids, adapter_names=names).logits, expected) <= BOUND


def test_a_second_adapter_in_other_layers_is_taken_over_in_training(make_both, batch, lora):
    adapted = peft.get_peft_model(make_both("llama", projections="split").ours, config(["q_proj"]))
    adapted.add_adapter("other", config(["down_proj"]))
    adapted.train()
    names = {n.rpartition(".")[2] for n, m in adapted.named_modules() if type(m) is lora.LowRankLinear}
    assert names == {"q_proj", "down_proj"}


def test_a_layer_with_an_unknown_attribute_is_left_as_it_is(make_both, lora):
    adapted = as_peft_has_it(peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL)))
    attention = adapted.get_base_model().model.layers[0].self_attn
    attention.q_proj.new_feature = {"default": 2.0}
    lora.take_over(adapted)
    assert type(attention.q_proj) is PeftLinear
    assert type(attention.k_proj) is lora.LowRankLinear


def test_the_installed_peft_has_no_unknown_attribute(lora):
    """If a PEFT release fails here, its layers run PEFT's own forward: look at the attribute it added."""
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 5)), peft.LoraConfig(target_modules=["0"]))
    assert lora.is_known(model.base_model.model[0])


@pytest.mark.parametrize(
    "part", ["lora_A.default", "lora_B.default", "base_layer", "lora_dropout.default", ""]
)
def test_a_hook_in_a_layer_gets_the_same_values_as_in_pefts_layer(part, make_both, batch, calls):
    adapted = fill(peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL)))
    expected, seen = run(adapted, batch), []
    for layer in adapted.get_base_model().model.layers:
        for projection in (layer.self_attn.q_proj, layer.mlp.down_proj):
            hooked = projection.get_submodule(part) if part else projection
            hooked.register_forward_hook(lambda module, args, output: seen.append(output))
    calls.clear()
    assert_near(run(adapted, batch), expected)
    assert len(seen) == 2 * len(adapted.get_base_model().model.layers)
    assert 3 not in calls


@pytest.mark.parametrize("level", ["all", "mlp", "checkpoint"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_level_gives_the_same_bits(level, dropout, make_both, batch, calls):
    model = make_both("llama", projections="split").ours
    adapted = fill(peft.get_peft_model(model, config(USUAL, lora_dropout=dropout))).train()
    adapted.enable_input_require_grads()
    expected = run(adapted, batch)
    adapted.get_base_model().set_activation_memory(level)
    found = run(adapted, batch)
    assert calls
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_dropout_is_off_outside_training(make_both, batch):
    adapted = fill(
        peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL, lora_dropout=0.5))
    )
    expected = run(as_peft_has_it(adapted.eval()), batch)
    assert_near(run(adapted, batch), expected)
    assert run(adapted.train(), batch)["loss"] != expected["loss"]


def test_copies_and_pickles_are_the_same_layer(make_both, batch):
    adapted = fill(peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL))).eval()
    expected = adapted(**batch).loss
    assert torch.equal(copy.deepcopy(adapted)(**batch).loss, expected)
    layer = adapted.get_base_model().model.layers[0].mlp.down_proj
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again) is type(layer)


def test_adapters_of_transformers_own_add_adapter_are_taken_over(make_both, lora):
    model = make_both("llama", projections="split").ours
    model.add_adapter(config(USUAL))
    ours = [module for module in model.modules() if type(module) is lora.LowRankLinear]
    assert len(ours) == 7 * len(model.model.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bfloat16_model_is_as_accurate_as_with_pefts_layers(dtype, make_both, batch):
    """Loss and all gradients, with adapters in float32 (PEFT's default) and in bfloat16."""
    model = make_both("llama", projections="split").ours.to(torch.bfloat16)
    adapted = peft.get_peft_model(model, config(USUAL), autocast_adapter_dtype=dtype == torch.float32)
    fill(adapted)
    pefts = as_peft_has_it(adapted)
    truth = as_peft_has_it(adapted).double()
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {dtype}
    distances = {"ours": 0.0, "pefts": 0.0}
    for seed in range(8):
        ids = torch.randint(3, 131, (2, 13), generator=torch.Generator().manual_seed(seed))
        rows = {"input_ids": ids, "labels": ids}
        true = run(truth, rows)
        for name, found in (("ours", run(adapted, rows)), ("pefts", run(pefts, rows))):
            distances[name] += sum(relative_distance(found[key], value) ** 2 for key, value in true.items())
    # Two random walks of roundings may differ by this much.
    assert distances["ours"] ** 0.5 <= 1.1 * distances["pefts"] ** 0.5


def test_autocast_matches_pefts_layers(make_both, batch, calls):
    adapted = fill(peft.get_peft_model(make_both("llama", projections="split").ours, config(USUAL)))
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(as_peft_has_it(adapted), batch)
        found = run(adapted, batch)
    assert calls
    for name, value in expected.items():
        assert found[name].dtype == value.dtype == torch.float32
        # bfloat16 rounds by 2^-9; dozens of roundings in a row
        assert relative_distance(found[name], value) <= 2**-4, name


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_gradients_sharded_over_two_processes_equal_those_of_one(make_both, batch, tmp_path):
    both = make_both("llama", projections="split")
    adapted = fill(peft.get_peft_model(both.ours, config(USUAL))).train()
    adapted.save_pretrained(tmp_path / "adapter")
    both.folder.rename(tmp_path / "model")
    rows = {name: batch[name] for name in ("input_ids", "labels")}
    torch.save(rows, tmp_path / "batch.pt")
    halves = [run(adapted, {name: part.chunk(2)[rank] for name, part in rows.items()}) for rank in range(2)]
    found = run_ranks(Path(__file__).with_name("lora_rank.py"), tmp_path)
    for rank in range(2):
        assert found[rank]["calls"] == 2 * len(both.ours.model.layers)
        assert relative_distance(found[rank]["loss"], halves[rank]["loss"]) <= BOUND
    gradients = {name: (value + halves[1][name]) / 2 for name, value in halves[0].items() if name != "loss"}
    assert_near(found[0]["gradients"], gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_level_has_the_same_gradients_on_a_gpu(dropout, make_both, batch):
    """Recomputation draws the same dropout from the saved state of CUDA's random generator."""
    model = make_both("llama", projections="split").ours.to("cuda", torch.bfloat16)
    adapted = fill(peft.get_peft_model(model, config(USUAL, lora_dropout=dropout))).train()
    adapted.enable_input_require_grads()
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    found = {}
    for level in LEVELS:
        model.set_activation_memory(level)
        found[level] = run(adapted, batch)
    for level in LEVELS:
        for name, value in found["all"].items():
            # Attention may sum in a different order, which changes later results by 2^-8; different dropout
            # masks would change them by about one.
            assert relative_distance(found[level][name], value) <= 0.05, (level, name)
