"""`checkpoint_tensors()` yields the named tensors that `save_pretrained` writes."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama", "gemma2", "qwen3_moe", "gpt_oss", "phi3", "falcon", "gpt_neox", "stablelm"]


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.supports("vLLM", "names and tensors for weight synchronisation")
@pytest.mark.parametrize("projections", ["fused", "split"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_equal_the_saved_tensors(family, projections, make_both, tmp_path):
    both = make_both(family, projections=projections)
    tied = both.ours.config.tie_word_embeddings
    for model in (both.ours, both.ours.to(torch.bfloat16), both.ours.base_model):
        expected = saved(model, tmp_path / "saved")
        head = find_architecture(family).layouts[0].name("lm_head.weight")
        assert (head in expected) == (not tied and model is both.ours)
        assert_same(dict(model.checkpoint_tensors()), expected)


def test_they_include_the_head_of_a_reward_model(make_both, tmp_path):
    both = make_both("llama", "SequenceClassification", num_labels=1)
    expected = saved(both.ours, tmp_path / "saved")
    assert "score.weight" in expected
    assert_same(dict(both.ours.checkpoint_tensors()), expected)


def test_they_use_no_extra_memory(make_both):
    """Tensors are views of the parameters, except fused tensors of split projections."""
    both = make_both("qwen3_moe")
    own = {p.untyped_storage().data_ptr() for p in both.ours.parameters()}
    assert all(x.untyped_storage().data_ptr() in own for _, x in both.ours.checkpoint_tensors())


WAYS = {
    "lora": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "packed": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    "dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "saved": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding": {"target_modules": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [3, 5]},
    "experts": {
        "target_modules": ["o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def adapt(model, way):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", init_lora_weights=False, **WAYS[way])
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
    return adapted.eval()


@pytest.mark.supports("vLLM", "the same with PEFT adapters merged into them")
@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_merged_into_them_without_changing_the_model(way, make_both, batch, tmp_path):
    family = "qwen3_moe" if way == "experts" else "qwen2" if way == "bias" else "llama"
    projections = "fused" if way == "packed" else "split"
    both = make_both(family, projections=projections, tie_word_embeddings=False)
    base = dict(both.ours.checkpoint_tensors())
    adapted = adapt(both.ours, way)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    found = {name: x.clone() for name, x in adapted.checkpoint_tensors()}
    assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters())
    assert_same(found, saved(copy.deepcopy(adapted).merge_and_unload(), tmp_path / "merged"))
    assert any(not torch.equal(found[name], x) for name, x in base.items())
    merged = liger_models.from_pretrained(tmp_path / "merged")
    expected = adapted(**batch).loss.detach()
    labels = batch["labels"]
    assert relative_distance(merged(**batch).loss, expected) <= BOUND, labels
    with adapted.disable_adapter():
        assert_same(dict(adapted.checkpoint_tensors()), base)
    adapted.merge_adapter()  # merged by the user: nothing must be added twice
    assert_same(dict(adapted.checkpoint_tensors()), found)


def test_an_adapter_that_unties_the_head_is_refused(make_both):
    both = make_both("llama", tie_word_embeddings=True)
    adapted = adapt(both.ours, "embedding")
    with pytest.raises(liger_models.CheckpointError, match="are tied, and an adapter would make them differ"):
        list(adapted.checkpoint_tensors())


@pytest.fixture
def sync_weights():
    """Factory: `sync_weights(model, iterator)` returns the weights that TRL sends to a colocated vLLM."""
    from types import SimpleNamespace

    generation = pytest.importorskip("trl.generation.vllm_generation", reason="TRL is not installed")
    from trl.distributed import DistributedBackend

    def sync(model, iterator=None):
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        sent = {}
        engine = object.__new__(generation.VLLMGeneration)  # its constructor starts vLLM
        engine.model, engine.accelerator, engine.mode = model, accelerator, "colocate"
        engine.enable_sleep_mode, engine._dist = False, DistributedBackend(accelerator)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=sent.update))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        executor = SimpleNamespace(model_executor=worker)
        engine.llm = SimpleNamespace(llm_engine=executor, reset_prefix_cache=lambda: None)
        if iterator is not None:
            engine._iter_named_params = iterator
        engine.sync_weights()
        return sent

    return sync


@pytest.mark.supports("vLLM", "weights that TRL sends")
def test_trl_sends_vllm_the_tensors_of_the_checkpoint(make_both, sync_weights, tmp_path):
    """TRL's own iterator suffices for split projections without experts; other models need ours."""
    both = make_both("llama", projections="split")
    assert_same(sync_weights(both.ours), saved(both.ours, tmp_path / "split"))
    both = make_both("qwen3_moe")
    sent = sync_weights(both.ours, both.ours.checkpoint_tensors)
    assert_same(sent, saved(both.ours, tmp_path / "experts"))
