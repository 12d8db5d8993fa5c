"""parallelize: shard parameters, gradients and optimizer state over processes (FSDP2).

    model = from_hub(name, shard=parallelize)                                  # one shard group
    model = from_hub(name, shard=partial(parallelize, mesh=ParallelDims(data_replicate=2)))       # HSDP

Each layer is gathered before it runs, overlapping the previous layer, and again in the backward pass. The
embedding and the head are groups of their own, unless they share their weight: their memory is freed, and
their gradients are sharded, as soon as they have run. Norms belong to the group of the layer that reads their
output: what a layer saves of a norm is its input and its weight (layers/recompute/activation_memory.py),
which must be present when the layer's backward pass begins. Parameters in another dtype than most of their
group, such as a float32 A_log in a bfloat16 layer, form a small group of their own, which is gathered and
reduced in its dtype, and stays gathered until the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from liger_models.convert.checkpoints.expressions import Expr, Permute, Rows
from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.experts.expert_parallel import ExpertCommBackend, divide_experts
from liger_models.layers.projections.stored_weight import kept_weights
from liger_models.layers.sequences.sequence_parallel import divide_sequences
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.parallel.dims import Meshes, ParallelDims, meshes_of


def parallelize(
    model: LigerCausalLM,
    mesh: DeviceMesh | ParallelDims | Meshes | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    expert_comm_backend: ExpertCommBackend = "standard",
) -> LigerCausalLM:
    """Shard a model over processes, in place, with `fully_shard` of torch.distributed.fsdp (FSDP2).

        torch.distributed.init_process_group("nccl")
        model = liger_models.from_hub("meta-llama/Llama-3.1-8B", shard=liger_models.parallelize)

    All processes call, train and save the model together, each with its own rows; if `mesh` has a sequence
    dimension, the processes of a sequence receive the same rows (layers/sequences/sequence_parallel.py) and
    count as one process below. Gradients are means over the processes, accumulated in float32 (or in a dtype
    that gives the same bits: `_dtype_of_sums`), so the loss over all labels of a step is `model(...,
    num_items_in_batch=labels / processes).loss`. Optimizers, `clip_grad_norm` and checkpoints see DTensors;
    create the optimizer afterwards. As the `shard` argument of `from_hub` or `from_config`, it shards the
    model before memory is allocated, and each process reads or initialises only its own rows.

    Args:
        model: on the meta device, or complete and identical in every process, on the mesh's device.
        mesh: a torch device mesh, ("shard",) or ("replicate", "shard"); or sizes; default: all processes
            share all parameters.
        compute_dtype: cast parameters and the layers' inputs to this dtype for computation, such as
            torch.bfloat16 for float32 parameters; of a layer with several dtypes, only the parameters in the
            most frequent one. Default: their own. Weights kept in quantised bits are gathered as
            bytes in any case, and decoded where they are used.
        reshard_after_forward: free layers after the forward pass and gather them again for the backward pass.
            False keeps whole parameters in between.
        expert_comm_backend: what sends tokens between processes that share experts: "standard", torch's
            collectives, or "deepep", the kernels of DeepEP (package deep_ep), in bfloat16.

    Returns:
        The model.

    Raises:
        TypeError: the model is not from `from_hub` or `from_config`, or is wrapped.
        ConfigError: sizes that do not fit the processes, or there is no process group.
        UnsupportedModelError: the model is already sharded, has weights quantised by bitsandbytes, keeps
            quantised bits and torch is older than 2.12, or mixes dtypes among the trainable parameters of
            one layer itself, outside its modules.
        ValueError: the processes of a sequence cannot share a layer's heads; DeepEP is asked for and cannot
            be used.
    """
    if not isinstance(model, LigerCausalLM):
        raise TypeError(
            "parallelize takes a model of liger_models.from_hub or from_config, found a "
            f"{type(model).__module__}.{type(model).__name__}; shard transformers' classes with accelerate, "
            "or with torch's fully_shard on each layer and on the model, and wrap afterwards"
        )
    if any(is_sharded(p) for p in model.parameters()):
        raise UnsupportedModelError("the model is already sharded over processes; call parallelize once")
    kept = {p for module in model.modules() if kept_weights(module) for p in _own(module)}
    for name, p in model.named_parameters():
        if type(p.data) is not torch.Tensor or not (p.is_floating_point() or p in kept):
            raise UnsupportedModelError(
                f"{name} is quantised ({p.dtype}, {type(p.data).__name__}), and cannot be sharded by rows; "
                "train with the whole model in each process (DistributedDataParallel), or load a quantised "
                "checkpoint with keep_quantised"
            )
        if not p.is_floating_point() and torch.__version__ < "2.12":
            raise UnsupportedModelError(
                f"{name} is kept in its quantised bits ({p.dtype}), which FSDP2 of torch {torch.__version__} "
                "cannot shard; install torch 2.12 or later, or load the checkpoint without keep_quantised"
            )
    meshes = meshes_of(mesh, _device_type(model))
    if meshes.sequence is not None:
        divide_sequences(model, meshes.sequence)
    groups = _groups(model)
    others = _in_other_dtypes(groups)
    policy = MixedPrecisionPolicy(compute_dtype, _dtype_of_sums(meshes.data, model.dtype, compute_dtype))
    ignored: set[nn.Parameter] = set()
    if meshes.experts is not None:
        ignored = _divide_experts(model, meshes.experts, policy, reshard_after_forward, expert_comm_backend)
    modules = [] if model.mtp is None else [*model.mtp.values()]
    first_in_backward = [
        *model.layers[-1:],
        *modules,
        model.lm_head,
        model,
    ]  # do not free them just before that
    ignored |= {p for group in others for p in group}
    options: dict[str, Any] = {"mesh": meshes.data}
    for part in groups.values():
        reshard = reshard_after_forward and part not in first_in_backward
        fully_shard(part, reshard_after_forward=reshard, mp_policy=policy, ignored_params=ignored, **options)
    policy = replace(policy, param_dtype=None, cast_forward_inputs=False)
    for group in others:
        owners = [module for module in model.modules() if any(p in group for p in _own(module))]
        rest = {p for module in owners for p in module.parameters()} - group
        fully_shard(owners, reshard_after_forward=False, mp_policy=policy, ignored_params=rest, **options)
    if isinstance(model.embed_tokens, FSDPModule):
        model.embed_tokens.set_unshard_in_backward(False)  # the gradient of a lookup does not need the weight
    if model.vision is not None:
        model.image_gradients.note_groups([model.vision])
    if model.audio is not None:
        model.sound_gradients.note_groups([model.audio])
    model.gathered_once = not reshard_after_forward
    model.register_forward_hook(_give_back)
    return model


def _dtype_of_sums(
    mesh: DeviceMesh, dtype: torch.dtype, compute_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Dtype for reducing gradients over a mesh; None: their own dtype, which the sum has, too.

    The sum of two bfloat16 numbers is rounded once, in bfloat16 as well as in float32 followed by rounding;
    halving it is exact (above 2^-126). For two shards, half the bytes therefore give the same bits. Replicas
    accumulate micro-batches before they exchange gradients. float64 is never narrowed.
    """
    if compute_dtype is None and (dtype == torch.float64 or (mesh.ndim == 1 and mesh.size() == 2)):
        return None
    return torch.float32


