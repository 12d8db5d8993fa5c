"""One rank of test_verl.py: run verl's interface of our engines on a CPU.

Read FOLDER/model. Each rank has its own sequences, of the numbers that `sequences` gives.
"""

import types
from pathlib import Path

import torch
from tensordict import NonTensorData, TensorDict
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

import liger_models


class Host(PlatformBase):
    """A platform without an accelerator, which verl lacks."""

    device_name, vendor_name = "cpu", "none"
    device_module = types.SimpleNamespace()


def nothing(self, *arguments, **options):
    return None


Host.current_device = lambda self: "cpu"
for name in Host.__abstractmethods__ - vars(Host).keys():
    setattr(Host, name, nothing)
Host.__abstractmethods__ = frozenset()

LENGTHS = ((5, 9, 3, 7), (4, 6, 8, 2))
TEMPERATURES = (0.5, 1.0, 1.7, 0.8)


def sequences(rank):
    """ids, temperatures and advantages of a rank's sequences."""
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(61, (length,), generator=generator) for length in LENGTHS[rank]]
    return ids, torch.tensor(TEMPERATURES), torch.randn(4, generator=generator)


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(rank, **flags):
    ids, temperatures, advantages = sequences(rank)
    data = TensorDict(
        {
            "input_ids": jagged(ids),
            "position_ids": jagged(torch.arange(len(x)) for x in ids),
            "loss_mask": jagged((torch.arange(len(x)) > 1).long() for x in ids),
            "temperature": temperatures,
            "advantages": advantages,
        },
        batch_size=[4],
    )
    flags = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 12, "calculate_entropy": True} | flags
    for key, value in flags.items():
        data[key] = NonTensorData(value)
    return data


def loss(model_output, data, dp_group=None):
    """A policy gradient with an entropy term: the mean over the tokens of the whole batch."""
    if "values" in model_output:
        found = (model_output["values"].values() - 1) ** 2
    else:
        each = data["advantages"].repeat_interleave(data["input_ids"].offsets().diff())
        found = -each * model_output["log_probs"].values() - 0.1 * model_output["entropy"].values()
    mask = data["loss_mask"].values().roll(-1)
    return (found * mask).sum() * data["dp_size"] / data["batch_num_tokens"], {"seen": int(mask.sum())}


