"""One rank of test_deepep.py: a step through torch's collectives and one through a stand-in for DeepEP, which
has the documented interface of its `Buffer`, checks what it is given, and exchanges over gloo.

Results: by backend and level the loss and full gradients; the stand-in's calls.
"""

import functools
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import liger_models
from liger_models import ParallelDims, parallelize
from liger_models.architectures import find_architecture

LEVELS = ("lean", "mlp", "checkpoint")


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    calls: ClassVar[list[str]] = []

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int):
        self.group, self.ranks, self.row = group, group.size(), num_nvl_bytes // group.size()
        Buffer.calls.append("buffer")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        assert num_experts % self.ranks == 0
        owner = topk_idx // (num_experts // self.ranks)
        needed = torch.zeros(len(topk_idx), self.ranks, dtype=torch.bool).scatter_(1, owner, True)
        for_expert = topk_idx.flatten().bincount(minlength=num_experts).int()
        return needed.sum(0).int(), None, for_expert, needed, None

    def dispatch(self, x: Tensor, handle: Any = None, **layout: Any) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] * 2 <= self.row
        if handle is not None:
            assert not layout
            Buffer.calls.append("again")
            return self._exchange(x, *handle), None, None, None, None, None
        Buffer.calls.append("dispatch")
        experts, weights, needed = (layout[k] for k in ("topk_idx", "topk_weights", "is_token_in_rank"))
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()
        received = torch.empty(self.ranks, dtype=torch.int32)
        torch.distributed.all_to_all_single(received, layout["num_tokens_per_rank"], group=self.group)
        handle = needed, received.tolist()
        own = len(layout["num_tokens_per_expert"]) // self.ranks
        local = self._exchange(experts.float(), *handle).long() - self.group.rank() * own
        local = torch.where((local >= 0) & (local < own), local, -1)
        there = self._exchange(weights, *handle).masked_fill(local < 0, 0)
        counts = local[local >= 0].bincount(minlength=own).tolist()
        return self._exchange(x, *handle), local, there, counts, handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        Buffer.calls.append("combine")
        weights = None if topk_weights is None else self._back(topk_weights, *handle)
        return self._back(x, *handle).to(x.dtype), weights, None

    def _exchange(self, x: Tensor, needed: Tensor, received: list[int]) -> Tensor:
        rows = torch.cat([x[column] for column in needed.T]).float()
        found = rows.new_empty(sum(received), x.shape[1])
        sizes = received, needed.sum(0).tolist()
        torch.distributed.all_to_all_single(found, rows, *sizes, group=self.group)
        return found.to(x.dtype)

    def _back(self, rows: Tensor, needed: Tensor, received: list[int]) -> Tensor:
        sent = needed.sum(0).tolist()
        found = rows.new_empty(sum(sent), rows.shape[1], dtype=torch.float32)
        torch.distributed.all_to_all_single(found, rows.float(), sent, received, group=self.group)
        y = found.new_zeros(len(needed), rows.shape[1])
        for column, part in zip(needed.T, found.split(sent), strict=True):
            y[column] += part
        return y


def results(folder: Path, rank: int, ranks: int) -> tuple[dict[str, Any], list[str]]:
    module: Any = types.ModuleType("deep_ep")
    module.Buffer = Buffer
    sys.modules["deep_ep"] = module  # in this process, which ends with the test
    torch.manual_seed(rank)
    ids = torch.randint(0, 131, (1, (23, 9)[rank]))
    found = {}
    for backend in ("standard", "deepep"):
        dims = ParallelDims(experts=ranks)
        shard = functools.partial(parallelize, mesh=dims, expert_comm_backend=backend)
        tiny = find_architecture("qwen3_moe").tiny | {"torch_dtype": "bfloat16"}
        torch.manual_seed(0)
        model = liger_models.from_config(tiny, dtype=torch.bfloat16, shard=shard)
        for level in LEVELS:
            model.set_activation_memory(level)
            loss = model(ids, labels=ids).loss
            loss.backward()
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            found[backend, level] = loss.detach(), gradients
            model.zero_grad()
    return found, Buffer.calls
