"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv:2106.09685) in a training run, through PEFT.

PEFT adds its layers to the native model with split projections, and our operation runs them
(layers/projections/low_rank.py). Files are PEFT's, under transformers' names, so any reader of PEFT adapters
can load them. The base weights may be quantised (liger_models/models/quantization.py): QLoRA (Dettmers et
al., 2023, arXiv:2305.14314).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.adapter import ROWS, LowRankAdapter, absolute_if_folder
from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.layers.parts.embedding import TrainedRows
from liger_models.layers.projections.in_place import change_class
from liger_models.models.causal_lm import GENERATION_CONFIG, LigerCausalLM
from liger_models.models.classifier import HEAD, LigerSequenceClassifier
from liger_models.models.quantization import dequantised
from liger_models.models.stored_weights import decode_stored
from liger_models.training.random_numbers import seed_generators

ALL = "all-linear"
TENSORS = "adapter_model.safetensors"
FORM = "r=16,alpha=2r,targets=all-linear,dropout=0.0[,dora][,rslora][,experts]"


@dataclass(frozen=True)
class LoraSettings:
    """Settings of `--lora r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05,dora`.

    Attributes:
        r: rank of the adapters.
        alpha: numerator of the scale alpha / r. Default: 2 r.
        targets: linear layers to adapt: "all-linear" (all but the head), or suffixes of their names in the
            checkpoint, such as "q_proj", joined by +.
        dropout: on the adapters' input.
        dora: learn a magnitude for each row (Liu et al., 2024, arXiv:2402.09353).
        rslora: scale by alpha / sqrt(r) (Kalajdzievski, 2023, arXiv:2312.03732).
        experts: adapt the stacks of experts, too, with this rank for each expert.
    """

    r: int = 16
    alpha: float | None = None
    targets: str = ALL
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    experts: bool = False

    @classmethod
    def parse(cls, text: str) -> LoraSettings:
        """Parse settings from a string.

        Raises:
            ConfigError: an unknown setting or an invalid value.
        """
        known = {field.name: field.type for field in fields(cls)}
        given: dict[str, Any] = {}
        for piece in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = piece.partition("=")
            if name not in known or name in given or (known[name] == "bool") is bool(equals):
                raise ConfigError(f"--lora {text}: {piece!r} is not a setting, or stands twice; give {FORM}")
            try:
                given[name] = {"r": int, "alpha": float, "dropout": float}.get(name, str)(value)
            except ValueError as error:
                raise ConfigError(f"--lora {text}: {piece!r} is not a number; give {FORM}") from error
            if known[name] == "bool":
                given[name] = True
        settings = cls(**given)
        alpha = settings.scaling_alpha
        if settings.r < 1 or not 0 < alpha < float("inf") or not 0 <= settings.dropout < 1:
            raise ConfigError(
                f"--lora {text}: found r={settings.r}, alpha={alpha}, dropout={settings.dropout}; expected a "
                "rank of 1 or more, an alpha above 0 and a dropout from 0 up to, not including, 1"
            )
        if settings.experts and (settings.dropout or settings.dora):
            raise ConfigError(
                f"--lora {text}: PEFT's adapters of experts have neither dropout nor DoRA; leave out these "
                "settings, or experts"
            )
        return settings

    @classmethod
    def text_of(cls, adapter: LowRankAdapter) -> str:
        """The settings of an adapter's files, as text to parse.

        Raises:
            ConfigError: settings that a run does not have.
        """
        config = adapter.config
        if other := [
            key for key in ("rank_pattern", "layers_to_transform", "exclude_modules") if config.get(key)
        ]:
            raise ConfigError(
                f"{adapter.folder}: {other[0]} is {config[other[0]]!r}, so its layers differ, which "
                "cannot be trained further; merge it (liger-models merge) and train new adapters"
            )
        targets = config.get("target_modules") or []
        named = config.get("target_parameters") or []
        parameters = [name.removesuffix(".weight") for name in named if name.endswith(".weight")]
        listed = adapter.layers() if isinstance(targets, str) else [*targets, *parameters]
        text = f"r={config['r']},alpha={config['lora_alpha']},targets={'+'.join(sorted(listed))}"
        text += f",dropout={config.get('lora_dropout', 0.0)}"
        flags = [name for name in ("dora", "rslora") if config.get(f"use_{name}")]
        flags += ["experts"] if len(parameters) < len(named) else []
        return ",".join([text, *flags])

    @property
    def scaling_alpha(self) -> float:
        return 2 * self.r if self.alpha is None else self.alpha


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
        self.names, parameters = _targets(model, settings, frozen)
        self.stacks: dict[str, str] = {}
        if settings.experts:
            from liger_models.hf.adapters.expert_lora import stacks_of_experts

            self.stacks = stacks_of_experts(model, frozen)
        self.new, self.tables = new, _tables(model, self.names, frozen) if new else {}
        whole = {path: name for path, name in self.names.items() if path not in parameters}
        last = {_leaf(name) for name in whole.values()}
        self.config = peft.LoraConfig(
            r=settings.r,
            lora_alpha=settings.scaling_alpha,
            lora_dropout=settings.dropout,
            use_dora=settings.dora,
            use_rslora=settings.rslora,
            target_modules=sorted(last if settings.targets == ALL else _stated(settings.targets, whole)),
            target_parameters=[f"{name}.weight" for name in parameters.values()] + [*self.stacks.values()]
            or None,
            task_type="CAUSAL_LM" if self.head is None else "SEQ_CLS",
            modules_to_save=None if self.head is None else [HEAD.removesuffix(".")],
            base_model_name_or_path=absolute_if_folder(base),
            trainable_token_indices={_leaf(name): list(new) for name in self.tables} or None,
        )
        model.requires_grad_(False)
        seed_generators(seed, next(model.parameters()).device)
        # A list would match suffixes: `layers.0.mlp.down_proj` also ends an encoder layer's name.
        own = {
            "target_modules": "|".join(map(re.escape, self.names)),
            "target_parameters": [*self.stacks] or None,
            "modules_to_save": None,
            "trainable_token_indices": None,
        }
        here = peft.LoraConfig(**{**self._options(), **own})
        config = model.config
        del model.config  # with it PEFT would take dense layers' names for experts
        try:
            peft.inject_adapter_in_model(here, model)
        finally:
            model.config = config
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

    def write(self, folder: Path) -> None:
        """Write the adapter as PEFT does, under checkpoint names, to an empty folder, with the generation
        config if the model has learned to end its answers.
        """
        from safetensors.torch import save_file

        tensors = {name: x.detach().cpu().contiguous() for name, x in self._tensors().items()}
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
            if found != expected:
                differ = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
                raise CheckpointError(
                    f"{folder / TENSORS}: it differs from this run's adapters in {differ[:3]}: found "
                    f"{found.get(differ[0])}, expected {expected.get(differ[0])}; keep --lora as it was"
                )
            for name, tensor in own.items():
                tensor.copy_(reader.read(name))

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapters into plain layers, by PEFT's own merging. Quantised weights are dequantised, so
        the merged model computes the same function.
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
        names = {stack.rpartition(".")[0]: usual.rpartition(".")[0] for stack, usual in self.stacks.items()}
        names |= self.names
        usual = {}
        for name, tensor in own.items():
            path, point, rest = name.partition(".lora_")
            path, inner, _ = path.partition(".base_layer")  # the wrapper of an experts' first matrices
            usual[f"base_model.model.{names[path]}{inner}{point}{rest}"] = tensor
        for name, table in self.tables.items():
            usual[f"base_model.model.{name}{ROWS}"] = table.trained_rows.weight
        if self.head is not None:
            usual[f"base_model.model.{HEAD}weight"] = self.head.weight
        return usual


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


