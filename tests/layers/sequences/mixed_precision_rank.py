"""One rank of test_parts.py: layers under FSDP2 with a bfloat16 policy, and the arguments of the second."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    rope = RopeSpec(8)
    block = BlockSpec(AttentionSpec(2, 2, 8, 0.35, rope), MLPSpec(32), NormSpec())
    model = CausalLM(ModelSpec(vocab_size=600, hidden_size=16, blocks=(block, block), norm=NormSpec()))
    mesh, policy = init_device_mesh("cpu", (ranks,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    first, second = model.layers
    # The first layer returns float32, so that FSDP2 casts the arguments of the second.
    fully_shard(first, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
    fully_shard(second, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    given: list[tuple[Any, ...]] = []
    # FSDP2's own hook runs between the two.
    second.register_forward_pre_hook(lambda _, args: given.append(args), prepend=True)
    second.register_forward_pre_hook(lambda _, args: given.append(args))
    ids = torch.arange(514)[None]  # positions that bfloat16 would round
    model(ids, labels=ids).loss.backward()
    before, after = given
    sequences = after[2]
    return {
        "hidden states": (before[0].dtype, after[0].dtype),
        "same batch": before[2] is sequences,
        "positions": sequences.positions.ids.equal(torch.arange(514)),
        "tables": [table.dtype for table in sequences.positions.rotary[rope]],
    }
