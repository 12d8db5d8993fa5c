"""Models with 8-bit torchao weights match transformers' own with the same weights."""

from __future__ import annotations

import pytest
import torch
from hf_pairs import BOUND, relative_distance

import liger_models
from liger_models.architectures import find_architecture

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
quantization = pytest.importorskip("torchao.quantization")


def read(folder, **options):
    if not (folder / "quantised").exists():
        settings = quantization.Int8WeightOnlyConfig(version=2)
        options["quantization_config"] = transformers.TorchAoConfig(settings)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map={"": "cpu"}, **options
    ).train()


@pytest.mark.supports("torchao", "8-bit weights", "saving and loading them", "LoRA on them")
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_eight_bit_weights_match_the_reference(family, make_both, batch, hf, tmp_path):
    both = make_both(family, projections="split")
    hf.unregister()
    theirs = read(both.folder, attn_implementation="eager")
    hf.register("split")
    ours = read(both.folder)
    kinds = {type(model.model.layers[0].self_attn.q_proj.weight) for model in (ours, theirs)}
    assert len(kinds) == 1
    assert torch.nn.Parameter not in kinds
    expected = theirs(**batch).loss
    assert relative_distance(ours(**batch).loss, expected) <= BOUND

    for model, name in ((theirs, "theirs"), (ours, "ours")):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "quantised").touch()
    again = read(tmp_path / "theirs")
    assert relative_distance(again(**batch).loss, expected) <= BOUND
    hf.unregister()
    assert torch.equal(read(tmp_path / "ours", attn_implementation="eager")(**batch).loss, expected)

    targets = ["q_proj", "k_proj", "v_proj"]
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    mine = peft.PeftModel.from_pretrained(ours, tmp_path / "adapter", is_trainable=True).train()
    losses = [model(**batch).loss for model in (adapted.train(), mine)]
    assert relative_distance(losses[1], losses[0]) <= BOUND
    for loss in losses:
        loss.backward()
    for name, p in adapted.named_parameters():
        if p.requires_grad:
            assert relative_distance(mine.get_parameter(name).grad, p.grad) <= BOUND, name


@pytest.mark.parametrize("bits", ["float8", "int8", "int4"])
def test_files_are_read_dense_with_the_bits_of_its_own_dequantisation(bits, tmp_path):
    from torchao.quantization.granularity import PerGroup

    config = {
        "float8": lambda: quantization.Float8WeightOnlyConfig(),
        "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
        "int4": lambda: quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(32)
        ),
    }[bits]()
    tiny = {**find_architecture("llama").tiny, "hidden_size": 64, "intermediate_size": 96}
    model = liger_models.from_config(tiny, dtype="bfloat16", device="cpu")
    model.save_pretrained(tmp_path / "dense")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=transformers.TorchAoConfig(config), dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "quantised")
    expected = {n: x.dequantize() if hasattr(x, "qdata") else x for n, x in theirs.state_dict().items()}
    assert any(hasattr(x, "qdata") for x in theirs.state_dict().values())
    found = dict(liger_models.from_hub(tmp_path / "quantised", device="cpu").checkpoint_tensors())
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
