"""The user-facing model: layers.CausalLM with a config, saving to disk and to the hub, and generation."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.shards import checkpoint_tensors
from liger_models.convert.checkpoints.source_layout import SourceLayout
from liger_models.convert.checkpoints.weight_map import WeightMap
from liger_models.convert.checkpoints.writing import (
    CheckpointPlan,
    find_aux_files,
    plan_checkpoint,
    save_checkpoint,
)
from liger_models.convert.config.model_config import ModelConfig, export_config
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.convert.json_file import read_json
from liger_models.generating.generation import generate
from liger_models.known_to_trainer import KnownToTrainer
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.recompute.host_weights import device_of
from liger_models.layers.specs import ModelSpec
from liger_models.models.absent_tensors import write_all_tensors
from liger_models.models.quantised_export import encoder_of
from liger_models.models.vocabulary import resize

GENERATION_CONFIG = "generation_config.json"


class LigerCausalLM(KnownToTrainer, CausalLM):
    """A causal language model with its config. Create one with `from_hub` or `from_config`.

    Attributes:
        architecture: the family, as registered.
        config: the keys of config.json as attributes.
        carried: patterns (with `*`) of checkpoint tensors that the model does not use and an export copies.
        source: layout of the checkpoint that it was read from; None for random weights, and for the text part
            of a multimodal checkpoint.
        left_out: names of the tensors of a multimodal checkpoint that were not read.
        source_folder: the folder of that checkpoint.
        adapter_folder: the folder of the adapter that was merged into it, if any.
        learned_ends: ids that the model was trained to end answers with. They are added to the `eos_token_id`
            of the generation config.
    """

    # Attributes that transformers' Trainer and accelerate look for: the loss takes num_items_in_batch and
    # shifts the labels, the name of the input, and (below) the modules that stay whole when the model is
    # split over devices.
    accepts_loss_kwargs = True
    loss_type = "ForCausalLM"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    tables_of_vocabulary: tuple[str, ...] = ("embed_tokens", "lm_head")  # with a row for each token

    def __init__(
        self,
        spec: ModelSpec,
        architecture: Architecture,
        raw_config: Mapping[str, Any],
        attention: AttentionBackend = "auto",
        activation_memory: str | list[str] = "lean",
        memory_budget: float | str | None = None,
    ):
        super().__init__(spec, attention, activation_memory, memory_budget)
        self._no_split_modules = self.layer_class_names()
        self.layout = architecture.layouts[0]
        self.architecture = architecture
        self.config = ModelConfig(raw_config)
        self.carried: tuple[str, ...] = ()
        self.source: SourceLayout | None = None
        self.source_folder: Path | None = None
        self.adapter_folder: Path | None = None
        self.left_out: tuple[str, ...] = ()
        self.learned_ends: tuple[int, ...] = ()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Required by PEFT when it wraps a causal language model; transformers' `generate` is not used here.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("use this model's own method: model.generate(input_ids, ...)")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "peft_config":  # set by PEFT after adding its adapters
            self._run_adapters()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode. Trainers call this before every step, so adapters added since the first step
        are found here.
        """
        if mode and getattr(self, "peft_config", None):
            self._run_adapters()
        return super().train(mode)

    def _run_adapters(self) -> None:
        from liger_models.hf.adapters.lora import take_over  # imports PEFT

        take_over(self)

    @functools.cached_property
    def modules_layout(self) -> Layout:
        """The layout with the names of transformers' own modules, which PEFT's files have."""
        if not self.architecture.multimodal:
            return self.architecture.modules_layout
        from liger_models.hf.checkpoints.unread import modules_layout  # imports transformers

        return modules_layout(self)

    @property
    def device(self) -> torch.device:
        return device_of(self)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None
    ) -> nn.Embedding:
        """Give the vocabulary another size, in place: the embedding, a language model's head, and the
        config's `vocab_size`. Returns the embedding. Parameters are new: create the optimizer afterwards.

        Old rows keep their bits, and tied weights stay tied. Each new row is the mean of the old ones, so
        that new tokens take at most their share of the probability from the old (Hewitt, 2021:
        liger_models/models/new_rows.py).

        Args:
            new_num_tokens: the number of tokens. Default: as many as there are.
            pad_to_multiple_of: round the number up to a multiple, such as 64, for faster products.

        Raises:
            ConfigError: the model cannot have this vocabulary, or it is sharded over processes, or wrapped by
                adapters.
        """
        size = self.spec.vocab_size if new_num_tokens is None else new_num_tokens
        multiple = pad_to_multiple_of or 1
        resize(self, -(-size // multiple) * multiple)
        return self.embed_tokens

    def save_pretrained(
        self,
        folder: str | Path,
        max_shard_size: int | str | None = None,
        dtype: str | torch.dtype | None = None,
        quantization: str | None = None,
    ) -> None:
        """Write a Hugging Face checkpoint that transformers and vLLM read.

        A model read from a checkpoint is written as it was read: tensor names, dtypes, shards, config,
        generation config, tokenizer and chat template. An existing checkpoint in `folder` is replaced
        atomically when the new one is complete. If the model is sharded over processes (FSDP2), all of them
        must call this: tensors are gathered one at a time, and the first process writes. With replicas (DDP)
        one process is enough; if several call this at the same time for one folder, one of them writes and
        the others wait.

        Args:
            folder: output folder.
            max_shard_size: maximum file size, in bytes or as "5GB" (10^9) or "5GiB". Default: the source's
                files, or 5 GB.
            dtype: of the tensors, torch.bfloat16 or "bfloat16"; "parameters" is each tensor's dtype in
                memory. Default: the source's, or each tensor's dtype in memory.
            quantization: of the matrices of layers, for servers: "as_loaded" is the format of the checkpoint
                that was read, with the same bits of weights that have not changed; "fp8-block", "nvfp4" and
                "mxfp4" (only gpt-oss) are made anew (convert/quantised/encoding.py). Default: none.

        Raises:
            UnsupportedModelError: the weights cannot be written in that format.
            CheckpointError: the disk is full or not writable; an old checkpoint is then untouched. Or the
                model's parameters have changed since its creation, for example by adding an adapter.
            ConfigError: an invalid `dtype`.
        """
        write_all_tensors(self)
        parameters, weight_map = self.saved_tensors(), self.weight_map()
        options = self._plan_options(parameters, weight_map, dtype)
        with encoder_of(self, quantization) as encoder:
            if encoder is not None:
                options["config"]["quantization_config"] = dict(encoder.settings)
            options |= {"max_shard_size": max_shard_size, "encoder": encoder}
            save_checkpoint(folder, parameters, weight_map, **options)

    def checkpoint_plan(self, dtype: str | torch.dtype | None = None) -> CheckpointPlan:
        """Plan of the files that `save_pretrained` would write, for writing their values in another way.

        Raises:
            CheckpointError, ConfigError: as in `save_pretrained`.
        """
        write_all_tensors(self)
        parameters, weight_map = self.saved_tensors(), self.weight_map()
        return plan_checkpoint(parameters, weight_map, **self._plan_options(parameters, weight_map, dtype))

    def _plan_options(
        self,
        parameters: Mapping[str, Tensor],
        weight_map: WeightMap,
        dtype: str | torch.dtype | None,
    ) -> dict[str, Any]:
        chosen: Any = dtype if dtype in (None, "parameters") else parse_dtype(dtype)
        check_savable(parameters, weight_map)
        written = _source_dtype(self.source) if self.source and dtype is None else self.dtype
        written = chosen if isinstance(chosen, torch.dtype) else written
        config = export_config(
            self.config.to_dict(),
            dtype=str(written).removeprefix("torch."),
            source=self.source is not None,
            rope_keys=self.architecture.rope_keys,
        )
        folders = [folder for folder in (self.source_folder, self.adapter_folder) if folder]
        aux: dict[str, Path | bytes] = {}
        for folder in filter(Path.is_dir, folders):  # an adapter's tokenizer replaces the base model's
            aux |= find_aux_files(folder)
        if (generation := self.generation_config()) is not None:
            aux[GENERATION_CONFIG] = generation
        return {
            "config": config,
            "source": self.source,
            "dtype": chosen,
            "fixed": parameters.keys() - dict(self.named_parameters()).keys(),  # buffers
            "aux_files": aux,
        }

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the (name, tensor) pairs of the checkpoint that `save_pretrained` would write, for
        transferring weights without files, for example to an inference engine during training.

        Tensors are views of the model's if strides allow it, in its dtypes and on its devices. If the model
        is sharded over processes, all of them must iterate together: tensors are gathered one at a time.

        Raises:
            CheckpointError: the model's parameters have changed since its creation, for example by adding an
            adapter.
        """
        write_all_tensors(self)
        natives, weight_map = self.saved_tensors(), self.weight_map()
        check_savable(natives, weight_map)
        copies: dict[str, list[str]] = {}
        for name, original in (self.source.tied if self.source else {}).items():
            copies.setdefault(original, []).append(name)
        for name, tensor in checkpoint_tensors(natives.__getitem__, weight_map):
            yield from ((same, tensor) for same in (name, *copies.get(name, ())))
        if self.source is not None:
            yield from self.source.carried.items()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        commit_message: str = "Upload model",
        revision: str | None = None,
        max_shard_size: int | str | None = None,
    ) -> str:
        """Upload the files of `save_pretrained`, and return the URL of the commit.

        Raises:
            HubError: the hub refused, or could not be reached.
        """
        from liger_models.convert.checkpoints.hub import push

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return push(
                folder,
                repo_id,
                token=token,
                private=private,
                commit_message=commit_message,
                revision=revision,
            )

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        *,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        attention_mask: Tensor | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        on_token: Callable[[Tensor], Tensor | None] | None = None,
        **images: Any,
    ) -> Tensor:
        """Continue each prompt [batch, seq] of a batch: [batch, seq + new]. See `generate` in
        liger_models/generating/generation.py; special ids default to the generation config's.
        """
        return generate(
            self,
            input_ids,
            max_new_tokens,
            temperature,
            top_p,
            top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            attention_mask=attention_mask,
            eos_token_id=self.special_id("eos_token_id") if eos_token_id is None else eos_token_id,
            pad_token_id=self.special_id("pad_token_id") if pad_token_id is None else pad_token_id,
            seed=seed,
            on_token=on_token,
            **images,
        )

    def special_id(self, key: str) -> Any:
        """A special id by its name in configs, such as `eos_token_id`: one, a list, or None. The generation
        config takes precedence over the model's; learned end ids are added.
        """
        value = self._stated_id(key)
        if key != "eos_token_id":
            return value
        stated = value if isinstance(value, list) else [] if value is None else [value]
        learned = [end for end in self.learned_ends if end not in stated]
        return [*stated, *learned] if learned else value

    def generation_config(self) -> bytes | None:
        """The generation_config.json of a model trained to end answers with tokens missing in it; else
        None."""
        key = "eos_token_id"
        ends = self.special_id(key)
        if ends == self._stated_id(key):
            return None
        stated = self._stated_generation_config()
        if not stated:  # readers take these from config.json only where this file is missing
            ids = {name: self._stated_id(name) for name in ("bos_token_id", "pad_token_id")}
            stated = {name: value for name, value in ids.items() if value is not None}
        return (json.dumps({**stated, key: ends}, indent=2) + "\n").encode()

    def _stated_id(self, key: str) -> Any:
        value = self._stated_generation_config().get(key)
        return getattr(self.config, key, None) if value is None else value

    def _stated_generation_config(self) -> dict[str, Any]:
        folders = [folder for folder in (self.adapter_folder, self.source_folder) if folder]
        paths = [folder / GENERATION_CONFIG for folder in folders]
        return next((read_json(path) for path in paths if path.is_file()), {})


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Parse a dtype of weights, given by name or itself.

    Raises:
        ConfigError: not a supported dtype of weights.
    """
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if parsed not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ConfigError(
            f"dtype {dtype!r} is not a floating point dtype; expected 'bfloat16', 'float16' or 'float32'"
        )
    return parsed


def check_savable(parameters: Mapping[str, Tensor], weight_map: WeightMap) -> None:
    """Check that tensors by native name are what a checkpoint of this map holds.

    Raises:
        CheckpointError: they have no values, are quantised, or were added or removed.
    """
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise CheckpointError(f"{name} is on the meta device, so there are no values to save")
        if parameter.dtype == torch.uint8:
            raise CheckpointError(
                f"{name} keeps the quantised bits of its checkpoint, which are not written; call "
                "liger_models.models.stored_weights.decode_stored(model) first, or load the model without "
                "keep_quantised"
            )
    if unknown := sorted(parameters.keys() ^ weight_map.keys()):
        raise CheckpointError(
            f"the model's parameters have changed since its creation; they differ in {unknown[:4]}. Merge "
            "adapters into the layers that they wrap, remove parametrizations, and keep a tied head tied"
        )


def _source_dtype(source: SourceLayout) -> torch.dtype:
    """Dtype of most of a checkpoint's values."""
    sizes: dict[torch.dtype, int] = {}
    for info in source.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])
