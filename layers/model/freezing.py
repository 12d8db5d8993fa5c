"""Training some parameters of a model, chosen by the names that checkpoints use.

    freeze(model, weight_map, ["embed_tokens", "layers.0-15"])          # train all others
    freeze(model, weight_map, train_only=["lm_head", "layers.3?.mlp"])

A pattern is a glob (`*`, `?`, `[0-7]`) over a tensor's name, or over any part of it between dots; `0-15`
between dots is each number of that range. The parts of a vision-language model ("vision", "projector",
"language") are patterns, too, and so is "mtp", the modules for multi-token prediction.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from liger_models.convert.checkpoints.expressions import Expr
from liger_models.layers.projections.packed_linear import PackedLinear

WIDEST = 10_000  # numbers in a range


def freeze(
    model: nn.Module,
    weight_map: Mapping[str, Expr],
    patterns: Sequence[str] = (),
    train_only: Sequence[str] = (),
    *,
    parts: Mapping[str, Sequence[nn.Module]],
    tied: str | None = None,
) -> None:
    """Freeze the parameters that match a pattern, and train all others; with `train_only`, only those that
    match one of these. Modules with `untrained`, which no loss reaches, stay frozen.

    Args:
        weight_map: the checkpoint names of the model's parameters. Others have their own names.
        parts: modules by the name of their part.
        tied: checkpoint name of a head that is tied to the embedding.

    Raises:
        ValueError: a pattern that matches nothing, or only some of the tensors that form one parameter.
    """
    names = _names(model, weight_map)
    trained = _trained(model, names, patterns, train_only, parts, tied)
    for native in names:
        chosen = [name for name in names[native] if name in trained]
        if chosen and len(chosen) < len(names[native]):
            raise ValueError(_partly(model, native, names[native], chosen))
    for native, parameter in model.named_parameters():
        parameter.requires_grad_(names[native][0] in trained)
    for module in model.modules():
        if getattr(module, "untrained", False):
            module.requires_grad_(False)


def divides_projections(
    model: nn.Module,
    weight_map: Mapping[str, Expr],
    patterns: Sequence[str] = (),
    train_only: Sequence[str] = (),
    **options: Any,
) -> bool:
    """Whether these arguments of `freeze` separate the tensors of a packed projection.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    names = _names(model, weight_map)
    trained = _trained(model, names, patterns, train_only, **options)
    return any(
        isinstance(_owner(model, native), PackedLinear) and 0 < len(trained.intersection(own)) < len(own)
        for native, own in names.items()
    )


def _names(model: nn.Module, weight_map: Mapping[str, Expr]) -> dict[str, list[str]]:
    """Checkpoint names of each parameter."""
    return {
        native: list(dict.fromkeys(ref.name for ref in weight_map[native].refs()))
        if native in weight_map
        else [native]
        for native, _ in model.named_parameters()
    }


def _trained(
    model: nn.Module,
    names: Mapping[str, list[str]],
    patterns: Sequence[str],
    train_only: Sequence[str],
    parts: Mapping[str, Sequence[nn.Module]],
    tied: str | None = None,
) -> set[str]:
    """Checkpoint names of the trained tensors."""
    held = [(part, list(m.parameters())) for part, modules in parts.items() for m in modules]
    # In transformers' own model an encoder may be within its projector's module: the inner module decides.
    inner_last = sorted(held, key=lambda own: (-len(own[1]), own[0] != "projector"))
    part_of = {id(p): part for part, parameters in inner_last for p in parameters}
    of_part: dict[str, set[str]] = {part: set() for part in parts}
    for native, parameter in model.named_parameters():
        if id(parameter) in part_of:
            of_part[part_of[id(parameter)]].update(names[native])
    every = {name for own in names.values() for name in own}

    def matched(patterns: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for pattern in patterns:
            regex = _compiled(pattern)
            hits = of_part.get(pattern) or {name for name in every if regex.fullmatch(name)}
            if not hits:
                raise ValueError(_unmatched(pattern, every, parts, tied))
            found |= hits
        return found

    return (matched(train_only) if train_only else every) - matched(patterns)


def _compiled(pattern: str) -> re.Pattern[str]:
    globs = [fnmatch.translate(one)[:-2] for one in _expanded(pattern)]  # without the anchor of the end
    return re.compile(rf"(?:.*\.)?(?:{'|'.join(globs)})(?:\..*)?", re.DOTALL)


def _expanded(pattern: str) -> list[str]:
    """The pattern with each number of its ranges."""
    found = re.search(r"(?:^|(?<=\.))(\d+)-(\d+)(?=\.|$)", pattern)
    if found is None:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + WIDEST:
        raise ValueError(f"{pattern!r} has the range {found[0]}; expected the smaller number first")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [one for number in range(first, last + 1) for one in _expanded(f"{before}{number}{after}")]


def _unmatched(pattern: str, names: Iterable[str], parts: Mapping[str, Any], tied: str | None) -> str:
    if tied is not None and _compiled(pattern).fullmatch(tied):
        return f"{pattern!r} is the head, which is tied to the embedding in this model: name the embedding"
    kinds = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})
    runs = dict.fromkeys(parts)
    for kind in kinds:
        pieces = kind.split(".")
        ends = range(1, len(pieces) + 1)
        runs |= dict.fromkeys(".".join(pieces[i:j]) for j in ends for i in range(j))
    numberless = re.sub(r"(?<=\.)(\d+(-\d+)?|\[[\d-]*\])(?=\.|$)", "*", pattern)
    near = difflib.get_close_matches(numberless, runs, 4, 0.5)
    return (
        f"no tensor matches {pattern!r}; "
        + (f"near names are {', '.join(near)}" if near else f"expected names such as {', '.join(kinds[:4])}")
        + " (* is a number)"
        + (f", or a part of the model: {', '.join(parts)}" if len(parts) > 1 else "")
    )


def _partly(model: nn.Module, native: str, names: Sequence[str], trained: Sequence[str]) -> str:
    other = next(name for name in names if name not in trained)
    advice = (
        "load it with projections='split' (or call model.split_projections()) to train them apart"
        if isinstance(_owner(model, native), PackedLinear)
        else "freeze or train all of them"
    )
    return (
        f"{trained[0]} is trained and {other} is not, but the model has both in one parameter, {native}: "
        f"{advice}"
    )


def _owner(model: nn.Module, native: str) -> nn.Module:
    return model.get_submodule(native.rpartition(".")[0])
