"""One rank of test_parallelize.py: load each model sharded over the ranks, and compute gradients.

Read the checkpoint FOLDER/NAME for each case. The results are, by case, the full gradients and the bytes read
and held; and the results of the functions below, by name.
"""

import functools
import re
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it, and each rank would do so by itself
import torch.distributed as dist
from adapted import with_adapters
from ranks import Count
from torch.distributed.device_mesh import init_device_mesh

import liger_models
from liger_models import LigerModelsError, ParallelDims, parallelize
from liger_models.losses import shared_prompts

LEVELS = ["lean@host", "checkpoint", "mlp"]  # for the layers, in turn
CASES = {
    "llama": None,
    "gemma2": ParallelDims(),
    "qwen3_moe": ParallelDims(data_replicate=2),
    "qwen3": (("replicate", "shard"), (1, 2)),
}
ADAPTED = (
    ("llama", "r=4", None),
    ("qwen3_moe", "r=4,experts", None),
    ("qwen3_moe", "r=4,experts", ParallelDims(experts=2)),
)
PROMPTS = (([5, 9, 2, 4, 8, 1, 3], [[7, 8, 1], [4, 1], [6]]), ([6, 2], [[3, 1], [2, 2, 1, 9]]))


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family, dims in CASES.items():
        if isinstance(dims, tuple):
            dims = init_device_mesh("cpu", dims[1], mesh_dim_names=dims[0])
        with Count() as count:
            model = liger_models.from_hub(folder / family, shard=functools.partial(parallelize, mesh=dims))
        held = {p: p.to_local().numel() * p.itemsize for p in model.parameters()}
        held |= {b: b.numel() * b.itemsize for b in model.buffers()}
        model.set_activation_memory((LEVELS * len(model.layers))[: len(model.layers)])
        ids = batch(model.spec.vocab_size)
        for half in ids[rank::ranks].split(1):  # two micro-batches
            loss = model(half, labels=half, num_items_in_batch=ids.numel() / ranks).loss
            loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found[family] = {"gradients": gradients, "read": count.nbytes, "held": sum(held.values())}
    found["refused"] = refused(model, folder)
    del loss, model, held  # sharded tensors that outlive their process group sometimes hang
    for other in (
        adapted,
        shared,
        further_tokens,
        in_half_precision,
        in_two_dtypes,
        after_evaluation,
        fitted,
        memory_of_a_large_one,
    ):
        found[other.__name__] = other(folder)
    return found


def refused(model, folder: Path) -> dict[str, str]:
    """Error messages for unsupported models and meshes."""
    ids = torch.arange(5)[None]
    three_shards = functools.partial(parallelize, mesh=ParallelDims(data_shard=3))
    whole = liger_models.from_hub(folder / "llama")
    head = torch.zeros(whole.lm_head.weight.shape, dtype=torch.int8)
    whole.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    odd = liger_models.from_hub(folder / "llama", dtype="bfloat16")
    odd.layers[0].scale = torch.nn.Parameter(torch.ones(1))
    calls = {
        "mixed": lambda: parallelize(odd),
        "twice": lambda: parallelize(model),
        "quantised": lambda: parallelize(whole),
        "generate": lambda: model.generate(ids, 2),
        "sizes": lambda: liger_models.from_hub(folder / "llama", shard=three_shards),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except LigerModelsError as error:
            errors[name] = str(error)
    return errors


def adapted(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Gradients of adapters on sharded models, the last one with its experts divided over the ranks."""
    found = []
    for family, settings, dims in ADAPTED:
        model = with_adapters(liger_models.from_hub(folder / family, projections="split"), settings)
        parallelize(model, mesh=dims)
        ids = batch(model.spec.vocab_size)
        half = ids[dist.get_rank() :: 2]
        model(half, labels=half, num_items_in_batch=ids.numel() / 2).loss.backward()
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad})
    return found


def shared(folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of answers that share their prompt: one prompt per rank, some layers with a window."""
    model = liger_models.from_hub(folder / "gemma2", shard=parallelize)
    model(**shared_prompts([PROMPTS[dist.get_rank()]]), num_items_in_batch=6).loss.backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def further_tokens(folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of a model with two modules for multi-token prediction, layers in turn at other levels."""
    model = liger_models.from_hub(folder / "further", shard=parallelize, mtp=True)
    model.set_activation_memory(["lean", "checkpoint", "mlp"])
    ids = batch(model.spec.vocab_size)
    half = ids[dist.get_rank() :: 2]
    model(half, labels=half, num_items_in_batch=ids.numel() / 2, mtp_weight=0.5).loss.backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def in_half_precision(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of a model in bfloat16, and of one in float32 that computes in bfloat16."""
    found = {}
    for dtype, compute_dtype in (("bfloat16", None), ("float32", torch.bfloat16)):
        divide = functools.partial(parallelize, compute_dtype=compute_dtype)
        model = liger_models.from_hub(folder / "llama", dtype=dtype, shard=divide)
        half = batch(model.spec.vocab_size)[dist.get_rank() :: 2]
        model(half, labels=half, num_items_in_batch=half.numel()).loss.backward()
        found[dtype] = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return found


def in_two_dtypes(folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of a model with float32 gates and norms in bfloat16 layers."""
    model = liger_models.from_hub(folder / "mixed", shard=parallelize)
    model.set_activation_memory((LEVELS * len(model.layers))[: len(model.layers)])
    half = batch(model.spec.vocab_size)[dist.get_rank() :: 2]
    model(half, labels=half, num_items_in_batch=half.numel()).loss.backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def after_evaluation(folder: Path) -> dict[str, bool]:
    """Return whether parameters stay sharded in evaluation, and whether a later step has no effect."""
    model = liger_models.from_hub(folder / "llama", shard=parallelize)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = batch(model.spec.vocab_size)
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        before = model(ids, labels=ids).loss
        divided = all(hasattr(p, "to_local") for p in model.parameters())
        optimizer.step()
        return {"divided": divided, "stale": bool(model(ids, labels=ids).loss == before)}


def fitted(folder: Path) -> tuple[str, ...]:
    """Levels that "auto" chooses with a very small memory budget."""
    options = {"activation_memory": "auto", "memory_budget": "100KB"}
    model = liger_models.from_hub(folder / "llama", shard=parallelize, **options)
    ids = batch(model.spec.vocab_size)
    model(ids, labels=ids).loss.backward()
    return model.activation_memory


def memory_of_a_large_one(folder: Path) -> dict[str, float] | None:
    """Peak host memory of loading, and the memory then held, in MiB."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    before = peak_memory(reset=True)
    model = liger_models.from_hub(folder / "large", shard=parallelize)
    held = sum(p.to_local().nbytes for p in model.parameters()) / 2**20
    return {"peak": peak_memory() - before, "held": held}


def peak_memory(reset: bool = False) -> float:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to current usage
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def batch(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (4, 11), generator=torch.Generator().manual_seed(0))
