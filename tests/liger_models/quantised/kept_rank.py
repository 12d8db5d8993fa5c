"""One rank of test_kept_sharded.py: a step over quantised bits that are divided over the ranks.

For each NAME/source in FOLDER, returns the loss of this rank's row, the mean over ranks of each gradient, and
the bytes that were read and held, for each way to divide.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from ranks import Count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_models
from liger_models.convert.checkpoints.shards import is_sharded, local_tensor
from liger_models.layers.experts.expert_parallel import divide_experts
from liger_models.parallel import ParallelDims, parallelize

ROWS = torch.arange(2 * 9).view(2, 9) + 3


class Gathered:
    """Counts the bytes that FSDP2 gathers within it."""

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

    def __enter__(self) -> Gathered:
        self.nbytes, self.true = 0, getattr(dist, self.name)
        setattr(dist, self.name, self)
        return self

    def __call__(self, output: torch.Tensor | None = None, *arguments: Any, **options: Any) -> Any:
        if output is None:
            (name,) = (name for name in options if name.startswith("output"))
            output = options.pop(name)
        self.nbytes += output.nbytes
        return self.true(output, *arguments, **options)

    def __exit__(self, *exc: object) -> None:
        setattr(dist, self.name, self.true)


def load(folder: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "device": "cpu", "projections": "split", **options}
    return liger_models.from_hub(folder, keep_quantised=True, **options)


def adapted(model: Any) -> Any:
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"], target_parameters=stacks)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.1
    return model


def step(model: Any, rows: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    trained = ((name, p) for name, p in model.named_parameters() if p.grad is not None)
    return loss.item(), {name: p.grad for name, p in trained}


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (ranks,)), {}

    def by_rows(model: Any, **options: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    def with_policy(model: Any) -> None:
        by_rows(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    for path in sorted(path for path in folder.iterdir() if (path / "source").is_dir()):
        ways: dict[str, Any] = {"rows": by_rows, "policy": with_policy, "parallelize": parallelize}
        if "experts one by one" in path.name:
            ways["experts"] = lambda model: divide_experts(model, mesh)
            ways["parallelize, experts"] = partial(parallelize, mesh=ParallelDims(experts=ranks))
        for way, divide in ways.items():
            with Count() as count:
                model = load(path / "source", shard=divide)
            held = sum(local_tensor(p).nbytes for p in model.parameters())
            with Gathered() as gathered:
                found[f"{path.name}, {way}"] = count.nbytes, held, *averaged(model, rank, ranks)
            whole = sum(p.numel() * p.element_size() for p in model.parameters())
            # Bytes in forward and in backward, no decoded matrix; FSDP2 pads the rows of some parameters.
            if way not in ("policy", "experts"):
                assert 0 < gathered.nbytes <= 2.2 * whole, (way, gathered.nbytes, whole)
        model = adapted(load(path / "source"))
        by_rows(model.base_model.model)
        found[f"{path.name}, adapters"] = 0, 0, *averaged(model, rank, ranks)
        if "experts" in ways:
            model = adapted(load(path / "source", shard=ways["experts"]))
            found[f"{path.name}, adapters of divided experts"] = 0, 0, *averaged(model, rank, ranks)
    return found


def averaged(model: Any, rank: int, ranks: int) -> tuple[float, dict[str, list[float]]]:
    loss, grads = step(model, ROWS[rank : rank + 1])
    whole = {}
    for name, grad in grads.items():
        if is_sharded(grad):
            whole[name] = grad.full_tensor()
        else:
            dist.all_reduce(grad)
            whole[name] = grad / ranks
    return loss, {name: grad.float().flatten().tolist() for name, grad in whole.items()}
