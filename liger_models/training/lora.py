"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv:2106.09685) in a training run, through PEFT.

PEFT adds its layers to the native model with split projections, and our operation runs them
(layers/projections/low_rank.py). Files are PEFT's, under transformers' names, so any reader of PEFT adapters
can load them. The base weights may be quantised (liger_models/models/quantization.py): QLoRA (Dettmers et
al., 2023, arXiv:2305.14314).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.adapter import ROWS, absolute_if_folder
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.checkpoints.stack_order import StackOrder
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.layers.parts.embedding import TrainedRows
from liger_models.layers.projections.in_place import change_class
from liger_models.models.causal_lm import GENERATION_CONFIG, LigerCausalLM
from liger_models.models.classifier import HEAD, LigerSequenceClassifier
from liger_models.models.quantization import dequantised
from liger_models.models.stored_weights import decode_stored
from liger_models.training.adapters.lora_settings import ALL, LoraSettings
from liger_models.training.adapters.lora_targets import find_tables, find_targets, leaf, stated_targets
from liger_models.training.random_numbers import seed_generators

TENSORS = "adapter_model.safetensors"


class Adapters:
    """Adapters of a model: initialised or read, written, and merged.

    Args:
        model: with split projections; adapters are added in place, and all other weights are frozen.
        settings: of the adapters.
        base: name of the model, for the adapter's config.
        seed: of the initial weights.
        frozen: names of layers that get no adapters.
        new: ids of new tokens, whose rows of the embedding and the head are trained, too.

    Raises:
        ConfigError: PEFT is not installed, or the model lacks a target.
    """

    def __init__(
        self,
        model: LigerCausalLM,
        settings: LoraSettings,
        base: str,
        seed: int,
        frozen: Collection[str] = (),
        new: range = range(0),
    ) -> None:
        peft = import_peft()
        self.model, self._peft = model, peft
        # A classification head is trained in full, and saved with the adapters.
        self.head = model.lm_head if isinstance(model, LigerSequenceClassifier) else None
        self.names, parameters = find_targets(model, settings, frozen)
        self.stacks: dict[str, tuple[str, StackOrder | None]] = {}
        if settings.experts:
            from liger_models.hf.adapters.expert_lora import stacks_of_experts

            self.stacks = stacks_of_experts(model, frozen)
        self.new, self.tables = new, find_tables(model, self.names, frozen) if new else {}
        whole = {path: name for path, name in self.names.items() if path not in parameters}
        last = {leaf(name) for name in whole.values()}
        self.config = peft.LoraConfig(
            r=settings.r,
            lora_alpha=settings.scaling_alpha,
            lora_dropout=settings.dropout,
            use_dora=settings.dora,
            use_rslora=settings.rslora,
            target_modules=sorted(
                last if settings.targets == ALL else stated_targets(settings.targets, whole)
            ),
            target_parameters=[f"{name}.weight" for name in parameters.values()]
            + [name for name, _ in self.stacks.values()]
            or None,
            task_type="CAUSAL_LM" if self.head is None else "SEQ_CLS",
            modules_to_save=None if self.head is None else [HEAD.removesuffix(".")],
            base_model_name_or_path=absolute_if_folder(base),
            trainable_token_indices={leaf(name): list(new) for name in self.tables} or None,
        )
        model.requires_grad_(False)
        # A list would match suffixes: `layers.0.mlp.down_proj` also ends an encoder layer's name.
        own = {
            "target_modules": "|".join(map(re.escape, self.names)),
            "target_parameters": [*self.stacks] or None,
            "modules_to_save": None,
            "trainable_token_indices": None,
        }
        here = peft.LoraConfig(**{**self._options(), **own})
        config = model.config
        del model.config  # PEFT would use it to treat dense layers as experts, by their names
        try:
            peft.inject_adapter_in_model(here, model)
        finally:
            model.config = config
        self._initialise(seed)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:  # PEFT's default
                parameter.data = parameter.data.float()
            assert parameter.requires_grad is (".lora_" in name)
        if self.head is not None:
            self.head.requires_grad_(True)
        for table in self.tables.values():
            table.trained_rows = TrainedRows(table.weight, new)
        if self.tables and model.spec.tie_word_embeddings:
            model.lm_head.trained_rows = model.embed_tokens.trained_rows

    def _initialise(self, seed: int) -> None:
        """Give the adapters initial values that do not depend on how the base is held: in quantised bits, or
        sharded.
        """
        seed_generators(seed, self.model.device)
        for module in self.model.modules():
            if isinstance(module, self._peft.tuners.lora.LoraLayer):
                for adapter in module.lora_A:
                    module.reset_lora_parameters(adapter, True)

    def write(self, folder: Path) -> None:
        """Write the adapter as PEFT does, under checkpoint names, to an empty folder, with the generation
        config if the model has learned to end its answers.
        """
        from safetensors.torch import save_file

        tensors = {name: x.detach().cpu() for name, x in self._tensors().items()}
        for names, order in self._orders():
            tensors.update(zip(names, order.write(*(tensors[name] for name in names)), strict=True))
        tensors = {name: x.contiguous() for name, x in tensors.items()}
        save_file(tensors, folder / TENSORS, {"format": "pt"})
        written = self._peft.LoraConfig(**self._options())
        written.inference_mode = True
        written.save_pretrained(str(folder))
        if (generation := self.model.generation_config()) is not None:
            (folder / GENERATION_CONFIG).write_bytes(generation)

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        """Read an adapter with this one's layers, as `write` wrote it.

        Raises:
            CheckpointError: the tensors do not match this model's adapters.
        """
        own = self._tensors()
        with CheckpointReader(folder) as reader:
            found = {name: tuple(info.shape) for name, info in reader.tensors.items()}
            expected = {name: tuple(x.shape) for name, x in own.items()}
            for names, order in self._orders():
                meta = [torch.empty(expected[name], device="meta") for name in names]
                expected.update(
                    (name, tuple(x.shape)) for name, x in zip(names, order.write(*meta), strict=True)
                )
            if found != expected:
                differ = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
                raise CheckpointError(
                    f"{folder / TENSORS}: it differs from this run's adapters in {differ[:3]}: found "
                    f"{found.get(differ[0])}, expected {expected.get(differ[0])}; keep --lora as it was"
                )
            tensors = {name: reader.read(name) for name in own}
        for names, order in self._orders():
            tensors.update(zip(names, order.read(*(tensors[name] for name in names)), strict=True))
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapters into plain layers, by PEFT's own merging. Quantised weights are dequantised, so
        the merged model computes the same function. The model must not be sharded.
        """
        decode_stored(self.model)
        for path in self.names:
            layer: Any = self.model.get_submodule(path)
            layer.base_layer = dequantised(layer.base_layer, self.model.dtype)
            change_class(layer, self._peft.tuners.lora.Linear)
            layer.fan_in_fan_out = layer.is_target_conv_1d_layer = False
            layer.merge(safe_merge=False)
            self.model.set_submodule(path, layer.base_layer)
        for path in {stack.rpartition(".")[0] for stack in self.stacks}:
            wrapper: Any = self.model.get_submodule(path)
            experts = wrapper.unload_and_optionally_merge_module(True, safe_merge=False, adapter_names=None)
            self.model.set_submodule(path, experts)
        for table in self.tables.values():
            table.weight.copy_(table.trained_rows.within(table.weight))
        for owner in (self.model.embed_tokens, self.model.lm_head):
            setattr(owner, "trained_rows", None)  # noqa: B010
        self.model.requires_grad_(True)

    def _options(self) -> dict[str, Any]:
        names = {field.name for field in fields(self._peft.LoraConfig) if field.init}
        return {name: getattr(self.config, name) for name in names}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the adapter tensors by their names in PEFT's files."""
        own = self._peft.get_peft_model_state_dict(self.model, save_embedding_layers=False)
        usual = {}
        for name, tensor in own.items():
            path, point, rest = name.partition(".lora_")
            usual[f"{self._usual_name(path)}{point}{rest}"] = tensor
        for name, table in self.tables.items():
            usual[f"base_model.model.{name}{ROWS}"] = table.trained_rows.weight
        if self.head is not None:
            usual[f"base_model.model.{HEAD}weight"] = self.head.weight
        return usual

    def _usual_name(self, path: str) -> str:
        """Return the name of an adapted layer, or of a wrapper of experts, in PEFT's files."""
        names = {
            stack.rpartition(".")[0]: usual.rpartition(".")[0] for stack, (usual, _) in self.stacks.items()
        }
        path, inner, _ = path.partition(".base_layer")  # the wrapper of an experts' first matrices
        return f"base_model.model.{(names | self.names)[path]}{inner}"

    def _orders(self) -> Iterator[tuple[tuple[str, str], StackOrder]]:
        """Yield the names in files of A and B of stacks that files store in another order, and that order."""
        for path, wrapper in self.model.named_modules():
            stack = f"{path.partition('.base_layer')[0]}.{getattr(wrapper, 'parameter_name', '')}"
            _, order = self.stacks.get(stack, ("", None))
            if order is not None:
                stem = self._usual_name(path)
                yield (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"), order


def import_peft() -> Any:
    """Import PEFT, or raise a ConfigError that says how to install it."""
    # PEFT imports bitsandbytes, which warns of a kernel that it lacks, also where nothing is quantised.
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import peft
    except ImportError as error:
        raise ConfigError("--lora needs PEFT: pip install 'liger_models[lora]'") from error
    finally:
        log.setLevel(level)
    return peft
