"""parallelize: parameters, gradients and the optimizer's state divided over processes (FSDP2).

    model = from_hub(name, shard=parallelize)                                  # all processes share all
    model = from_hub(name, shard=partial(parallelize, mesh=ParallelDims(data_replicate=2)))       # HSDP

Each layer is gathered when it runs, while the one before it works, and again in the backward pass. The
embedding and the head are groups of their own, unless they share their weight: what they take is given back,
and their gradients are divided, as soon as they have run. Norms stay with the layer that reads their output:
what a layer keeps of a norm is its input and its weight (layers/recompute/activation_memory.py), which must
be there when the layer's backward pass begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.experts.expert_parallel import divide_experts
from liger_models.layers.sequences.sequence_parallel import divide_sequences
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.parallel.dims import Meshes, ParallelDims, meshes_of


def parallelize(
    model: LigerCausalLM,
    mesh: DeviceMesh | ParallelDims | Meshes | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> LigerCausalLM:
    """Divide a model over processes, in place, by `fully_shard` of torch.distributed.fsdp (FSDP2).

    All processes call, train and save the model together, each with its own rows; where `mesh` divides
    sequences, the processes of one sequence are given the same rows (layers/sequences/sequence_parallel.py)
    and count as one process below. Gradients are means over the processes, summed in float32 (or in a dtype
    that gives the same bits: `_dtype_of_sums`), so the loss over all labels of a step is
    `model(..., num_items_in_batch=labels / processes).loss`. Optimizers, `clip_grad_norm` and checkpoints see
    DTensors; make the optimizer afterwards. Given to `from_hub` or `from_config` as `shard`, it divides the
    model before it has memory, and each process reads or makes only its own rows.

    Args:
        model: on the meta device, or whole and the same in every process, on the mesh's device.
        mesh: of torch's, ("shard",) or ("replicate", "shard"); or sizes; default: all processes share all
            parameters.
        compute_dtype: to which parameters and the inputs of layers are cast for the computation, such as
            torch.bfloat16 for float32 parameters. Default: their own.
        reshard_after_forward: whether layers are given back after the forward pass and gathered again for the
            backward pass. False gathers once, and keeps whole parameters in between.

    Returns:
        The model.

    Raises:
        TypeError: the model is none of `from_hub` or `from_config`, or is wrapped.
        ConfigError: sizes that do not fit the processes, or there is no process group.
        UnsupportedModelError: the model is divided already, has quantised weights, or mixes dtypes in what
            is trained of a layer.
        ValueError: the processes of a sequence cannot share a layer's heads.
    """
    if not isinstance(model, LigerCausalLM):
        raise TypeError(
            "parallelize divides a model of liger_models.from_hub or from_config, and was given a "
            f"{type(model).__module__}.{type(model).__name__}; divide one of transformers' classes by "
            "accelerate, or by torch's fully_shard on each layer and on the model, and wrap afterwards"
        )
    if any(is_sharded(p) for p in model.parameters()):
        raise UnsupportedModelError("the model is divided over processes already; parallelize it once")
    for name, p in model.named_parameters():
        if not p.is_floating_point() or type(p.data) is not torch.Tensor:
            raise UnsupportedModelError(
                f"{name} is quantised ({p.dtype}, {type(p.data).__name__}), and cannot be divided by rows; "
                "train with the whole model in each process (DistributedDataParallel)"
            )
    meshes = meshes_of(mesh, _device_type(model))
    if meshes.sequence is not None:
        divide_sequences(model, meshes.sequence)
    groups = _groups(model)
    for name, modules in groups.items():
        _check_dtypes(name, modules)
    policy = MixedPrecisionPolicy(compute_dtype, _dtype_of_sums(meshes.data, compute_dtype))
    ignored: set[nn.Parameter] = set()
    if meshes.experts is not None:
        ignored = _divide_experts(model, meshes.experts, policy, reshard_after_forward)
    first_in_backward = [*model.layers[-1:], model.lm_head, model]  # not given back just before
    for part in (part for parts in groups.values() for part in parts):
        reshard = reshard_after_forward and part not in first_in_backward
        options: dict[str, Any] = {"mesh": meshes.data, "mp_policy": policy, "ignored_params": ignored}
        fully_shard(part, reshard_after_forward=reshard, **options)
    if isinstance(model.embed_tokens, FSDPModule):
        model.embed_tokens.set_unshard_in_backward(False)  # the gradient of a lookup needs no weight
    if model.vision is not None:
        model.image_gradients.note_groups([model.vision])
    model.gathered_once = not reshard_after_forward
    model.register_forward_hook(_give_back)
    return model


def _dtype_of_sums(mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> torch.dtype | None:
    """In which gradients are added up over a mesh; None: their own, which the sum will have.

    The sum of two bfloat16 numbers is rounded once, in bfloat16 as when it is made in float32 and then
    rounded; a half of it is exact (above 2^-126). So for two shards half the bytes bring the same bits.
    Replicas add up micro-batches before they exchange them.
    """
    return None if mesh.ndim == 1 and mesh.size() == 2 and compute_dtype is None else torch.float32


def _divide_experts(
    model: LigerCausalLM, mesh: DeviceMesh, policy: Any, reshard_after_forward: bool
) -> set[nn.Parameter]:
    """Experts over the dimension "experts" of a mesh, and what each rank has of them over the others, as a
    group of its own.

    Returns:
        The parameters that are divided no further.
    """
    from torch.distributed.tensor import Shard

    others = mesh[("replicate", "shard") if mesh["replicate"].size() > 1 else ("shard",)]
    if others.size() == 1:
        modules = divide_experts(model, mesh["experts"], policy.param_dtype)
        return {p for module in modules for p in module.parameters()}
    # Their inputs are the layer's, cast already; the weights of a token's experts are to stay float32.
    sums = _dtype_of_sums(others, policy.param_dtype)
    policy = replace(policy, reduce_dtype=sums, cast_forward_inputs=False)
    for module in divide_experts(model, mesh["experts"]):
        fully_shard(
            module,
            mesh=others,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda p: Shard(1),  # the first dimension is that of the experts
        )
    return set()


def _give_back(model: nn.Module, args: object, output: object) -> None:
    """Without a backward pass to come nothing is kept whole: a step of the optimizer that follows would not
    reach it, and the next forward pass would run with the old values.
    """
    if not torch.is_grad_enabled():
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _groups(model: LigerCausalLM) -> dict[str, list[nn.Module]]:
    """What is gathered together, by name, in the order in which it must be divided: parts before the whole.

    A weight that the head shares with the embedding stays with the whole model, which is gathered first and
    given back last.
    """
    parts: dict[str, list[nn.Module]] = {f"layer {i}": [layer] for i, layer in enumerate(model.layers)}
    if model.vision is not None:
        parts |= {f"layer {i} of the encoder": [x] for i, x in enumerate(model.vision.encoder.layers)}
    if not model.spec.tie_word_embeddings:
        parts |= {"the embedding": [model.embed_tokens], "the head": [model.lm_head]}
    return parts | {"the model": [model]}


def _check_dtypes(name: str, modules: list[nn.Module]) -> None:
    """FSDP2 adds up the gradients of a group in one buffer, of one dtype."""
    found = {p.dtype for module in modules for p in module.parameters() if p.requires_grad}
    if len(found) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise UnsupportedModelError(
            f"{name} has parameters to train in {names}, and those that are divided together must have one "
            "dtype; load the model with dtype='bfloat16' or 'float32'"
        )


def _device_type(model: LigerCausalLM) -> str:
    """Of the model, or where it will be: where the processes' collectives are."""
    if model.device.type != "meta":
        return model.device.type
    distributed: Any = torch.distributed
    nccl = distributed.is_initialized() and distributed.get_backend() == "nccl"
    return "cuda" if nccl or (torch.cuda.is_available() and distributed.get_backend() != "gloo") else "cpu"
