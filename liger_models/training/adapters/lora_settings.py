"""Settings of low-rank adapters in a training run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from liger_models.convert.checkpoints.adapter import LowRankAdapter
from liger_models.convert.errors import ConfigError

ALL = "all-linear"
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
                raise ConfigError(f"--lora {text}: {piece!r} is not a setting, or occurs twice; give {FORM}")
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


def check_adapters(config: Any) -> None:
    """Refuse settings of a `TrainConfig` that need adapters, or that adapters cannot have.

    Raises:
        ConfigError: says what, and what to do.
    """
    if config.lora is not None:
        settings = LoraSettings.parse(config.lora)
        if config.shard not in (None, "none"):
            _check_sharded(config, settings)
    elif config.quantize or config.merge or config.keep_quantised or config.weights_memory == "host":
        raise ConfigError("quantize, keep_quantised, merge and weights_memory 'host' require lora")
    if config.weights_memory == "host" and config.quantize == "int8":
        raise ConfigError("weights_memory 'host' takes nf4 and keep_quantised, but int8 stays on the GPU")
    if config.quantize and (config.float8 or config.keep_quantised):
        raise ConfigError("quantize is combined with neither float8 nor keep_quantised; choose one")
    if config.keep_quantised and (config.freeze or config.train_only):
        raise ConfigError(
            "with keep_quantised, freeze and train_only do not choose the layers that get adapters; use "
            "lora's targets"
        )


def _check_sharded(config: Any, settings: LoraSettings) -> None:
    for problem, reason in (
        (
            config.quantize,
            f"quantize {config.quantize!r}, whose weights cannot be sharded; keep_quantised can",
        ),
        (settings.dora, "dora, which needs the norms of whole rows"),
        (config.add_tokens, "add_tokens, whose rows of the embedding are trained whole"),
        (config.objective == "reward", "objective reward, whose head is trained whole"),
    ):
        if problem:
            raise ConfigError(
                f"shard is {config.shard!r}, but lora is combined with {reason}; choose shard 'none', or "
                "omit one of them"
            )
