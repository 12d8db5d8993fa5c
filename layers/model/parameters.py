"""Parameters of a model: checkpoint names, memory, initialisation, and tying of head and embedding."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Expr, Ref
from liger_models.convert.checkpoints.layout import Layout, canonical_forms, saved_tensors
from liger_models.convert.checkpoints.shards import is_sharded, local_part
from liger_models.layers.parts.fresh_weights import draw_fresh
from liger_models.layers.projections.packed_linear import (
    fuse_projections,
    split_projections,
    weight_map_of_parts,
)
from liger_models.layers.projections.stored_weight import dense_shape, kept_weights
from liger_models.layers.specs import ModelSpec


class ModelParameters(nn.Module):
    """Operations of `CausalLM` on its parameters other than computation.

    Attributes:
        layout: how the model's checkpoint differs from the canonical form.
    """

    layout: Layout = Layout()

    spec: ModelSpec
    embed_tokens: nn.Embedding
    lm_head: nn.Linear

    def saved_tensors(self) -> dict[str, Tensor]:
        """The contents of a checkpoint: parameters and persistent buffers; a tied one once."""
        return saved_tensors(self)

    def weight_map(self, layout: Layout | None = None) -> dict[str, Expr]:
        """Every saved tensor as an expression over checkpoint tensors, in the model's order.

        Args:
            layout: the checkpoint's layout. Default: the model's own.
        """
        return weight_map_of_parts(self, (layout or self.layout).weight_map(self._canonical_forms))

    @property
    def canonical_forms(self) -> dict[str, Expr]:
        """Every saved tensor, by name, as an expression over the tensors of separate projections and experts,
        whatever the checkpoint's layout.
        """
        return self._canonical_forms

    def note_canonical_forms(self) -> None:
        """Record the current form of the tensors, so that later changes are detected."""
        self._canonical_forms = canonical_forms(self)

    def split_projections(self) -> None:
        """Split query, key, value, gate and up into separate layers, in place and over the same memory
        (copied if the checkpoint orders their rows differently).

        The model computes the same, slightly slower; layers and names match the checkpoint
        (`self_attn.q_proj.weight`), for LoRA libraries, quantisers and weight transfer. Layers that the
        checkpoint also packs stay packed. Parameters are new objects: create the optimizer afterwards.

        Raises:
            ValueError: the model is sharded, or wrapped by an adapter.
        """
        split_projections(self, self.weight_map())

    def fuse_projections(self) -> None:
        """Undo `split_projections`, in place.

        Raises:
            ValueError: a projection is sharded, or wrapped by an adapter.
        """
        fuse_projections(self)

    def tie_weights(self) -> None:
        """Tie the head to the embedding's parameter, if the spec says so."""
        if self.spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def materialize(
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Allocate uninitialised memory for tensors on the meta device. Sharded tensors get their shard, by
        default on their mesh's device.

        Args:
            device: the target; None for torch's default.
            dtype: for the parameters (buffers keep theirs), or one per saved tensor by native name. Default:
                unchanged.
        """
        if isinstance(dtype, torch.dtype):
            chosen = {id(parameter): dtype for parameter in self.parameters()}
        else:
            chosen = {id(tensor): dtype[name] for name, tensor in self.saved_tensors().items() if dtype}

        def memory(old: Tensor) -> Tensor:
            kept = chosen.get(id(old), old.dtype)
            if (mesh := getattr(old, "device_mesh", None)) is not None:
                return torch.empty_like(old, dtype=kept, device=device or mesh.device_type)
            # Same as empty_like, which takes half a second on the meta device because it imports sympy.
            return torch.empty(old.shape, dtype=kept, device=device or torch.get_default_device())

        made: dict[nn.Parameter, nn.Parameter] = {}  # keeps tied parameters tied
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, memory(buffer))
            for name, old in module.named_parameters(recurse=False):
                if old not in made:
                    made[old] = nn.Parameter(memory(old).detach(), requires_grad=old.requires_grad)
                setattr(module, name, made[old])

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise weights in place: matrices from a normal distribution of `initializer_range`, biases and
        the padding embedding to zero; norms, routers, experts and sinks by their own `reset_parameters`;
        parameters that `spec.fresh` names as it says.

        Processes that share a model need the same random state: each draws all values, tensor by tensor, and
        keeps its shard.
        """
        for module in self.modules():
            self.reset_parameters_of(module, generator)

    @torch.no_grad()
    def reset_parameters_of(self, module: nn.Module, generator: torch.Generator | None = None) -> None:
        """Initialise one module's own parameters, without its children's."""
        std, embedding = self.spec.initializer_range, self.embed_tokens.weight
        reset = getattr(module, "reset_parameters", None)
        tied = getattr(module, "weight", None) is embedding
        with whole_parameters(module):
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, std, generator=generator)
                bias = getattr(module, "bias", None)
                if bias is not None:
                    bias.zero_()
            elif module is not self and reset is not None:
                reset(std, generator)
            draw_fresh(module, generator)
            if self.spec.padding_idx is not None and (tied or isinstance(module, nn.Embedding)):
                cast(Tensor, module.weight)[self.spec.padding_idx].zero_()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters, a tied head counted once, and quantised ones by their dense shapes."""
        excluded = {id(self.embed_tokens.weight)} if exclude_embeddings else set()
        counted = (p for p in self.parameters() if p.requires_grad or not only_trainable)
        bits = 0 if only_trainable else sum(map(_elements_beyond_bits, self.modules()))
        return bits + sum(p.numel() for p in counted if id(p) not in excluded)


def _elements_beyond_bits(module: nn.Module) -> int:
    """Number of elements that the quantised weights of a module have beyond their stored bytes."""
    if not kept_weights(module):
        return 0
    dense = sum(math.prod(dense_shape(module, name)) for name in kept_weights(module))
    return dense - sum(p.numel() for p in module.parameters(recurse=False) if p.dtype == torch.uint8)


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Replace a module's sharded parameters by full uninitialised ones while values are assigned. Afterwards
    this process's shard of the values is copied back.
    """
    own = module._parameters
    sharded = {name: tensor for name, tensor in own.items() if tensor is not None and is_sharded(tensor)}
    whole: dict[str, nn.Parameter] = {}
    for name, tensor in sharded.items():
        device = local_part(tensor, Ref(name, tuple(tensor.shape)))[0].device
        own[name] = whole[name] = nn.Parameter(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=device), False
        )
    yield
    for name, tensor in sharded.items():
        own[name] = tensor
        local, part = local_part(tensor.detach(), Ref(name, tuple(tensor.shape)))
        part.read_into(local, functools.partial(_take, whole[name]))


def _take(whole: Tensor, name: str, dest: Tensor, start: int, stop: int) -> None:
    dest.copy_(whole.view(-1)[start:stop].view(dest.shape))


def drop_tied_head(
    model: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: object
) -> None:
    """Remove the second entry of a tied parameter: sharding and safetensors reject duplicates."""
    state_dict.pop(f"{prefix}lm_head.weight", None)


def restore_tied_head(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
    embedding = state_dict.get(f"{prefix}embed_tokens.weight")
    if embedding is not None:
        state_dict.setdefault(f"{prefix}lm_head.weight", embedding)


def tie_again(model: ModelParameters, incompatible_keys: object) -> None:
    """Tie again after loading with assign=True, which gives each module its own parameter."""
    model.tie_weights()