def _divide_experts(
    model: LigerCausalLM,
    mesh: DeviceMesh,
    policy: Any,
    reshard_after_forward: bool,
    comm_backend: ExpertCommBackend,
) -> set[nn.Parameter]:
    """Distribute experts over the mesh dimension "experts", and shard each rank's experts over the other
    dimensions, as separate groups.

    Returns:
        The parameters that must not be sharded further.
    """
    from torch.distributed.tensor import Shard

    others = mesh[("replicate", "shard") if mesh["replicate"].size() > 1 else ("shard",)]
    if others.size() == 1:
        modules = divide_experts(model, mesh["experts"], policy.param_dtype, comm_backend)
        return {p for module in modules for p in module.parameters()}
    # Their inputs are the layer's, already cast; routing weights stay in float32.
    sums = _dtype_of_sums(others, model.dtype, policy.param_dtype)
    policy = replace(policy, reduce_dtype=sums, cast_forward_inputs=False)
    whole: set[nn.Parameter] = set()
    modules = divide_experts(model, mesh["experts"], comm_backend=comm_backend)
    forms = model.weight_map()
    cut = {p: _dimension(forms.get(name), others["shard"].size()) for name, p in model.named_parameters()}
    for module in modules:
        # Scales of whole matrices have a single row: they are few, and stay with each rank of the experts.
        whole |= {p for p in _own(module) if p.dtype == torch.uint8 and p.shape[1] % others["shard"].size()}
        fully_shard(
            module,
            mesh=others,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda p: Shard(cut[p]),  # dimension 0 indexes experts
            ignored_params=whole,
        )
    return whole


