"""Vision-language models in transformers: requirements of its tools other than the forward pass."""

from __future__ import annotations

import pytest
import torch

from liger_models.architectures import find_architecture

transformers = pytest.importorskip("transformers")


def tiny_config(family):
    return transformers.AutoConfig.for_model(**find_architecture(family).tiny)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "llava"])
def test_the_class_of_a_base_model_can_be_instantiated_again(family, hf):
    """Its modules have other names than in our code; the class stores the mapping."""
    config = tiny_config(family)
    first = hf.classes_of(family).base(config)
    second = type(first)(config)
    second.load_state_dict(first.state_dict())
    assert [name for name, _ in second.named_modules()] == [name for name, _ in first.named_modules()]
    ids = torch.randint(5, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    first, second = (m.eval()(ids, token_type_ids=None).last_hidden_state for m in (first, second))
    assert torch.equal(first, second)


def test_unused_tensors_are_initialised_as_in_transformers(hf):
    """SigLIP's head has a probe, a parameter of the module itself. Xavier's bound is sqrt(6 / (a + b))."""
    config = tiny_config("gemma3")
    model = hf.classes_of("gemma3").causal_lm(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".head." not in name}
    loaded = type(model).from_pretrained(None, config=config, state_dict=state)
    for made in (model, loaded):
        head = made.model.vision_tower.head
        assert 0 < head.probe.std() < head.probe.abs().max() <= (6 / (1 + 32)) ** 0.5
        assert 0 < head.attention.in_proj_weight.std() <= (6 / (32 + 96)) ** 0.5
        assert not head.attention.in_proj_bias.any()