def _targets(
    model: LigerCausalLM, settings: LoraSettings, frozen: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (native name -> checkpoint name of the layers to adapt, the subset to pass as parameters).

    A tied head is excluded, since an adapter would untie it, and so are frozen parts. Prediction modules are
    adapted only by targets that fit nothing else. The subset are dense MLPs and shared experts whose names
    PEFT would take for stacked experts among its target modules.
    """
    weight_map = model.weight_map()
    named: dict[str, str] = {}
    for path, module in model.named_modules():
        expr = weight_map.get(f"{path}.weight") if isinstance(module, nn.Linear) else None
        if isinstance(expr, Ref):
            named[path] = expr.name.removesuffix(".weight")
    named = {path: name for path, name in named.items() if path not in frozen}
    decoder = {path: name for path, name in named.items() if not path.startswith("mtp.")}
    if settings.targets == ALL:
        named = decoder
    if not named:
        raise ConfigError("lora: no linear layer is left to adapt; freeze fewer layers")
    from liger_models.hf.adapters.expert_adapters import stacks_by_names

    stacks = stacks_by_names(model, {_leaf(name) for name in named.values()})[0]
    parameters = {path: name for path, name in named.items() if _leaf(name) in stacks}
    refused = [path for path in parameters if _is_no_parameter_of_peft(model, path, settings)]
    if settings.targets == ALL:
        if refused:
            warnings.warn(
                f"{len(refused)} layers ({refused[0]}, ...) get no adapter: {_ONLY_AS_PARAMETERS}",
                stacklevel=4,
            )
        named = {path: name for path, name in named.items() if path not in refused and path != "lm_head"}
        return named, {path: name for path, name in parameters.items() if path in named}
    wanted = [target for target in settings.targets.split("+") if target]
    chosen: dict[str, str] = {}
    for target in wanted or [""]:
        fitting = {path: name for path, name in named.items() if f".{name}".endswith(f".{target}")}
        fitting = {path: name for path, name in fitting.items() if path in decoder} or fitting
        if not fitting or not target:
            ends = sorted({_leaf(name) for name in named.values()})
            raise ConfigError(
                f"targets={settings.targets}: no linear layer is called {target!r}; this model has "
                f"{', '.join(ends)}, or give {ALL}"
            )
        if taken := [path for path in fitting if path in refused]:
            raise ConfigError(
                f"targets={settings.targets}: {taken[0]} cannot have this adapter: {_ONLY_AS_PARAMETERS}"
            )
        chosen |= fitting
    named = {path: name for path, name in named.items() if path in chosen}
    return named, {path: name for path, name in parameters.items() if path in named}


def _tables(model: LigerCausalLM, adapted: Collection[str], frozen: Collection[str]) -> dict[str, Any]:
    """The embedding, and a language model's own head, by their names in the checkpoint.

    Raises:
        ConfigError: their rows cannot be trained below adapters.
    """
    weight_map = model.weight_map()
    own = model.tables_of_vocabulary
    tables = own[:1] if model.spec.tie_word_embeddings else own
    if taken := [table for table in tables if table in adapted or table in frozen]:
        raise ConfigError(
            f"add_tokens trains rows of {taken[0]}, which is frozen or has an adapter; leave it out of both"
        )
    if model.spec.head_bias:
        raise ConfigError(
            "add_tokens with lora needs a head without a bias, which PEFT leaves out of a head with trained "
            "rows; train all weights (omit lora)"
        )
    names = {table: next(weight_map[f"{table}.weight"].refs()).name for table in tables}
    return {name.removesuffix(".weight"): model.get_submodule(table) for table, name in names.items()}


def _is_no_parameter_of_peft(model: LigerCausalLM, path: str, settings: LoraSettings) -> bool:
    """Return whether PEFT cannot load this layer's adapter as a parameter adapter."""
    quantised = type(model.get_submodule(path).weight) is not nn.Parameter
    return bool(settings.dropout) or settings.dora or quantised


def _stated(targets: str, whole: Mapping[str, str]) -> list[str]:
    """Return the target patterns of the layers passed to PEFT as modules."""
    last = {_leaf(name) for name in whole.values()}
    return [target for target in targets.split("+") if _leaf(target) in last]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


_ONLY_AS_PARAMETERS = (
    "in models of this type PEFT takes that name for stacks of experts, so such layers can be adapted only "
    "as parameters, which PEFT does without dropout, without DoRA and on weights that are not quantised"
)
