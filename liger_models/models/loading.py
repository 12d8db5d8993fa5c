"""From a name, a folder or a config to a model, in stages.

resolve the name to a folder -> read its config.json -> choose the architecture and the tensors to read
-> lay the model out without memory, in its dtypes and divided over processes -> fill it
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from liger_models.convert.checkpoints.reading import CheckpointReader, load_parameters
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.checkpoints.source_layout import SourceLayout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.model_config import ModelConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.float8 import Float8Recipe
from liger_models.models.causal_lm import LigerCausalLM, parse_dtype
from liger_models.models.choosing import Choice, LoadOptions, Projections, choose, with_new_rows
from liger_models.models.devices import WithoutInitialisation, device_for
from liger_models.models.float8 import load_in_float8
from liger_models.models.matching import dtypes_of_files, find_layout
from liger_models.models.new_rows import ReaderWithNewRows
from liger_models.models.stored_weights import check_can_keep, fill_stored, keep_stored
from liger_models.models.ternary import check_loading
from liger_models.models.text_part import save_alone, warn_of
from liger_models.presets import PRESETS, preset

WeightsPlace = Literal["device", "host"]


def from_hub(
    name_or_path: str | Path,
    *,
    base: str | Path | None = None,
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
    head: bool = True,
    dropout: float | None = None,
    float8: Float8Recipe | None = None,
    mtp: bool = False,
    ignore_config_keys: tuple[str, ...] = (),
    new_tokens: range | None = None,
    keep_quantised: bool = False,
    weights_memory: WeightsPlace = "device",
) -> LigerCausalLM:
    """Load a Hugging Face checkpoint, from the hub or from a folder, into a model in training mode.

    Args:
        name_or_path: a repository ("meta-llama/Llama-3.2-1B") or a folder, of a model or of a LoRA adapter in
            PEFT's files, which is merged into its base model.
        base: the base model of an adapter. Default: the one that its config names.
        revision: branch, tag or commit.
        token: hub token; True or None for the stored login.
        cache_dir: the hub's cache.
        local_files_only: take the repository from the cache, without a network.
        dtype: of all parameters. "auto" rounds nothing: the matrices get the narrowest dtype that holds the
            checkpoint's exactly, and norms, biases, and routers with logits in float32 keep a wider one. The
            matrices of a quantised checkpoint get the dtype of its config, or bfloat16.
        device: of the parameters; by default torch's default device.
        attention: the attention backend, see layers/attention/backends.py.
        activation_memory: what is kept for the backward pass (layers/recompute/activation_memory.py). "auto"
            chooses a level for each layer when the first batch arrives, so that a step fits `memory_budget`.
        memory_budget: bytes of the GPU, text such as "120GiB", or a share; by default 0.95 of what is free,
            or 0.9 if the model is sharded.
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
        head: False leaves out the head, for a `LigerBaseModel` that returns hidden states or embeddings. Not
            needed for checkpoints without one.
        dropout: 0.0 trains without the dropout that a config asks for. None trains with it, or refuses the
            config if the family's dropout is not supported. It makes no difference without training.
        float8: run the products of the decoder layers' linear layers in float8, on GPUs that can:
            "rowwise", "tensorwise" or "rowwise_with_gw_hp" (docs/float8.md). The weights stay in bfloat16.
        mtp: build the checkpoint's modules for multi-token prediction (layers/model/mtp.py), which are
            trained by the model's `mtp_weight`. Otherwise `save_pretrained` copies their tensors unread.
        ignore_config_keys: unknown keys of config.json that are known not to matter.
        new_tokens: ids of tokens that the checkpoint was not trained with: range(old, new). The vocabulary
            grows if it has fewer, and their rows of the embedding and the head are the mean of the rows
            before them, as by the model's `resize_token_embeddings`, which no sharded model has.
        keep_quantised: hold quantised weights in the files' bits, for adapters (docs/quantised.md).
        weights_memory: "host" freezes the model and keeps the weights of its layers, embedding and head in
            page-locked host memory, from where they are copied to the device one layer ahead of their use:
            for adapters of models larger than a GPU (`keep_weights_on_host`, docs/memory.md).

    Raises:
        UnsupportedModelError: no architecture of this `model_type`.
        ConfigError: a key of config.json is missing, unknown or has a value that cannot be honoured; or the
            dtype or the device cannot.
        CheckpointError: a file or a tensor is missing, extra, misshapen or damaged.
        HubError: the repository or the hub cannot be reached.
    """
    from liger_models.convert.checkpoints.adapter import resolve_model

    options = LoadOptions(
        *(dtype, device, attention, activation_memory, memory_budget, projections, shard),
        *(text_only, labels, head, dropout, float8, mtp, ignore_config_keys),
    )
    hub = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    if weights_memory == "host":
        if shard is not None:
            raise ConfigError(
                "weights_memory='host' supports one process only: omit shard (FSDP2 has its own offload)"
            )
        target, device = device, "cpu"
        options = replace(options, device=device)
    elif weights_memory != "device":
        raise ConfigError(f"weights_memory must be 'device' or 'host', found {weights_memory!r}")
    folder, adapter = resolve_model(name_or_path, base, revision=revision, **hub)
    if adapter and labels is None:
        options = replace(options, labels=adapter.labels)
    config = options.read(folder)
    with ReaderWithNewRows(folder) as reader:
        for remark in reader.quantisation.remarks if reader.quantisation else ():
            warnings.warn(f"{folder}: {remark}", stacklevel=2)
        choice = choose(config, options, reader)
        size = choice.architecture.spec(choice.config).vocab_size
        if adapter is not None and max(adapter.tokens, default=0) >= size and not new_tokens:
            new_tokens = range(size, adapter.tokens[-1] + 1)
        if new_tokens:
            choice = with_new_rows(choice, new_tokens, reader)
        model = _skeleton(choice, options, adapter)
        source = find_layout(model, reader, choice.fresh)
        dtypes = dtypes_of_files(model, reader.dtypes, reader.decoded_dtype, choice.fresh)
        if keep_quantised:
            check_can_keep(folder, reader, options.projections, adapter)
            _fill_with_bits(reader, model, options, dtypes)
        else:
            _lay_out(model, options, dtypes)
            _fill_from(reader, model, choice.fresh)
    model.source_folder = folder
    _note_source(model, source, choice, reader.tensors, config)
    if adapter is not None:
        weight_maps = map(model.weight_map, (model.layout, *model.architecture.layouts))
        adapter.merge(model.saved_tensors(), weight_maps, model.architecture.says_transposed)
        model.adapter_folder = adapter.folder
    if shard is None and not keep_quantised:
        _split_if(projections, model)  # over the memory of the packed ones
    if float8 is not None:
        load_in_float8(model, float8)
    if weights_memory == "host":
        model.requires_grad_(False)
        model.keep_weights_on_host(device_for(model.dtype, target) or torch.get_default_device())
    return model


from_pretrained = from_hub


def from_config(
    config: Mapping[str, Any] | ModelConfig | str | Path,
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
    head: bool = True,
    dropout: float | None = None,
    float8: Float8Recipe | None = None,
    mtp: bool = False,
    ignore_config_keys: tuple[str, ...] = (),
) -> LigerCausalLM:
    """A model with fresh random weights, made directly on the device (torch's seed decides them).

    Args:
        config: the contents of a config.json: a dict, a file, a folder with one, the `config` of another
            model, or the name of a preset (liger_models/presets.py).
        dtype: of the parameters; "auto" takes the config's, or float32.
        device, attention, activation_memory, memory_budget, projections, text_only, labels, head,
            dropout, float8, mtp, ignore_config_keys: as for `from_hub`.
        shard: as for `from_hub`. Processes with the same seed make the parts of one model; with fused
            projections it is the one that a single process would make.

    Raises:
        UnsupportedModelError, ConfigError: as for `from_hub`.
    """
    options = LoadOptions(
        *(dtype, device, attention, activation_memory, memory_budget, projections, shard),
        *(text_only, labels, head, dropout, float8, mtp, ignore_config_keys),
    )
    if isinstance(config, ModelConfig):
        config = config.to_dict()
    elif isinstance(config, str) and config in PRESETS and not Path(config).exists():
        config = preset(config)
    choice = choose(options.read(config), options)
    model = _skeleton(choice, options)
    raw = choice.config.raw
    _lay_out(model, options, raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if not model.embed_tokens.weight.is_meta:  # there torch draws nothing, and imports its compiler for it
        model.reset_parameters()
    if shard is None:
        _split_if(projections, model)
    if float8 is not None:
        load_in_float8(model, float8)
    return model


def _lay_out(model: LigerCausalLM, options: LoadOptions, auto: str | dict[str, torch.dtype]) -> None:
    """Give the model dtypes, divide it over processes, and allocate its memory. `auto`: the dtype "auto"."""
    dtype = auto if options.dtype == "auto" else options.dtype
    model.materialize("meta", dtype if isinstance(dtype, dict) else parse_dtype(dtype))
    if options.shard is not None:  # wrappers note the dtypes
        _split_if(options.projections, model)
        options.shard(model)
    model.materialize(device_for(model.dtype, options.device))


def _fill_from(reader: CheckpointReader, model: LigerCausalLM, fresh: tuple[str, ...]) -> None:
    """Read all tensors but the fresh ones."""
    tensors, weight_map = model.saved_tensors(), model.weight_map()
    for name in fresh:
        del tensors[name], weight_map[name]
    load_parameters(tensors, weight_map, reader, progress=True)


def _fill_with_bits(
    reader: ReaderWithNewRows, model: LigerCausalLM, options: LoadOptions, auto: dict[str, torch.dtype]
) -> None:
    """Allocate the model's memory with quantised weights in the files' bits, and read it."""
    _lay_out(model, replace(options, device="meta", shard=None), auto)
    model.split_projections()
    kept = keep_stored(model, reader.tensors, reader.folder)
    if options.shard is not None:
        options.shard(model)
    model.materialize(device_for(model.dtype, options.device))
    fill_stored(model, kept, reader)


def _note_source(
    model: LigerCausalLM,
    source: SourceLayout,
    choice: Choice,
    tensors: Mapping[str, TensorInfo],
    config: HFConfig,
) -> None:
    """Let the model be saved as the checkpoint that was read, or as the part of it that it is."""
    if choice.fresh:
        model.reset_parameters_of(model.lm_head)
    elif choice.without_head:
        model.layout = source.layout.of_base()
    elif choice.left_out is None:
        model.source = source
    else:  # the text part is saved as a checkpoint of its own
        left_out = [*choice.left_out, *(tensors[name] for name in source.carried)]
        save_alone(model, left_out)
        warn_of(left_out, config, choice.config)


def _skeleton(choice: Choice, options: LoadOptions, adapter: object = None) -> LigerCausalLM:
    """The model on the meta device: shapes without memory."""
    config, architecture = choice.config, choice.architecture
    spec = architecture.as_stored(architecture.spec(config), choice.names)
    spec = replace(spec, tie_word_embeddings=False) if choice.untied else spec
    check_loading(spec, config.name, fresh=choice.names is None, merges=adapter is not None)
    raw = {"architectures": [architecture.reference], **config.raw}
    try:
        with torch.device("meta"), WithoutInitialisation():
            memory = options.activation_memory, options.memory_budget
            model = choice.kind(spec, architecture, raw, options.attention, *memory)
    except RuntimeError as error:  # sizes whose product is beyond 64 bits
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{config.name}: a model of these sizes cannot be laid out ({reason})") from error
    model.carried = architecture.carried(config)
    return model


def _split_if(projections: str, model: LigerCausalLM) -> None:
    if projections == "split":
        model.split_projections()
