"""`parallelize`: two processes hold half of a model each, and compute the gradients of the whole."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import pytest
import torch
from adapted import with_adapters
from randomised import randomise
from ranks import run_ranks
from rounding import beyond_bound

import liger_models
from liger_models.architectures import find_architecture
from liger_models.losses import shared_prompts

RANK = Path(__file__).with_name("parallelize_rank.py")
program = runpy.run_path(str(RANK))
FLOAT32 = ("A_log", "dt_bias", "norm.weight")  # parameters of the checkpoint "mixed"

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny checkpoints."""
    folder = tmp_path_factory.mktemp("parallelize")
    for family in program["CASES"]:
        torch.manual_seed(0)
        model = liger_models.from_config({**find_architecture(family).tiny, "vocab_size": 133})  # uneven
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.3)
        model.save_pretrained(folder / family, max_shard_size="50KB")
    further = {**find_architecture("glm4_moe").tiny, "num_nextn_predict_layers": 2}
    randomise(liger_models.from_config(further, mtp=True)).save_pretrained(folder / "further")
    torch.manual_seed(0)
    model = liger_models.from_config(find_architecture("qwen3_5_text").tiny, dtype="bfloat16")
    for name, p in model.named_parameters():
        if name.endswith(FLOAT32):
            p.data = p.data.float() + torch.rand_like(p.data, dtype=torch.float32) / 100
    model.save_pretrained(folder / "mixed", dtype="parameters")
    large = {**find_architecture("llama").tiny, "vocab_size": 60_000, "hidden_size": 256}
    liger_models.from_config(large).save_pretrained(folder / "large")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """Results of each rank."""
    return run_ranks(RANK, folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", program["CASES"])
def test_two_ranks_read_their_rows_and_compute_the_gradients_of_one(family, folder, found):
    results = [of_rank[family] for of_rank in found]
    total = sum(path.stat().st_size for path in (folder / family).glob("*.safetensors"))
    copies = 2 if family == "qwen3_moe" else 1  # replicas
    for result in results:
        assert result["read"] == result["held"]
        assert 0.4 * copies * total < result["read"] < 0.6 * copies * total

    model = liger_models.from_hub(folder / family)
    ids = program["batch"](model.spec.vocab_size)
    # Row by row, as on the ranks: an auxiliary loss is not linear in its batch.
    calls = [{"input_ids": row, "labels": row, "num_items_in_batch": ids.numel()} for row in ids.split(1)]
    for result in results:
        assert not beyond_bound(result["gradients"], lambda: gradients(model, calls))


def gradients(model, calls):
    """Gradients of trainable parameters, summed over some calls."""
    model.zero_grad()
    for call in calls:
        model(**call).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_models_that_cannot_be_sharded_are_refused(found):
    for of_rank in found:
        errors = of_rank["refused"]
        assert "already sharded over processes" in errors["twice"]
        assert "lm_head.weight is quantised (torch.int8" in errors["quantised"]
        assert (
            "layer 0 has trainable parameters in torch.float32 as well as torch.bfloat16" in errors["mixed"]
        )
        assert "the same number of tokens" in errors["generate"]
        assert "is 3, but there are 2 processes" in errors["sizes"]


@pytest.mark.slow
def test_adapters_of_a_sharded_model_get_the_gradients_of_one_process(folder, found):
    pytest.importorskip("peft")
    for case, (family, settings, _) in enumerate(program["ADAPTED"]):
        model = with_adapters(liger_models.from_hub(folder / family, projections="split"), settings)
        ids = program["batch"](model.spec.vocab_size)
        halves = ids[::2], ids[1::2]
        calls = [{"input_ids": half, "labels": half, "num_items_in_batch": ids.numel()} for half in halves]
        for of_rank in found:
            assert not beyond_bound(of_rank["adapted"][case], functools.partial(gradients, model, calls))


@pytest.mark.slow
def test_answers_that_share_their_prompt_get_the_gradients_of_one_process(folder, found):
    model = liger_models.from_hub(folder / "gemma2")
    calls = [{**shared_prompts([prompt]), "num_items_in_batch": 12} for prompt in program["PROMPTS"]]
    for of_rank in found:
        assert not beyond_bound(of_rank["shared"], lambda: gradients(model, calls))


@pytest.mark.slow
def test_multi_token_prediction_of_a_sharded_model_gets_the_gradients_of_one_process(folder, found):
    model = liger_models.from_hub(folder / "further", mtp=True)
    ids = program["batch"](model.spec.vocab_size)
    options = {"num_items_in_batch": ids.numel(), "mtp_weight": 0.5}
    calls = [{"input_ids": half, "labels": half, **options} for half in (ids[::2], ids[1::2])]
    for of_rank in found:
        assert not beyond_bound(of_rank["further_tokens"], lambda: gradients(model, calls))


@pytest.mark.slow
def test_gradients_computed_in_bfloat16_are_summed_in_float32(folder, found):
    shares = []
    for rank in range(2):
        model = liger_models.from_hub(folder / "llama", dtype="bfloat16")
        half = program["batch"](model.spec.vocab_size)[rank::2]
        model(half, labels=half, num_items_in_batch=half.numel()).loss.backward()
        shares.append({name: p.grad.float() for name, p in model.named_parameters()})
    for name in shares[0]:
        mean = (shares[0][name] + shares[1][name]) / 2
        for of_rank in found:
            assert torch.equal(of_rank["in_half_precision"]["bfloat16"][name], mean.bfloat16()), name
            # With float32 parameters and bfloat16 compute, the sum stays in float32.
            assert torch.equal(of_rank["in_half_precision"]["float32"][name], mean), name


@pytest.mark.slow
def test_float32_parameters_of_bfloat16_layers_keep_their_dtype(folder, found):
    shares = []
    for rank in range(2):
        model = liger_models.from_hub(folder / "mixed")
        half = program["batch"](model.spec.vocab_size)[rank::2]
        model(half, labels=half, num_items_in_batch=half.numel()).loss.backward()
        shares.append({name: p.grad.float() for name, p in model.named_parameters()})
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["layers.0.linear_attn.A_log"] == dtypes["norm.weight"] == torch.float32
    for name, dtype in dtypes.items():
        mean = (shares[0][name] + shares[1][name]) / 2
        for of_rank in found:
            gradient = of_rank["in_two_dtypes"][name]
            assert gradient.dtype == dtype, name
            assert torch.equal(gradient, mean.to(dtype)), name


@pytest.mark.slow
def test_after_an_evaluation_the_model_is_sharded_and_steps_take_effect(found):
    assert [of_rank["after_evaluation"] for of_rank in found] == [{"divided": True, "stale": False}] * 2


@pytest.mark.slow
def test_all_ranks_choose_the_same_levels(found):
    levels = [of_rank["fitted"] for of_rank in found]
    assert levels[0] == levels[1]
    # Nothing fits, so the peak is the least, which some layers reach without repeating all of their work.
    assert set(levels[0]) & {"checkpoint", "tiled", "offload"}, levels


@pytest.mark.slow
def test_loading_needs_host_memory_for_a_shard_only(found):
    for memory in [of_rank["memory_of_a_large_one"] for of_rank in found]:
        if memory is None:
            pytest.skip("only Linux reports the peak memory of a process")
        assert memory["held"] > 50
        # The 16 MiB staging buffer for values that cannot be read in place is not needed here.
        assert memory["peak"] < memory["held"] + 16
