"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv:2106.09685) in a training run, through PEFT.

PEFT adds its layers to the native model with split projections, and our operation runs them
(layers/projections/low_rank.py). Files are PEFT's, under transformers' names, so any reader of PEFT adapters
can load them. The base weights may be quantised (liger_models/models/quantization.py): QLoRA (Dettmers et
al., 2023, arXiv:2305.14314).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.adapter import PREFIX, ROWS, absolute_if_folder
from liger_models.convert.checkpoints.adapter_forms import AdapterLayers, StackOrder
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.layers.parts.embedding import TrainedRows
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.projections.linear import unwrapped
from liger_models.layers.projections.ternary import check_can_merge
from liger_models.models.causal_lm import GENERATION_CONFIG, LigerCausalLM
from liger_models.models.classifier import HEAD, LigerSequenceClassifier
from liger_models.models.quantization import dequantised
from liger_models.models.stored_weights import decode_stored
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.adapters.lora_targets import find_tables, find_targets, leaf, target_names
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
        self.layers, parameters = find_targets(model, settings, frozen)
        self.stacks: dict[str, tuple[str, StackOrder | None]] = {}
        if settings.experts:
            from liger_models.hf.adapters.expert_lora import stacks_of_experts

            self.stacks = stacks_of_experts(model, frozen)
        self.new, self.tables = new, find_tables(model, self.layers, frozen) if new else {}
        modules = [name for path, own in self.layers.items() if path not in parameters for name in own.rows]
        weights = [f"{name}.weight" for path in parameters for name in self.layers[path].rows]
        self.config = peft.LoraConfig(
            r=settings.r,
            lora_alpha=settings.scaling_alpha,
            lora_dropout=settings.dropout,
            use_dora=settings.dora,
            use_rslora=settings.rslora,
            target_modules=target_names(model, modules),
            target_parameters=sorted(weights) + [name for name, _ in self.stacks.values()] or None,
            fan_in_fan_out=any(own.transposed for own in self.layers.values()),
            task_type="CAUSAL_LM" if self.head is None else "SEQ_CLS",
            modules_to_save=None if self.head is None else [HEAD.removesuffix(".")],
            base_model_name_or_path=absolute_if_folder(base),
            trainable_token_indices={leaf(name): list(new) for name in self.tables} or None,
        )
        model.requires_grad_(False)
        # A list would match suffixes: `layers.0.mlp.down_proj` also ends an encoder layer's name.
        own = {
            "target_modules": "|".join(map(re.escape, self.layers)),
            "fan_in_fan_out": False,
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

        tensors = self._as_in_files({name: x.detach().cpu() for name, x in self._tensors().items()})
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
            shapes = {name: torch.empty(x.shape, device="meta") for name, x in own.items()}
            expected = {name: tuple(x.shape) for name, x in self._as_in_files(shapes).items()}
            if found != expected:
                differ = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
                raise CheckpointError(
                    f"{folder / TENSORS}: it differs from this run's adapters in {differ[:3]}: found "
                    f"{found.get(differ[0])}, expected {expected.get(differ[0])}; keep --lora as it was"
                )
            tensors = {name: reader.read(name) for name in expected}
        for names, order in self._orders():
            tensors.update(zip(names, order.read(*(tensors[name] for name in names)), strict=True))
        for name, kind, layers in self._divided(own):
            parts = {layer: tensors.pop(f"{PREFIX}{layer}.{kind}") for layer in layers.rows}
            tensors[name] = layers.read(kind, parts)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapters into plain layers, by PEFT's own merging. Quantised weights are dequantised, so
        the merged model computes the same function. The model must not be sharded.

        Raises:
            ConfigError: the model rounds its weights, and would round the sums.
        """
        for path in self.layers:
            check_can_merge(unwrapped(self.model.get_submodule(path)))
        decode_stored(self.model)
        for path in self.layers:
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

    def _as_in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of `_tensors` as PEFT's files have them."""
        tensors = {**tensors}
        for names, order in self._orders():
            tensors.update(zip(names, order.write(*(tensors[name] for name in names)), strict=True))
        for name, kind, layers in self._divided(tensors):
            for layer, part in layers.write(kind, tensors.pop(name)).items():
                tensors[f"{PREFIX}{layer}.{kind}"] = part
        return tensors

    def _divided(self, tensors: Iterable[str]) -> Iterator[tuple[str, str, AdapterLayers]]:
        """Yield (name, kind, layers) of the tensors of native layers that files have as other layers."""
        divided = {f"{PREFIX}{path}": own for path, own in self.layers.items() if not own.is_one}
        for name in [*tensors]:
            path, point, kind = name.partition(".lora_")
            if path in divided:
                yield name, f"{point[1:]}{kind}", divided[path]

    def _tensors(self) -> dict[str, Tensor]:
        """Return the adapter tensors by their names in PEFT's files, those of native layers that files have
        as other layers by the native name.
        """
        own = self._peft.get_peft_model_state_dict(self.model, save_embedding_layers=False)
        usual = {}
        for name, tensor in own.items():
            path, point, rest = name.partition(".lora_")
            usual[f"{self._usual_name(path)}{point}{rest}"] = tensor
        for name, table in self.tables.items():
            usual[f"{PREFIX}{name}{ROWS}"] = table.trained_rows.weight
        if self.head is not None:
            usual[f"{PREFIX}{HEAD}weight"] = self.head.weight
        return usual

    def _usual_name(self, path: str) -> str:
        """Return the name of an adapted layer, or of a wrapper of experts, in PEFT's files."""
        names = {
            stack.rpartition(".")[0]: usual.rpartition(".")[0] for stack, (usual, _) in self.stacks.items()
        }
        names |= {path: next(iter(own.rows)) if own.is_one else path for path, own in self.layers.items()}
        path, inner, _ = path.partition(".base_layer")  # the wrapper of an experts' first matrices
        return f"{PREFIX}{names[path]}{inner}"

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