def _dimension(form: Expr | None, ranks: int) -> int:
    """The dimension by which a stack of experts is sharded: the outputs', or the inputs' if the checkpoint
    has a transposed stack, in which outputs would lie in as many pieces as there are inputs.
    """
    if not isinstance(form, Permute) or len(form.shape) < 3 or form.shape[2] % ranks:
        return 1

    def pieces(dim: int) -> int:
        shard = Rows(form, 0, form.shape[dim] // ranks, dim)
        return sum(1 for _ in islice(shard.places(torch.empty(shard.shape, device="meta")), limit))

    limit = 4 * form.shape[0]
    return 1 if pieces(1) <= pieces(2) else 2


def _give_back(model: nn.Module, args: object, output: object) -> None:
    """Free whole parameters if no backward pass will follow: an optimizer step would not update them, and the
    next forward pass would use the old values.
    """
    if not torch.is_grad_enabled():
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _groups(model: LigerCausalLM) -> dict[str, nn.Module]:
    """Modules whose parameters are gathered together, by name, in the order in which they must be sharded:
    parts before the whole.

    A weight shared by head and embedding stays with the whole model, which is gathered first and freed last.
    """
    parts: dict[str, nn.Module] = {f"layer {i}": layer for i, layer in enumerate(model.layers)}
    if model.mtp is not None:
        parts |= {f"prediction module {name}": module for name, module in model.mtp.items()}
    for name, part in (("encoder", model.vision), ("audio encoder", model.audio)):
        if part is not None:
            encoder: Any = part.encoder
            parts |= {f"layer {i} of the {name}": x for i, x in enumerate(encoder.layers)}
    if not model.spec.tie_word_embeddings:
        parts |= {"the embedding": model.embed_tokens}
        parts |= {} if model.lm_head is None else {"the head": model.lm_head}
    return parts | {"the model": model}


def _in_other_dtypes(groups: dict[str, nn.Module]) -> list[set[nn.Parameter]]:
    """Trainable parameters in another dtype than most of their group's: FSDP2 reduces a group's gradients in
    one buffer. One set for each group and dtype.
    """
    others, seen = [], set[nn.Parameter]()
    for name, part in groups.items():
        by_dtype: dict[torch.dtype, set[nn.Parameter]] = {}
        for p in part.parameters():
            if p.requires_grad and p not in seen:
                by_dtype.setdefault(p.dtype, set()).add(p)
        seen.update(part.parameters())
        if len(by_dtype) > 1:
            largest = max(by_dtype, key=lambda dtype: sum(p.numel() for p in by_dtype[dtype]))
            del by_dtype[largest]
            for dtype, group in by_dtype.items():
                if any(p in group for p in _own(part)):
                    raise UnsupportedModelError(
                        f"{name} has trainable parameters in {dtype} as well as {largest} that belong to "
                        "none of its modules, and cannot be sharded; load the model with dtype='bfloat16' or "
                        "'float32'"
                    )
                others.append(group)
    return others


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _device_type(model: LigerCausalLM) -> str:
    """Device type of the model, or of the processes' collectives if it has no memory yet."""
    if model.device.type != "meta":
        return model.device.type
    distributed: Any = torch.distributed
    nccl = distributed.is_initialized() and distributed.get_backend() == "nccl"
    return "cuda" if nccl or (torch.cuda.is_available() and distributed.get_backend() != "gloo") else "cpu"
