"""Shards under Hugging Face's names, for verl's checkpoint engines that send only what has changed
(`delta_sharded`): each process compares and sends its own rows, and none gathers a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export

from liger_models.convert.checkpoints.expressions import Place, Ref
from liger_models.convert.checkpoints.shards import local_part
from liger_models.convert.checkpoints.weight_map import connected
from liger_models.convert.errors import UnsupportedModelError
from liger_models.models.causal_lm import LigerCausalLM


class SendsShards:
    """The part of an engine that sends shards."""

    module: Any
    device: torch.device
    adapters: Any
    _compute_dtype: Any
    _delta_shard_snap: dict[str, Tensor]  # verl's copies of what was sent last

    def get_per_tensor_param_shard(
        self, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor, ShardSpec]], None]:
        """Stream this process's shards, without gathering tensors: see `shards_of`.

        Raises:
            UnsupportedModelError: the policy has adapters, or keeps a weight in an order of its own.
        """
        if self.adapters is not None:
            raise UnsupportedModelError(
                "verl's sharded checkpoint engines send whole weights, and this policy has adapters; use "
                "another checkpoint engine, which sends only the adapters"
            )
        return shards_of(self.module, self._compute_dtype(), self.device), None

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Iterator[Any], None]:
        """Stream the elements that have changed since the last call, or since `prime_delta_snapshots`."""
        self._delta_shard_snap = getattr(self, "_delta_shard_snap", {})
        shards, _ = self.get_per_tensor_param_shard()
        return hf_delta_export(shards, self._delta_shard_snap, _hf_entry_identity), None


def shards_of(
    model: LigerCausalLM, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """Yield this process's elements of every checkpoint tensor, flattened, under the names of published
    checkpoints, in the same order on all processes. If processes hold the same shard, the first one sends it.

    Raises:
        UnsupportedModelError: a shard is not one run of a tensor's elements, such as transposed weights.
    """
    weight_map = model.weight_map(model.architecture.layouts[0])
    natives = model.saved_tensors()
    parts = {name: local_part(tensor.detach(), weight_map[name]) for name, tensor in natives.items()}
    owned = _owned(natives)
    for group in connected(weight_map):
        places: dict[Ref, list[Place]] = {}
        for name in group:
            local, expr = parts[name]
            cast = isinstance(natives[name], nn.Parameter) and local.is_floating_point()
            local = local.to(device=device, dtype=dtype if cast else local.dtype)
            places |= {ref: places.get(ref, []) for ref in weight_map[name].refs()}
            for place in expr.places(local):
                places[place.ref].append(place)
        own = all(owned[name] for name in group)
        for ref, found in places.items():
            run, start = _one_run(ref, found, device, dtype)
            yield (
                ref.name,
                run,
                ShardSpec(ref.shape, place=start, gather_group=dist.group.WORLD, contributes=own),
            )


def _one_run(ref: Ref, places: list[Place], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The elements of adjacent places, and the first one's number."""
    places = sorted(places, key=lambda place: place.start)
    if any(after.start != before.stop for before, after in itertools.pairwise(places)):
        raise UnsupportedModelError(
            f"verl's sharded checkpoint engines need shards of {ref.name} that are one run of its elements, "
            "and this model stores it in another order; use a checkpoint engine that sends whole tensors"
        )
    if not places:
        return torch.empty(0, dtype=dtype, device=device), 0
    return torch.cat([place.view.reshape(-1) for place in places]), places[0].start


def _owned(natives: Mapping[str, Tensor]) -> dict[str, bool]:
    """Whether this process is the first of those that hold the same elements of a tensor."""
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = []
    for tensor in natives.values():
        sharded: Any = tensor
        if hasattr(sharded, "__create_chunk_list__"):
            (chunk,) = sharded.__create_chunk_list__()
            chunks.append((tuple(chunk.offsets), tuple(chunk.sizes)))
        else:
            chunks.append(None)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, chunks)
    return {
        name: all(chunks[i] != other[i] for other in everywhere[: dist.get_rank()])
        for i, name in enumerate(natives)
    }
