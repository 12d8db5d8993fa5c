"""From a name, a folder or a config to a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from liger_models.architectures import Architecture, find_architecture
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.reading import WEIGHT_DTYPES, CheckpointReader, load_parameters
from liger_models.convert.checkpoints.source_layout import SourceLayout, match_layout, repeats
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, UnsupportedModelError
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.models.causal_lm import LigerCausalLM, parse_dtype
from liger_models.models.classifier import (
    LigerSequenceClassifier,
    as_classifier,
    labels_of,
    leave_out_head,
    with_labels,
)
from liger_models.models.text_part import select_text, text_config_of, warn_of

Projections = Literal["fused", "split"]


def from_hub(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attention: AttentionBackend = "auto",
    activation_memory: str | list[str] = "lean",
    memory_budget: float | str | None = None,
    projections: Projections = "fused",
    shard: Callable[[LigerCausalLM], object] | None = None,
    text_only: bool = False,
    labels: int | None = None,
    dropout: float | None = None,
    ignore_config_keys: tuple[str, ...] = (),
) -> LigerCausalLM:
    """Load a Hugging Face checkpoint, from the hub or from a folder, into a model in training mode.

    Args:
        name_or_path: a repository ("meta-llama/Llama-3.2-1B") or a folder.
        revision: branch, tag or commit.
        token: hub token; True or None for the stored login.
        cache_dir: the hub's cache.
        local_files_only: take the repository from the cache, without a network.
        dtype: of all parameters. "auto" rounds nothing: the matrices get the narrowest dtype that holds the
            checkpoint's exactly, and norms and biases that the checkpoint has in a wider one keep it.
        device: of the parameters; by default torch's default device.
        attention: the attention backend, see layers/attention/backends.py.
        activation_memory: what is kept for the backward pass (layers/recompute/activation_memory.py). "auto"
            chooses a level for each layer when the first batch arrives, so that a step fits `memory_budget`.
        memory_budget: bytes of the GPU, text such as "120GiB", or a share; by default 0.95 of what is free.
        projections: "fused" computes query, key and value in one product, and gate and up in another; "split"
            makes each a layer with the checkpoint's name, for LoRA libraries and quantisers, which is
            slightly slower. See the model's `split_projections` and `fuse_projections`.
        shard: called with the model before it has memory, to divide it over processes: `parallelize`, or
            `fully_shard` of torch.distributed.fsdp on each layer and on the model. Each process then reads
            only its own rows. FSDP2 needs parameters of one dtype: name one if the checkpoint mixes them.
        text_only: load only the language model of a multimodal checkpoint, and warn of what is left out; the
            model's `left_out` lists it. `save_pretrained` then writes a checkpoint of that language model.
            The types for which this works are in architectures/registry/multimodal.py.
        labels: turn a language model into a `LigerSequenceClassifier` with this many labels, 1 for rewards:
            a fresh head replaces the language model's. Not needed for checkpoints of classifiers.
        dropout: 0.0 trains without the dropout that a config asks for. None refuses such a config, since
            dropout is not supported. It makes no difference to a model that is not trained.
        ignore_config_keys: unknown keys of config.json that are known not to matter.

    Raises:
        UnsupportedModelError: no architecture of this `model_type`.
        ConfigError: a key of config.json is missing, unknown or has a value that cannot be honoured; or the
            dtype or the device cannot.
        CheckpointError: a file or a tensor is missing, extra, misshapen or damaged.
        HubError: the repository or the hub cannot be reached.
    """
    from liger_models.convert.checkpoints.hub import resolve

    device = parse_device(device)
    _check_projections(projections)
    folder = resolve(
        name_or_path, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
    )
    config = HFConfig.load(folder, ignore_config_keys=ignore_config_keys, dropout=dropout)
    text = text_config_of(config) if text_only else config
    architecture, labels = _architecture(text), labels or labels_of(text.raw)
    fresh: tuple[str, ...] = ()
    with CheckpointReader(folder) as reader:
        if text is not config:
            text, left_out = select_text(config, text, reader)
        whole = text is config
        if labels is not None:
            fresh = ("lm_head.weight",) if leave_out_head(reader, architecture) else ()
            architecture = as_classifier(architecture)
            text = text.with_raw(with_labels(text.raw, labels, architecture.reference))
        text.most_layers = min(text.most_layers, len(reader.tensors))
        untied = architecture.sees and _has_own_head(architecture, reader)
        model = _skeleton(text, architecture, attention, activation_memory, memory_budget, untied)
        source = find_layout(model, reader, fresh)
        stored = reader.dtypes
        for name in fresh:  # which has the dtype of the embedding
            stored[model.layout.name(name)] = stored[model.layout.name("embed_tokens.weight")]
        model.materialize("meta", exact_dtypes(model, stored) if dtype == "auto" else parse_dtype(dtype))
        if shard is not None:  # wrappers note the dtypes
            _split_if(projections, model)
            shard(model)
        model.materialize(device)
        tensors, weight_map = model.saved_tensors(), model.weight_map()
        for name in fresh:
            del tensors[name], weight_map[name]
        load_parameters(tensors, weight_map, reader, progress=True)
    model.source_folder = folder
    if fresh:
        model.reset_parameters_of(model.lm_head)
    elif whole:
        model.source = source
    else:  # which goes out as a checkpoint of its own
        left_out += [reader.tensors[name] for name in source.carried]
        model.left_out = tuple(info.name for info in left_out)
        warn_of(left_out, config, text)
    if shard is None:
        _split_if(projections, model)  # over the memory of the packed ones
    return model


from_pretrained = from_hub


def from_config(
    config: Mapping[str, Any] | str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attention: AttentionBackend = "auto",
    activation_memory: str | list[str] = "lean",
    memory_budget: float | str | None = None,
    projections: Projections = "fused",
    shard: Callable[[LigerCausalLM], object] | None = None,
    text_only: bool = False,
    labels: int | None = None,
    dropout: float | None = None,
    ignore_config_keys: tuple[str, ...] = (),
) -> LigerCausalLM:
    """A model with fresh random weights, made directly on the device (torch's seed decides them).

    Args:
        config: what a config.json holds: a dict, a file, or a folder with one.
        dtype: of the parameters; "auto" takes the config's, or float32.
        device, attention, activation_memory, memory_budget, projections, text_only, labels, dropout,
            ignore_config_keys: as for `from_hub`.
        shard: as for `from_hub`. Processes with the same seed make the parts of one model; with fused
            projections it is the one that a single process would make.

    Raises:
        UnsupportedModelError, ConfigError: as for `from_hub`.
    """
    device = parse_device(device)
    _check_projections(projections)
    read = HFConfig.load(config, ignore_config_keys=ignore_config_keys, dropout=dropout)
    read = text_config_of(read) if text_only else read
    architecture, labels = _architecture(read), labels or labels_of(read.raw)
    if labels is not None:
        architecture = as_classifier(architecture)
        read = read.with_raw(with_labels(read.raw, labels, architecture.reference))
    model = _skeleton(read, architecture, attention, activation_memory, memory_budget)
    if dtype == "auto":
        dtype = read.raw.get("dtype") or read.raw.get("torch_dtype") or "float32"
    model.materialize("meta", parse_dtype(dtype))
    if shard is not None:  # wrappers note the dtype
        _split_if(projections, model)
        shard(model)
    model.materialize(device)
    if not model.embed_tokens.weight.is_meta:  # there torch draws nothing, and imports its compiler for it
        model.reset_parameters()
    if shard is None:
        _split_if(projections, model)
    return model


def find_layout(
    model: LigerCausalLM, reader: CheckpointReader, missing: tuple[str, ...] = ()
) -> SourceLayout:
    """Which of its family's layouts a checkpoint has, without the `missing` tensors of the model; from here
    on it is the model's.

    Raises:
        CheckpointError: its tensors are those of none of them.
    """
    tied = {}
    if model.spec.tie_word_embeddings:  # the head's tensor may be there beside the embedding that it repeats
        tied = dict(map(_head_and_embedding, model.architecture.layouts))
    maps = {
        layout: {name: expr for name, expr in model.weight_map(layout).items() if name not in missing}
        for layout in model.architecture.layouts
    }
    source = match_layout(reader, maps, carried=model.carried, tied_duplicates=tied)
    model.layout = source.layout
    return source


def _head_and_embedding(layout: Layout) -> tuple[str, str]:
    return layout.name("lm_head.weight"), layout.name("embed_tokens.weight")


def _has_own_head(architecture: Architecture, reader: CheckpointReader) -> bool:
    """Whether a checkpoint has a head that is not its embedding. Then it is what the reference takes of a
    model that sees, whatever the config says of it, or means by saying nothing.
    """
    pairs = map(_head_and_embedding, architecture.layouts)
    there = {head: embedding for head, embedding in pairs if {head, embedding} <= reader.tensors.keys()}
    return any(not repeats(reader, head, embedding) for head, embedding in there.items())


def _architecture(config: HFConfig) -> Architecture:
    try:
        return find_architecture(config.model_type)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config.name}: {error}") from error


def exact_dtypes(model: CausalLM, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """A dtype for each of the model's tensors in which a checkpoint's values are exact, by native name.

    All matrices get one, since they multiply one another's results. What else is stored in a wider one, a
    norm or a bias, has that for itself: it must not double the model.

    Args:
        model: with the layout of the checkpoint.
        stored: the dtypes of the checkpoint's tensors.
    """
    tensors, canonical = model.saved_tensors(), model.weight_map(Layout())
    found = {name: {stored[ref.name] for ref in expr.refs()} for name, expr in model.weight_map().items()}
    matrices = {name for name, expr in canonical.items() if any(len(ref.shape) > 1 for ref in expr.refs())}
    # What is no dtype of weights is refused, by its name, when it is loaded.
    of_matrices = set().union(*(found[name] for name in matrices)).intersection(WEIGHT_DTYPES)
    shared = functools.reduce(torch.promote_types, of_matrices or {torch.float32})

    def exact(name: str) -> torch.dtype:
        if name in matrices:
            return shared
        least = shared if isinstance(tensors[name], nn.Parameter) else tensors[name].dtype
        wider = found[name].intersection(WEIGHT_DTYPES) if least.is_floating_point else set()
        return functools.reduce(torch.promote_types, wider, least)

    return {name: exact(name) for name in tensors}


def _skeleton(
    config: HFConfig,
    architecture: Architecture,
    attention: AttentionBackend,
    activation_memory: str | list[str],
    memory_budget: float | str | None,
    untied: bool = False,
) -> LigerCausalLM:
    """The model on the meta device: shapes without memory. `untied`: whatever the config says."""
    spec = architecture.spec(config)
    spec = replace(spec, tie_word_embeddings=False) if untied else spec
    raw = {"architectures": [architecture.reference], **config.raw}
    try:
        with torch.device("meta"), _NoInitialisation():
            kind = LigerCausalLM if labels_of(raw) is None else LigerSequenceClassifier
            model = kind(spec, architecture, raw, attention, activation_memory, memory_budget)
    except RuntimeError as error:  # sizes whose product is beyond 64 bits
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{config.name}: a model of these sizes cannot be laid out ({reason})") from error
    model.carried = architecture.carried(config)
    return model


class _NoInitialisation(TorchFunctionMode):
    """Random numbers for parameters that are about to be overwritten are not drawn.

    On the meta device they would cost nothing themselves, but torch imports its compiler to shape them.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def _split_if(projections: str, model: LigerCausalLM) -> None:
    if projections == "split":
        model.split_projections()


def _check_projections(projections: str) -> None:
    if projections not in get_args(Projections):
        raise ConfigError(f"projections must be 'fused' or 'split', found {projections!r}")


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """A device that is there; None for torch's default.

    Raises:
        ConfigError: torch does not know the device, or has none of it.
    """
    if device is None:
        return None
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {str(device)!r} cannot be used ({reason}); 'cpu' always can") from error
    return parsed
