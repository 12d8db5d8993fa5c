"""Which layers and calls can be recorded as CUDA graphs, and errors for the others."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import is_sharded, is_zero3
from liger_models.convert.errors import ConfigError
from liger_models.kernels.invariant.mode import is_batch_invariant
from liger_models.layers.attention.compressed.attention import CompressedAttention
from liger_models.layers.experts.moe import Experts
from liger_models.layers.experts.router import SparseMixerRouter
from liger_models.layers.projections.linear import has_hooks, hooks_everywhere
from liger_models.layers.recompute.activation_memory import ON_HOST, RERUN
from liger_models.layers.recurrent.convolved_attention import ConvolvedAttention
from liger_models.layers.sequences.agreement import is_of_several_processes
from liger_models.layers.sequences.sequences import Sequences


class RecordedModules:
    """The modules of a model whose work is recorded, as they are now.

    Attributes:
        modules: the model's `recorded_parts()`, and what they contain.
        parameters: theirs, each once.
    """

    def __init__(self, model: Any):
        parts: list[nn.Module] = model.recorded_parts()
        self.modules: list[nn.Module] = list(dict.fromkeys(m for part in parts for m in part.modules()))
        found = (p for m in self.modules for p in m._parameters.values() if p is not None)
        self.parameters = list({id(p): p for p in found}.values())
        # Attributes, and what is in those that are tables: children, parameters, hooks, settings of adapters.
        tables: list[dict[str, Any]] = [vars(m) for m in self.modules]
        tables += [value for table in tables for value in table.values() if isinstance(value, dict)]
        self._tables = tables
        self._sizes = [*map(len, tables)]
        self._held = [*self._values()]

    def _values(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._tables))

    def unchanged(self) -> bool:
        """Whether each attribute of each module is still the same object, and each table has the same
        entries. Runs in every step, so it must cost the host little: its loops run in C.
        """
        same_sizes = [*map(len, self._tables)] == self._sizes
        return same_sizes and all(map(operator.is_, self._values(), self._held))

    def addresses(self) -> tuple[Any, ...]:
        """Where the parameters are, and which of them are trained."""
        return *map(Tensor.data_ptr, self.parameters), *map(_is_trained, self.parameters)


_is_trained = operator.attrgetter("requires_grad")


def _refuse(found: str, remedy: str) -> None:
    raise ConfigError(
        f"CUDA graphs were asked for, and {found} cannot be recorded: {remedy}, or call "
        "model.set_cuda_graphs(False) (leave out --cuda-graphs)"
    )


def check_call(x: Tensor, sequences: Sequences) -> None:
    """Refuse calls that cannot be recorded.

    Raises:
        ConfigError: the message names what was found.
    """
    notes = sequences.notes
    if any(hooks_everywhere()):
        _refuse("hooks of all modules (register_module_forward_hook)", "remove them")
    if not runs_graphs(x.device):
        _refuse(f"a model on {x.device}", "move it to an NVIDIA GPU")
    if sequences.documents.tree is not None:
        _refuse("documents that continue others (parents)", "repeat the prompts")
    if sequences.slice is not None or is_of_several_processes():
        _refuse("a step of several processes", "train in one process")
    if notes.indexer_losses.asked_for:
        _refuse("a call with indexer_weight", "leave it out")
    if notes.routing.given or notes.routing.seen is not None or notes.router_logits.asked_for:
        _refuse("a call with routed_experts or output_router_logits", "leave these out")
    if sequences.visibility.tiles is not None:
        _refuse("attention to tiles of images", "leave out the images")
    if sequences.modality is not None:
        _refuse("experts of text and of pictures", "leave out the images")
    if is_batch_invariant():
        _refuse("a call within batch_invariant()", "leave that context")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        _refuse("a call within saved_tensors_hooks (save_on_cpu, checkpoint)", "leave that context")


def check_layers(model: Any, of: RecordedModules) -> None:
    """Refuse layers that cannot be recorded.

    Raises:
        ConfigError: the message names what was found.
    """
    if getattr(model, "host_weights", None) is not None:
        _refuse("weights in host memory", "use weights_memory='device'")
    if any(isinstance(module, CompressedAttention) for module in of.modules):
        _refuse(
            "attention to compressed keys, whose blocks the host chooses by the documents,", "train without"
        )
    if any(isinstance(module, ConvolvedAttention) for module in of.modules):
        _refuse("attention with scores by distance, whose blocks the host chooses,", "train without")
    levels = {layer.activation_memory for layer in model.layers}
    if found := levels & {"offload", ON_HOST}:
        _refuse(f"activation_memory={min(found)!r}", "use 'tiled'")
    devices = {p.device for p in of.parameters}
    if len(devices) > 1:
        _refuse(f"a model on several devices ({', '.join(sorted(map(str, devices)))})", "place it on one")
    for p in of.parameters:
        if is_sharded(p) or is_zero3(p):
            _refuse("a sharded model", "train in one process")
    draws = False
    for module in of.modules:
        if has_hooks(module):
            _refuse(f"a {type(module).__name__} with hooks, or a replaced forward", "remove them")
        if isinstance(module, Experts) and module.exchange is not None:
            _refuse("expert parallelism", "train in one process")
        drops = isinstance(module, nn.Dropout) and module.p > 0 and module.training
        draws |= drops or isinstance(module, SparseMixerRouter)
    if draws and levels & set(RERUN):
        _refuse(
            "dropout, or a router that draws, in layers that run again in the backward pass",
            "use activation_memory='lean', or dropout 0",
        )


def runs_graphs(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda" and torch.version.hip is None
