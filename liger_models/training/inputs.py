"""Inputs of a run: tokenizer, model and data."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_models.convert.checkpoints.adapter import LowRankAdapter
from liger_models.convert.checkpoints.hub import ADAPTER_CONFIG, latest_in_run, local_path, resolve
from liger_models.convert.errors import ConfigError, DataError, UnsupportedModelError
from liger_models.images import Preprocessor
from liger_models.layers.attention.backends import WITH_TREES
from liger_models.layers.sequences.tree import check_tree
from liger_models.layers.specs import ModelSpec
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.classifier import LigerSequenceClassifier
from liger_models.models.loading import from_config, from_hub
from liger_models.models.quantization import quantise
from liger_models.models.vocabulary import check_vocabulary
from liger_models.presets import PRESETS, naming_presets, preset
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.config import TrainConfig
from liger_models.training.data import (
    BlockRequest,
    Documents,
    describe,
    load_documents,
    split,
    stream_documents,
    stream_folder,
)
from liger_models.training.data.reading.sources import with_split
from liger_models.training.data.tokenizing import default_cache, limits_of
from liger_models.training.lora import Adapters, import_peft
from liger_models.training.objectives import OBJECTIVES
from liger_models.training.observing.flops import StepFlops
from liger_models.training.optimizer import optimizer_memory
from liger_models.training.processes.world import World
from liger_models.training.text.tokenizer import TextTokenizer
from liger_models.training.trained_part import (
    check_language_model,
    check_new_rows_are_trained,
    choose_trained,
    freezing_divide,
    is_frozen,
    new_rows,
)


class LoadedModel(NamedTuple):
    """A model, its adapters if any, and the operations of its steps; `size` is the number of parameters
    before adapters and quantisation.
    """

    model: LigerCausalLM
    adapters: Adapters | None
    flops: StepFlops
    size: int


def with_adapter(config: TrainConfig) -> TrainConfig:
    """The settings with a run as the model replaced by its checkpoint, and an adapter by its base model and
    the adapter to train further.

    Raises:
        ConfigError: settings of other adapters, too.
        CheckpointError: the adapter or its base model cannot be used.
    """
    name = str(latest_in_run(config.adapter or config.model))
    if config.adapter is None and not (local_path(name) / ADAPTER_CONFIG).is_file():
        return config if name == config.model else config.changed(model=name)
    folder = resolve(name, adapter=True)
    adapter = LowRankAdapter.open(folder, config.model if config.adapter else None)
    adapter.resolve_base()
    lora = LoraSettings.text_of(adapter)
    if config.lora not in (None, lora):
        raise ConfigError(
            f"{folder} is an adapter, which is trained further with its own settings, {lora}; omit --lora, "
            "or merge it first (liger-models merge) and train new adapters"
        )
    return config.changed(model=adapter.base, adapter=str(folder), lora=lora)


def tokenizer_folder(config: TrainConfig, checkpoint: Path | None) -> Path:
    """Folder of the tokenizer's files: the checkpoint's, if it contains a whole model.

    Raises:
        ConfigError: a preset without a tokenizer.
        HubError: the model cannot be downloaded.
    """
    if config.tokenizer:
        return local_path(config.tokenizer)
    if _is_preset(config.model):
        raise ConfigError(f"the preset {config.model} has no tokenizer; pass one with --tokenizer FOLDER")
    if checkpoint and config.lora is None:
        return checkpoint
    if config.adapter and (Path(config.adapter) / "tokenizer.json").is_file():
        return Path(config.adapter)
    with naming_presets(config.model):
        return resolve(config.model)


def read_spec(config: TrainConfig, tokenizer: TextTokenizer, checkpoint: Path | None) -> ModelSpec:
    """The spec of the model to train, which determines the data it accepts, without allocating memory.

    Raises:
        ConfigError, UnsupportedModelError: its config.json is unusable.
    """
    if config.lora is not None:
        if _is_preset(config.model):
            raise ConfigError(
                f"lora adapts a trained model, but the preset {config.model} has random weights, which are "
                "not part of an adapter"
            )
        import_peft()  # fail before the data are read
    source = _source(config, checkpoint)
    if _is_preset(source) and OBJECTIVES[config.objective].needs_reference:
        raise ConfigError(
            f"objective {config.objective} needs a trained model as its reference, but the preset {source} "
            "has random weights; train it with sft first"
        )
    shape: Any = _fresh(config, tokenizer) if _is_preset(source) else resolve(source)
    spec = from_config(shape, device="meta", **_options_of_shape(config)).spec
    if (size := _new_rows(config, source, tokenizer).stop) > spec.vocab_size:
        check_vocabulary(spec, size)
        spec = replace(spec, vocab_size=size)
    return spec


def find_spec(folder: Path) -> ModelSpec | None:
    """Spec of the model whose config.json is in a folder; None if it is missing or of an unknown type."""
    if not (folder / "config.json").is_file():
        return None
    try:
        return from_config(folder, device="meta", dropout=0.0).spec
    except (ConfigError, UnsupportedModelError):  # a tokenizer may come from any model
        return None


def labels_for(config: TrainConfig) -> int | None:
    """`labels` for `from_hub`: one for a reward head."""
    return 1 if OBJECTIVES[config.objective].rewards else None


def _options_of_shape(config: TrainConfig) -> dict[str, Any]:
    """Options of `from_hub` and `from_config` that determine the parameters of a model."""
    options = {"text_only": config.text_only, "labels": labels_for(config), "dropout": config.dropout}
    return {**options, "mtp": bool(config.objective_options.get("mtp"))}


def load_model(
    config: TrainConfig, world: World, tokenizer: TextTokenizer, checkpoint: Path | None
) -> LoadedModel:
    """Load the model to train, from the checkpoint or the settings' source, in training mode.

    Raises:
        ConfigError: settings that do not fit the model.
        CheckpointError: a checkpoint that is damaged, or another model's.
    """
    source, on_host = _source(config, checkpoint), config.weights_memory == "host"
    new = _new_rows(config, source, tokenizer)
    model = _read_model(config, world, tokenizer, source, new)
    if labels_for(config) is None:
        check_language_model(model, config)
    if isinstance(model, LigerSequenceClassifier):
        settings: Any = model.config
        if getattr(settings, "pad_token_id", None) is None:
            settings.pad_token_id = tokenizer.pad_id
    choose_trained(model, config)
    if new and config.lora is None:
        check_new_rows_are_trained(model)
    frozen = {path for path, module in model.named_modules() if is_frozen(module)}
    size, flops = model.num_parameters(), StepFlops(model)
    if config.quantize:
        quantise(model, config.quantize, world.device, on_host)
    adapters: Adapters | None = None
    if config.lora is not None:
        adapters = Adapters(model, LoraSettings.parse(config.lora), config.model, config.seed, frozen, new)
        flops.below_adapters(sum(p.numel() for p in model.parameters() if p.requires_grad))
        if origin := checkpoint or config.adapter:
            adapters.read(Path(origin))
    if on_host:
        model.keep_weights_on_host(world.device)
    if config.activation_memory == "auto":
        trained = torch.float32 if adapters else model.dtype
        per_element, _ = optimizer_memory(model, config.optimizer, trained, config.weights, config.moments)
        per_element = 0 if config.optimizer_memory == "host" else per_element
        model.set_activation_memory("auto", config.memory_budget, per_element, world.say)
    model.set_cuda_graphs(config.cuda_graphs)
    return LoadedModel(model.train(), adapters, flops, size)


def _read_model(
    config: TrainConfig, world: World, tokenizer: TextTokenizer, source: str, new: range
) -> LigerCausalLM:
    """Read the weights of a checkpoint, or draw those of a preset."""
    on_host = config.weights_memory == "host"
    if on_host and world.size > 1:
        raise ConfigError(
            "weights_memory 'host' supports one process only; shard the model over GPUs instead (shard)"
        )
    options: dict[str, Any] = {
        # Each layer is quantised on its way to the device.
        "device": "cpu" if config.quantize or on_host else world.device,
        "attention": config.attention,
        "activation_memory": "lean" if config.activation_memory == "auto" else config.activation_memory,
        "float8": config.float8,
        "shard": freezing_divide(config, world),
        **_options_of_shape(config),
    }
    if config.lora is not None:
        options["projections"] = "split"
    dtype: Any = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if _is_preset(source):
        if config.dtype == "auto":
            dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        return from_config(_fresh(config, tokenizer), dtype=dtype, **options)
    options |= {"new_tokens": new or None, "keep_quantised": config.keep_quantised}
    model = from_hub(source, dtype=dtype, **options)
    if model.dtype == torch.float16:
        raise ConfigError(
            f"{config.model} is in float16, whose range gradients exceed; choose --dtype bfloat16 or float32"
        )
    return model


def can_share_prompts(spec: ModelSpec, config: TrainConfig) -> bool:
    """Whether documents may continue others in this model with the same results."""
    try:
        check_tree(spec, None)
    except DataError:
        return False
    # Routers would count a prompt once, and not every backend supports such documents; and a prompt with
    # bidirectional attention has no last token of its own.
    prefix = getattr(spec.vision, "spans", None) == "prefix"
    biased = any(block.mixture is not None and block.mixture.correction_bias for block in spec.blocks)
    balances = biased and config.bias_update_rate > 0 and config.lora is None
    divided = config.sequence_parallel > 1
    known = config.attention in ("auto", *WITH_TREES)
    return spec.router is None and known and not (prefix or balances or divided)


def load_data(
    config: TrainConfig,
    world: World,
    spec: ModelSpec,
    tokenizer: TextTokenizer,
    resumed: dict[str, Any] | None,
    opened: ExitStack,
) -> tuple[Documents, Documents | None]:
    """Load the documents to train on, and the held-out ones, if any. Streamed ones begin where the state of a
    checkpoint, `resumed`, says; `opened` closes their stream.

    Raises:
        ConfigError: documents longer than the model's positions.
        DataError: unusable data.
    """

    images = None if spec.vision is None else Preprocessor(tokenizer.folder, spec)

    def load(files: tuple[str, ...], split: str | None = None) -> Documents:
        return load_documents(
            files,
            tokenizer,
            seq_len=config.seq_len,
            vocab_size=spec.vocab_size,
            truncate=config.truncate,
            train_on=config.train_on,
            cache=config.data_cache,
            verify=config.verify_data,
            images=images,
            form=OBJECTIVES[config.objective].form,
            share=can_share_prompts(spec, config),
            columns=config.columns,
            split=split,
        )

    held_out: Documents | None = None
    if config.streaming:
        documents = _stream_data(config, world, spec, tokenizer, resumed)
        opened.callback(documents.blocks.close)
        world.say(f"data: a stream, whose first block has {describe(documents.counts)}")
    else:
        documents = load(config.data, config.split)
        world.say(f"data: {describe(documents.counts)}")
    if config.eval_data:
        held_out = load(config.eval_data)
        if any(part.weight is not None for part in held_out.parts):
            raise DataError("eval_data has weights, but each held-out document counts once; remove them")
    elif config.eval_fraction:
        documents, held_out = split(documents, config.eval_fraction, config.seed)
    if held_out:
        _report_held_out(config, world, documents, held_out)
    _check_documents(config, spec, documents, held_out)
    return documents, held_out


def _report_held_out(config: TrainConfig, world: World, documents: Documents, held_out: Documents) -> None:
    world.say(f"held out: {describe(held_out.counts)}")
    tokens, others = held_out.counts["tokens"], documents.counts["tokens"]
    if config.eval_fraction and not 0.5 < tokens / (config.eval_fraction * others) < 2:
        world.say(
            f"that is {tokens / others:.2%} of the tokens instead of {config.eval_fraction:.2%}, since "
            "documents are held out whole; divide long texts into documents, or pass --eval-data"
        )


def _check_documents(
    config: TrainConfig, spec: ModelSpec, documents: Documents, held_out: Documents | None
) -> None:
    """Refuse images in divided sequences, and documents longer than the model's positions."""
    if config.sequence_parallel > 1 and any(part.corpus.has_images for part in documents.parts):
        raise ConfigError(
            f"sequence_parallel is {config.sequence_parallel}, but the data have images, whose tokens cannot "
            "be split over processes; omit it, and use smaller images if rows are too long"
        )
    limit = spec.position_limit
    longest = max(part.longest_piece(config.seq_len) for part in (documents, held_out) if part)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the data has documents of {longest} tokens or more, but {config.model} was trained for "
            f"{limit} positions (max_position_embeddings); choose --seq-len {limit} or less"
        )


