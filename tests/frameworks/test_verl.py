"""verl's interface of our engine, on two CPU ranks, against a whole model's logits."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture

pytest.importorskip("verl", reason="verl is not installed")

RANK = Path(__file__).with_name("verl_rank.py")
program = runpy.run_path(str(RANK))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    make_model(tie_word_embeddings=False).save_pretrained(folder / "model")
    return folder


def run(folder, kind):
    return run_ranks(RANK, folder, kind)


def distributions(model, ids, temperature):
    """Log-probabilities [tokens - 1, vocabulary] of the tokens after each but the last."""
    return (model(ids[None]).logits[0, :-1].float() / temperature).log_softmax(-1)


def close(found, expected, about=None):
    # Logits of a few units in float32, summed in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=about)


def check_scores(scores, model, rank):
    ids, temperatures, _ = program["sequences"](rank)
    for place, (x, temperature) in enumerate(zip(ids, temperatures, strict=True)):
        with torch.no_grad():
            p = distributions(model, x, temperature)
        found = {name: values.unbind()[place] for name, values in scores.items()}
        close(found["log_probs"][:-1], p.gather(1, x[1:, None])[:, 0])
        close(found["entropy"][:-1], -(p.exp() * p).sum(1))
        if "sum_pi_squared" in found:
            close(found["sum_pi_squared"][:-1], (2 * p).exp().sum(1))


def trained(folder, ranks, steps=1):
    """The whole model after steps on the sequences of these ranks; its loss, and its gradients' norm."""
    model = liger_models.from_hub(folder / "model", device="cpu", dtype=torch.float32)
    tokens = sum(len(x) - 2 for rank in ranks for x in program["sequences"](rank)[0])
    for _ in range(steps):
        model.zero_grad()
        total = 0.0
        for rank in ranks:
            for x, t, a in zip(*program["sequences"](rank), strict=True):
                p = distributions(model, x, t)[1:]  # tokens from the third on
                total = (
                    total - (a * p.gather(1, x[2:, None])[:, 0] - 0.1 * (p.exp() * p).sum(1)).sum() / tokens
                )
        total.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    return model, total.item(), norm


def check_weights(found, model):
    expected = dict(model.checkpoint_tensors())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        close(found[name], tensor.detach(), name)


def test_a_policy_scores_trains_sends_its_weights_and_resumes(folder):
    found = run(folder, "policy")
    whole = liger_models.from_hub(folder / "model", device="cpu")
    one, loss, norm = trained(folder, (0, 1))
    two, *_ = trained(folder, (0, 1), steps=2)
    for rank, results in enumerate(found):
        sent, about = results["sent"]
        assert about is None
        files = load_file(folder / "model" / "model.safetensors")
        assert sent.keys() == files.keys()
        assert all(torch.equal(sent[name], x) for name, x in files.items())
        check_scores(results["scores"], whole, rank)
        check_weights(results["trained"], one)
        assert results["norm"] == pytest.approx(norm, rel=1e-4)
        assert results["rate"] == 0.5
        check_weights(results["next"], two)
        assert all(torch.equal(x, results["next"][name]) for name, x in results["resumed"].items())
    # Each rank's loss is a sum over its tokens, times the number of ranks, which average gradients.
    assert sum(results["loss"] for results in found) / 2 == pytest.approx(loss, rel=1e-4)
    saved = liger_models.from_hub(folder / "checkpoint" / "huggingface", device="cpu")
    check_weights(found[0]["trained"], saved)


def test_ranks_may_share_sequences(folder):
    found = run(folder, "sequences")
    one, *_ = trained(folder, (0,))
    whole = liger_models.from_hub(folder / "model", device="cpu")
    for results in found:
        check_scores(results["scores"], whole, 0)
        check_weights(results["trained"], one)


def test_a_critic_values_every_token(folder):
    found = run(folder, "critic")
    torch.manual_seed(0)
    model = liger_models.from_hub(folder / "model", labels=1, device="cpu")
    with torch.no_grad():
        for rank, results in enumerate(found):
            for x, values in zip(program["sequences"](rank)[0], results["values"], strict=True):
                close(values, model(x[None], every_token=True).logits[0, :, 0])
    (first, second) = (results["head"]["score.weight"] for results in found)
    assert torch.equal(first, second)
    assert not torch.equal(first, model.lm_head.weight)


def test_experts_are_replayed_from_an_earlier_pass_or_the_rollout(folder):
    torch.manual_seed(0)
    model = liger_models.from_config({**find_architecture("qwen3_moe").tiny, "vocab_size": 61})
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    model.save_pretrained(folder / "experts")
    found = run(folder, "routes")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    differ = 0
    for rank, (scores, refused) in enumerate(found):
        assert "router_replay.mode=R3: the batch has no routed_experts" in refused
        for place, (x, t) in enumerate(zip(*program["sequences"](rank)[:2], strict=True)):
            experts = scores["old"]["routed_experts"][place][None]
            assert experts.shape[:2] == (1, len(x))
            last = experts.clone()
            last[:, -1] = -1
            missing = last.clone()
            missing[:, 1] = -1 if place == 0 else missing[:, 1]
            for name, given in (("new", last), ("rollout", missing), ("free", None)):
                with torch.no_grad():
                    call = {"labels": x[None], "temperature": float(t), "routed_experts": given}
                    expected = model.score(x[None], **call).log_probs[0]
                close(scores[name]["log_probs"][place][:-1], expected, name)
            differ += not torch.equal(scores["new"]["log_probs"][place], scores["free"]["log_probs"][place])
    assert differ  # with the larger weights some tokens would have gone to other experts


