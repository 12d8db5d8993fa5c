"""Adapters on weights that several layers share: one for all of these layers, as for the weights."""

from __future__ import annotations

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from randomised import randomise_trained
from safetensors.torch import load_file, save_file

from liger_models.convert.errors import CheckpointError

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 131, (1, 7), generator=torch.Generator().manual_seed(0))
CONFIG = {"r": 3, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
SHARED = r".*shared_transformer.*(q_proj|o_proj|down_proj)"


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_an_adapter_on_shared_weights_is_that_of_transformers_in_every_layer(make_both, tmp_path):
    both = make_both("zamba2", projections="split")
    ours = peft.get_peft_model(both.ours, peft.LoraConfig(**CONFIG, target_modules=SHARED))
    found = logits(randomise_trained(ours).eval())
    ours.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    once = load_file(file)
    assert {name.split(".shared_transformer.")[0] for name in once} == {"base_model.model.model.layers.1"}
    save_file(once | {name.replace("layers.1.", "layers.2."): x.clone() for name, x in once.items()}, file)
    theirs = peft.PeftModel.from_pretrained(both.reference, tmp_path).eval()
    assert relative_distance(found, logits(theirs)) <= BOUND
    merged = ours.merge_and_unload()
    assert relative_distance(logits(merged), found) <= BOUND


def test_adapters_that_differ_between_the_layers_are_refused(make_both, tmp_path):
    both = make_both("zamba2", projections="split")
    theirs = peft.get_peft_model(both.reference, peft.LoraConfig(**CONFIG, target_modules=SHARED))
    randomise_trained(theirs).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.2\.shared_transformer.*this model does not"):
        peft.PeftModel.from_pretrained(both.ours, tmp_path)


def test_shared_weights_have_one_parameter_and_the_sum_of_the_gradients(make_both):
    both = make_both("zamba2")
    shared = "model.layers.1.shared_transformer.feed_forward.down_proj.weight"
    names = {name for name, _ in both.ours.named_parameters()}
    assert shared in names
    assert shared.replace("layers.1.", "layers.2.") not in names
    for model in (both.ours, both.reference):
        model(input_ids=IDS, labels=IDS).loss.backward()
    ours, theirs = (dict(model.named_parameters())[shared].grad for model in (both.ours, both.reference))
    assert relative_distance(ours, theirs) <= BOUND