def _stream_data(
    config: TrainConfig,
    world: World,
    spec: ModelSpec,
    tokenizer: TextTokenizer,
    resumed: dict[str, Any] | None,
) -> Documents:
    if spec.vision is not None:
        raise ConfigError(
            f"{config.model} is multimodal, and images are not streamed; pass text_only, or omit streaming"
        )
    if spec.position_limit is not None and config.seq_len > spec.position_limit:
        raise ConfigError(
            f"seq_len is {config.seq_len}, but {config.model} was trained for {spec.position_limit} "
            "positions (max_position_embeddings), and the longest document of a stream is unknown; choose "
            f"--seq-len {spec.position_limit} or less"
        )
    form = OBJECTIVES[config.objective].form

    def request(names: list[str]) -> BlockRequest:
        return BlockRequest(
            *(with_split(names, config.split), tokenizer, limits_of(spec.vocab_size, config.seq_len, form)),
            config.truncate,
            form=form,
            train_on=config.train_on,
            share=can_share_prompts(spec, config),
            columns=config.columns,
        )

    cache = local_path(config.data_cache, DataError) if config.data_cache else default_cache()
    name = world.once(lambda: secrets.token_hex(8))
    folder = stream_folder(cache, local_path(config.output), name)
    return stream_documents(config.data, request, size=config.shuffle_buffer, folder=folder, resumed=resumed)


def _new_rows(config: TrainConfig, source: str, tokenizer: TextTokenizer) -> range:
    """Ids of the tokens that are new to the source of a run's model."""
    if source != config.model or _is_preset(source):
        return range(0)  # a checkpoint of the run, or of the tokenizer's size

    def origin() -> Path:
        own = resolve(config.model)
        return own if (own / "tokenizer.json").is_file() else tokenizer_folder(config, None)

    return new_rows(config, origin, tokenizer)


def _source(config: TrainConfig, checkpoint: Path | None) -> str:
    """Origin of the model. A checkpoint of adapters does not contain it."""
    return str(checkpoint) if checkpoint and config.lora is None else config.model


def _fresh(config: TrainConfig, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Config of a preset, with the tokenizer's ids."""
    return preset(config.model, vocab_size=tokenizer.vocab_size, bos=tokenizer.bos_id, eos=tokenizer.eos_id)


def _is_preset(name: str) -> bool:
    return name in PRESETS and not Path(name).exists()