def engine(folder, kind="language_model", model=None, momentum=0.0, **settings):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from liger_models.integrations.verl_settings import LigerEngineConfig

    model = HFModelConfig(**{"path": str(folder / "model"), "load_tokenizer": False} | (model or {}))
    model.model_type = kind
    config = LigerEngineConfig(mixed_precision={"param_dtype": "fp32"}, **settings)
    optimizer = FSDPOptimizerConfig(
        lr=0.5,
        optimizer="SGD",
        weight_decay=0.0,
        clip_grad=1e9,
        total_training_steps=10,
        lr_warmup_steps=0,
        override_optimizer_config={"momentum": momentum} if momentum else None,
    )
    found = EngineRegistry.new(
        kind,
        "liger",
        model_config=model,
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    found.initialize()
    return found


def results(folder: Path, rank: int, ranks: int, kind: str):
    platform_manager.set_platform(Host())
    import liger_models.integrations.verl  # noqa: F401 - as verl's entry point does

    programs = {"policy": policy, "critic": critic, "sequences": divided, "lora": lora, "routes": routes}
    return (programs | {"offloaded": offloaded, "shards": shards})[kind](folder, rank)


def weights(engine, **options):
    pairs, about = engine.get_per_tensor_param(**options)
    return {name: x.clone() for name, x in pairs}, about


def policy(folder, rank):
    made = engine(folder, use_no_sync_for_gradient_accumulation=True)
    found = {"sent": weights(made)}
    with made.eval_mode():
        found["scores"] = made.infer_batch(batch(rank, calculate_sum_pi_squared=True))["model_output"]
    with made.train_mode():
        output = made.train_batch(batch(rank), loss)
        assert not output["model_output"]
        found["norm"], found["loss"] = output["metrics"]["grad_norm"], sum(output["loss"])
    found["trained"] = weights(made)[0]
    made.save_checkpoint(str(folder / "checkpoint"), max_ckpt_to_keep=1)
    for again in ("next", "resumed"):
        with made.train_mode():
            made.train_batch(batch(rank), loss)
        found[again] = weights(made)[0]
        made.load_checkpoint(str(folder / "checkpoint"))
    found["rate"] = made.lr_scheduler_step()
    return found


def offloaded(folder, rank):
    """Two steps with parameters and optimizer state on the host between verl's phases, and without.

    Host and device are the same here, so the calls that move tensors are recorded.
    """
    found = {}
    for offload in (False, True):
        made = engine(folder, momentum=0.9, param_offload=offload, optimizer_offload=offload)
        moves, to = [], made.to

        def recorded(device, model=True, optimizer=True, grad=True, moves=moves, to=to):
            moves.append((device, model, optimizer, grad))
            to(device, model=model, optimizer=optimizer, grad=grad)

        made.to = recorded
        state = made.optimizer.state
        for _ in range(2):
            with made.train_mode():
                made.train_batch(batch(rank), loss)
        with made.eval_mode():
            made.infer_batch(batch(rank))
        assert all(name == "momentum_buffer" for one in state.values() for name in one)
        found[offload] = {"moves": moves, "trained": weights(made)[0], "states": len(state)}
    return found


def shards(folder, rank):
    """Shards of the first weights, and the elements that a step changes."""
    made = engine(folder, model={"path": str(folder / "experts")})

    def sent():
        pairs, nothing = made.get_per_tensor_param_shard()
        assert nothing is None
        return [(name, x.clone(), s.place, s.contributes, tuple(s.full_shape)) for name, x, s in pairs]

    found = {"first": sent()}
    made.delta_pin_snapshots = False
    made.prime_delta_snapshots()
    with made.train_mode():
        made.train_batch(batch(rank), loss)
    deltas, _ = made.get_per_tensor_param_delta_shard()
    found["changed"] = [
        (slots[0][0], index.clone(), value.clone()) for slots, _, _, index, value, _ in deltas
    ]
    found["whole"] = weights(made)[0]
    return found


def critic(folder, rank):
    torch.manual_seed(0)
    made = engine(folder, "value_model")
    with made.eval_mode():
        values = made.infer_batch(batch(rank))["model_output"]["values"]
    with made.train_mode():
        made.train_batch(batch(rank), loss)
    after = dict(made.module.checkpoint_tensors())
    return {"values": list(values.unbind()), "head": {k: x for k, x in after.items() if k == "score.weight"}}


def divided(folder, rank):
    """Both ranks share the sequences of the first."""
    made = engine(folder, ulysses_sequence_parallel_size=2)
    assert (made.get_data_parallel_size(), made.get_data_parallel_rank()) == (1, 0)
    assert made.is_mp_src_rank_with_outputs() is (rank == 0)
    with made.eval_mode():
        scores = made.infer_batch(batch(0))["model_output"]
    with made.train_mode():
        made.train_batch(batch(0), loss)
    return {"scores": scores, "trained": weights(made)[0]}


def routes(folder, rank):
    """Replay of routing. R2: the pass that computes the old scores records its experts, and a step replays
    them after the weights have changed. R3: a step replays the experts of a rollout, which lack the last
    token and one more row.
    """
    made = engine(folder, model={"path": str(folder / "experts")}, router_replay=replay("R2"))
    with made.eval_mode():
        old = made.infer_batch(batch(rank))["model_output"]
    with torch.no_grad():
        for p in made.module.parameters():
            p.mul_(1.5)
    data = batch(rank)
    data["routed_experts"] = old["routed_experts"]
    with made.eval_mode():
        new = made.infer_batch(data)["model_output"]
        free = made.infer_batch(batch(rank))["model_output"]
    step = data
    object.__setattr__(made.engine_config, "router_replay", replay("R3"))  # it is frozen
    data = batch(rank)
    rows = [x[:-1].clone() for x in old["routed_experts"].unbind()]
    rows[0][1] = 0  # not recorded
    data["routed_experts"] = jagged(rows)
    with made.eval_mode():
        rollout = made.infer_batch(data)["model_output"]
        try:
            made.infer_batch(batch(rank))
        except liger_models.DataError as error:
            refused = str(error)
    with made.train_mode():
        made.train_batch(step, loss)
    found = {"old": old, "new": new, "free": free, "rollout": rollout}
    return {name: {key: list(x.unbind()) for key, x in one.items()} for name, one in found.items()}, refused


def replay(mode):
    from verl.workers.config.engine import EngineRouterReplayConfig

    return EngineRouterReplayConfig(mode=mode)


def lora(folder, rank):
    model = {
        "lora_rank": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj"],
        "lora": {"merge": False},
    }
    made = engine(folder, model=model)
    with made.train_mode():
        for _ in range(2):  # the first step moves only the second matrix, which begins at zero
            made.train_batch(batch(rank), loss)
    found = {"alone": weights(made, base_sync_done=True), "below": weights(made, base_sync_done=False)[0]}
    with made.eval_mode():
        found["scores"] = made.infer_batch(batch(rank))["model_output"]
        with made.disable_adapter():
            found["reference"] = made.infer_batch(batch(rank))["model_output"]
    made.save_checkpoint(str(folder / "adapter"))
    with made.train_mode():
        made.train_batch(batch(rank), loss)
    made.load_checkpoint(str(folder / "adapter"))
    found["resumed"] = weights(made, base_sync_done=True)[0]
    made.model_config.lora["merge"] = True
    found["merged"] = weights(made)
    return found
