"""A composition: a family, how its batch is laid out, and how its training step is divided."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.recompute import activation_memory
from liger_models.layers.specs import ModelSpec, MoESpec

LEVELS = tuple(level for level in activation_memory.LEVELS if level != "offload")  # which needs a GPU
LAYOUTS = ("rows", "padded", "packed", "positions")
WRAPPERS = ("none", "fsdp", "ddp")
OPTIMIZERS = ("adamw", "sgd")
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """A composition.

    Attributes:
        seed: of weights and documents.
        family: whose tiny config is trained.
        ranks: number of processes.
        wrapper: none, fsdp (`parallelize`) or ddp (torch's DistributedDataParallel).
        replicate, sequence, experts: sizes of `ParallelDims`; the other processes share the parameters.
        level: of activation memory, or "mixed": layers in turn.
        layout: documents as rows of one length, padded rows, rows packed by cu_seqlens, or packed rows whose
            positions start again.
        accumulation: micro-batches in a step.
        lora: train adapters on all linear layers instead of the weights.
        freeze: freeze the first layer.
        optimizer: of the two steps.
    """

    seed: int
    family: str
    ranks: int = 1
    wrapper: str = "none"
    replicate: int = 1
    sequence: int = 1
    experts: int = 1
    level: str = "all"
    layout: str = "rows"
    accumulation: int = 1
    lora: bool = False
    freeze: bool = False
    optimizer: str = "sgd"

    @property
    def readers(self) -> int:
        """Number of processes, or groups of processes, with rows of their own."""
        return self.ranks // self.sequence

    def text(self) -> str:
        """The settings that differ from the simplest composition, as an argument of `parse`."""
        default = {field.name: field.default for field in fields(self)}
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != default[name])


def parse(text: str) -> Case:
    """Parse a composition from `Case.text`.

    Raises:
        ValueError: an unknown name or value.
    """
    kinds = {field.name: type(field.default) for field in fields(Case)} | {"seed": int, "family": str}
    settings: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ValueError(f"found {part!r}; expected {', '.join(f'{known}=...' for known in kinds)}")
        settings[name] = value == "True" if kinds[name] is bool else kinds[name](value)
    case = Case(**settings)
    for name, known in {
        "level": (*LEVELS, "mixed"),
        "layout": LAYOUTS,
        "wrapper": WRAPPERS,
        "optimizer": OPTIMIZERS,
        "ranks": RANKS,
    }.items():
        if getattr(case, name) not in known:
            raise ValueError(
                f"{name} is {getattr(case, name)!r}; expected one of {', '.join(map(str, known))}"
            )
    return case


def text_families() -> list[str]:
    """Families that take only text, and whose routers, if any, are deterministic."""
    names = [name for name in list_architectures() if not find_architecture(name).vision]
    return [name for name in names if not any(_is_random(block.mlp) for block in spec_of(name).blocks)]


def _is_random(mlp: object) -> bool:
    return isinstance(mlp, MoESpec) and mlp.sparse_mixer is not None


def config_of(family: str) -> dict[str, Any]:
    """The family's tiny config without router losses, which are not sums over documents."""
    tiny = dict(find_architecture(family).tiny)
    losses = ("aux_loss", "z_loss")
    return {
        key: 0.0 if any(word in key for word in losses) and value else value for key, value in tiny.items()
    }


def spec_of(family: str) -> ModelSpec:
    return find_architecture(family).spec(HFConfig.load(config_of(family), dropout=0.0))


def draw(seed: int, families: Sequence[str]) -> Case:
    """A random composition; the same for the same seed and families."""
    choose = random.Random(seed)
    family = choose.choice(families)
    ranks = choose.choice(RANKS)
    wrapper = "none" if ranks == 1 else choose.choice(("fsdp", "fsdp", "fsdp", "ddp"))
    sizes = [n for n in (1, 2, 4) if ranks % n == 0]
    sequence = choose.choice(sizes) if wrapper == "fsdp" and choose.random() < 0.4 else 1
    replicate = choose.choice([n for n in sizes if ranks // sequence % n == 0]) if wrapper == "fsdp" else 1
    spec, shards = spec_of(family), ranks // replicate
    counts = [block.mlp.num_experts for block in spec.blocks if isinstance(block.mlp, MoESpec)]
    divisors = [n for n in (1, 2, 4) if shards % n == 0 and not any(count % n for count in counts)]
    experts = choose.choice(divisors) if counts and wrapper == "fsdp" else 1
    layouts = [layout for layout in LAYOUTS if not (layout == "padded" and sequence > 1)]
    lora = choose.random() < 0.25 and experts == 1
    return Case(
        seed,
        family,
        ranks,
        wrapper,
        replicate,
        sequence,
        experts,
        choose.choice((*LEVELS, "mixed")),
        choose.choice(layouts),
        choose.choice((1, 1, 2, 3)),
        lora,
        not lora and choose.random() < 0.2,
        choose.choice(OPTIMIZERS),
    )


def simpler(case: Case) -> list[Case]:
    """Compositions that differ from a case in one respect and are simpler."""
    found = []
    for name, value in {
        "level": "all",
        "layout": "rows",
        "accumulation": 1,
        "lora": False,
        "freeze": False,
        "optimizer": "sgd",
        "experts": 1,
        "replicate": 1,
        "sequence": 1,
        "wrapper": "fsdp",
    }.items():
        if getattr(case, name) != value and not (name == "wrapper" and case.ranks == 1):
            found.append(replace(case, **{name: value}))
    if case.ranks > 1:
        alone = {"wrapper": "none", "replicate": 1, "sequence": 1, "experts": 1}
        found.append(replace(case, ranks=1, **alone))
    if case.ranks == 4 and case.replicate == case.sequence == 1 and case.experts <= 2:
        found.append(replace(case, ranks=2))
    return found