def test_offloading_moves_what_each_phase_needs_and_changes_no_result(folder):
    for results in run(folder, "offloaded"):
        kept, moved = results[False], results[True]
        assert not any(any(what) for _, *what in kept["moves"])
        assert moved["states"] == kept["states"] > 0
        step = [("cpu", True, True, True)] * 2  # there and back: the device is the host here
        assert moved["moves"] == [*step, *step, *[("cpu", True, False, False)] * 2]
        assert all(torch.equal(x, kept["trained"][name]) for name, x in moved["trained"].items())


def test_shards_are_sent_under_published_names_and_later_only_where_they_changed(folder):
    torch.manual_seed(0)
    model = liger_models.from_config({**find_architecture("qwen3_moe").tiny, "vocab_size": 61})
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    model.save_pretrained(folder / "experts")
    files = load_file(folder / "experts" / "model.safetensors")
    found = run(folder, "shards")
    names = [name for name, *_ in found[0]["first"]]
    assert names == [name for name, *_ in found[1]["first"]]  # the ranks gather in lockstep
    assert set(names) == files.keys()
    rebuilt = {name: torch.full((x.numel(),), torch.nan) for name, x in files.items()}
    for results in found:
        for name, run_, place, contributes, shape in results["first"]:
            assert shape == files[name].shape
            if contributes:
                assert rebuilt[name][place : place + len(run_)].isnan().all()  # no element twice
                rebuilt[name][place : place + len(run_)] = run_
    assert all(torch.equal(x, files[name].flatten()) for name, x in rebuilt.items())
    shares = [sum(len(run_) for _, run_, *_ in results["first"]) for results in found]
    assert max(shares) < 0.6 * sum(x.numel() for x in files.values())  # none has the whole model
    for results in found:
        for name, index, value in results["changed"]:
            rebuilt[name][index.long()] = value
    for name, x in found[0]["whole"].items():
        assert torch.equal(rebuilt[name], x.flatten()), name


def test_adapters_are_sent_alone_or_merged(folder):
    pytest.importorskip("peft")
    found = run(folder, "lora")
    base = load_file(folder / "model" / "model.safetensors")
    whole = liger_models.from_hub(folder / "model", device="cpu")
    for rank, results in enumerate(found):
        alone, about = results["alone"]
        assert {name.split(".lora_")[0].rpartition(".")[2] for name in alone} == {"q_proj", "down_proj"}
        assert all(x.any() for x in alone.values())
        assert (about["r"], about["lora_alpha"], about["task_type"].value) == (2, 4, "CAUSAL_LM")
        assert all(torch.equal(x, results["resumed"][name]) for name, x in alone.items())
        assert all(torch.equal(x, found[0]["alone"][0][name]) for name, x in alone.items())
        below = {name.replace(".base_layer.", "."): x for name, x in results["below"].items()}
        assert any(".q_proj.base_layer." in name for name in results["below"])
        assert all(torch.equal(below[name], x) for name, x in base.items())
        check_scores(results["reference"], whole, rank)
        merged, nothing = results["merged"]
        assert nothing is None
        assert merged.keys() == base.keys()
        for name, x in base.items():
            point = f"base_model.model.{name.removesuffix('.weight')}.lora"
            if f"{point}_A.weight" in alone:
                x = x + 2.0 * alone[f"{point}_B.weight"] @ alone[f"{point}_A.weight"]
            close(merged[name], x, name)
        with torch.no_grad():
            for name, p in whole.saved_tensors().items():
                p.copy_(whole.weight_map()[name].read(merged.__getitem__))
        check_scores(results["scores"], whole, rank)
        with torch.no_grad():
            for name, p in whole.saved_tensors().items():
                p.copy_(whole.weight_map()[name].read(base.__getitem__))


def test_verls_own_configuration_names_our_engine():
    hydra = pytest.importorskip("hydra")
    import verl
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    from liger_models.integrations.verl import LigerEngine

    changes = {
        "strategy": "liger",
        "fsdp_config._target_": "liger_models.integrations.verl_settings.LigerEngineConfig",
        "fsdp_config.expert_parallel_size": "2",
        "ppo_micro_batch_size_per_gpu": "1",
    }
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(folder, version_base=None):
        config = hydra.compose(
            "ppo_trainer", [f"++actor_rollout_ref.actor.{name}={value}" for name, value in changes.items()]
        )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.engine.strategy, actor.engine.expert_parallel_size) == ("liger", 2)
    assert config.actor_rollout_ref.ref.strategy == "liger"
    assert EngineRegistry._engines["language_model"]["liger"]["cuda"] is LigerEngine


def test_settings_that_would_change_results_are_refused():
    from verl.workers.config import HFModelConfig

    from liger_models.integrations.verl_settings import LigerEngineConfig, refuse, targets_of

    model = object.__new__(HFModelConfig)
    vars(model).update(lora_rank=8, exclude_modules=None, target_parameters=None)
    object.__setattr__(model, "mtp", type("Off", (), {"enable_train": False}))
    refuse(model, LigerEngineConfig())
    with pytest.raises(liger_models.UnsupportedModelError, match="does not support offload_policy"):
        refuse(model, LigerEngineConfig(offload_policy=True))
    with pytest.raises(liger_models.UnsupportedModelError, match="lora_rank with ulysses"):
        refuse(model, LigerEngineConfig(ulysses_sequence_parallel_size=2))
    assert targets_of(["q_proj", "v_proj"]) == "q_proj+v_proj"
    assert targets_of("all-linear") == "all-linear"
