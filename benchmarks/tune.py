"""Alternative tile sizes of our kernels, for finding better constants.

A kernel's file chooses by a constant or by a function of the shape. Both are replaced by name while a
candidate is timed, without the kernels' involvement. Candidates are neighbours of the current choice: one or
two numbers halved or doubled (stages plus or minus one). Adopt a neighbour that wins, and tune again from
there. Results must equal those of the current configuration before it is timed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.bound import Bound, Wrong, check
from benchmarks.measure import Meter, Timing
from benchmarks.operations import Case, Operation
from benchmarks.ops import device_of, matching, shapes_of
from benchmarks.report import machine, markdown_table, publish

SUMMARY = "alternative tile sizes of our kernels; without OP, lists the tunable operations"

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """The constant or function `name` of liger_models.kernels.`module`, whose values have these fields."""

    operations: tuple[str, ...]  # to time
    module: str
    name: str
    fields: tuple[str, ...]
    forward: bool = False  # whether it affects the forward pass, which is then timed
    part: str | None = None  # the member to vary, if the value is a named tuple of several choices

    @property
    def place(self) -> str:
        return ".".join(filter(None, [self.module, self.name, self.part]))

    def numbers(self, value: Any) -> Numbers:
        value = value if self.part is None else getattr(value, self.part)
        return tuple(value) if isinstance(value, tuple) else (value,)

    def value(self, like: Any, numbers: Numbers) -> Any:
        """The numbers in the form of `like`: a number, a tuple, a named tuple or a part of one."""
        if self.part is not None:
            return like._replace(**{self.part: type(getattr(like, self.part))(*numbers)})
        if not isinstance(like, tuple):
            return numbers[0]
        return type(like)(*numbers) if hasattr(like, "_fields") else numbers


_NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
_ROTARY = ("rotary_qkv", "rotary", "rotary_multi_axis")
_NORM_ROTARY = ("norm_rotary_qkv", "norm_rotary_qkv_all_heads")
_DIVERGENCES = ("kl_div", "generalized_jsd", "total_variation")
_ATTENTION = ("attention", "attention_packed", "attention_window", "attention_softcap", "attention_sinks")
_HEAD_LOSSES = ("linear_cross_entropy", "linear_cross_entropy_75_ignored")
_MATRIX = ("block_m", "block_n", "block_k", "warps", "stages")
_MATRIX_ROWS = ("block_n", "block_k", "warps", "stages", "programs a SM")
_LANES = ("lanes", "depth")
_HEAD_ROWS = ("q_rows", "k_rows", "warps")
_SCORES = ("queries", "keys", "warps", "stages")

CHOICES = (
    Choice(_NORMS, "norms._norm_kernels", "_forward_config", ("rows", "warps"), forward=True),
    Choice(_NORMS, "norms._norm_kernels", "_backward_config", ("rows", "warps", "stages", "programs a SM")),
    Choice(_ROTARY, "rotary.rotary", "_TILE", ("pairs", "warps")),
    Choice(_NORM_ROTARY, "rotary.qk_norm_rotary", "_forward_config", _HEAD_ROWS, forward=True),
    Choice(
        _NORM_ROTARY,
        "rotary.qk_norm_rotary",
        "_backward_config",
        (*_HEAD_ROWS, "programs a SM", "stages"),
    ),
    Choice(("swiglu", "geglu"), "activations.gated", "_TILE", ("elements", "warps")),
    Choice(("softmax",), "activations.softmax", "_FORWARD_TILE", _LANES, forward=True),
    Choice(("softmax",), "activations.softmax", "_BACKWARD_TILE", _LANES),
    Choice(("softmax",), "activations.softmax", "_LEAST_ELEMENTS", ("elements",)),
    Choice(("cross_entropy",), "losses._cross_entropy_kernels", "_LOSS_TILE", _LANES, forward=True),
    Choice(("cross_entropy",), "losses._cross_entropy_kernels", "_BACKWARD_BLOCK", ("block",)),
    Choice(_HEAD_LOSSES, "losses._cross_entropy_kernels", "_GRADIENT_TILE", _LANES),
    Choice(("kl_div",), "losses._divergence_kernels", "_KL_TILE", _LANES, forward=True),
    Choice(
        ("generalized_jsd", "total_variation"),
        "losses._divergence_kernels",
        "_FORWARD_TILE",
        _LANES,
        forward=True,
    ),
    Choice(_DIVERGENCES, "losses._divergence_kernels", "_BACKWARD_BLOCK", ("block",)),
    Choice(("linear_kl",), "losses._divergence_kernels", "_KL_TILE", _LANES),
    Choice(("linear_jsd",), "losses._divergence_kernels", "_FORWARD_TILE", _LANES),
    Choice(("linear_cosine_distillation",), "losses._cosine_rows", "_COSINE_BLOCK", ("block",)),
    Choice(("linear_log_probs",), "losses._score_rows", "_SCORE_TILE", _LANES, forward=True),
    Choice(("linear_log_probs",), "losses._score_rows", "_BACKWARD_BLOCK", ("block",)),
    Choice(("route",), "experts.moe_routing", "_ELEMENTS", ("elements",)),
    Choice(("moe_experts",), "experts._expert_order", "_block_rows", ("block_m",)),
    Choice(
        ("moe_experts",),
        "experts._grouped_products",
        "_rows_config",
        _MATRIX_ROWS,
    ),
    Choice(("moe_experts",), "experts._grouped_products", "_weight_config", _MATRIX),
    Choice(_ATTENTION, "attention.flash_attention", "_configuration", _SCORES, forward=True, part="forward"),
    Choice(_ATTENTION, "attention.flash_attention", "_configuration", _SCORES, part="query_gradient"),
    Choice(_ATTENTION, "attention.flash_attention", "_configuration", _SCORES, part="key_value_gradient"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", metavar="OP", help="an operation of `ops`, or a pattern")
    parser.add_argument("--shape", action="append", help="repeatable; default: those of `ops`")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one shape per operation, fewer repeats")


def run(args: argparse.Namespace) -> int:
    if args.op is None:
        print(_listing())
        return 0
    device, dtype = device_of(args.device), getattr(torch, args.dtype)
    parts, rows = [f"{machine(device)}; {args.dtype}."], []
    try:
        work = _work(args, device)
        meter = Meter(device, args.quick)
        for operation, shape, choice in work:
            torch.manual_seed(0)
            trials = tune(choice, operation.build(shape, dtype, device), dtype, meter)
            title = f"{operation.name} {'x'.join(map(str, shape))}: {choice.place}"
            parts.append(f"{title}\n\n{_table(choice, trials) if trials else 'Not used at this shape.'}")
            rows += [{"operation": title, **trial.record(choice)} for trial in trials]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    publish(args.out, "tune", "\n\n".join(parts), rows)
    return 0


def _work(args: argparse.Namespace, device: torch.device) -> list[tuple[Operation, tuple[int, ...], Choice]]:
    work = [
        (operation, shape, choice)
        for operation in matching([args.op])
        for shape in shapes_of(operation, args, device)
        for choice in CHOICES
        if operation.name in choice.operations
    ]
    if not work:
        raise ValueError(
            f"{args.op} has no tunable tile sizes; `tune` without OP lists the operations that have"
        )
    return work


@dataclass
class Trial:
    """One configuration: time of the operation, or the reason why it was not measured."""

    numbers: Numbers
    chosen: bool = False
    timing: Timing | None = None
    note: str = ""

    def record(self, choice: Choice) -> dict[str, object]:
        timing = {f"ms_{part}": getattr(self.timing, part, None) for part in ("median", "low", "high")}
        fields = dict(zip(choice.fields, self.numbers, strict=True))
        return {**fields, **timing, "chosen": self.chosen, "note": self.note}


def tune(choice: Choice, case: Case, dtype: torch.dtype, meter: Meter) -> list[Trial]:
    """Time the current choice and its neighbours; fastest first. No trials if the case does not use it.

    Raises ValueError if the kernels do not run.
    """
    from liger_models.kernels._dispatch import use_triton

    if not use_triton(case.leaves[0]):
        raise ValueError(f"the kernels do not run on a {meter.device.type} in {dtype}; tuning needs a GPU")
    bound = Bound(case, case.provider("ours"), meter.copies(sum(t.nbytes for t in case.leaves)))
    with _recorded(choice) as values:
        expected = bound.results()
    if not values:
        return []
    value, _ = Counter(values).most_common(1)[0]
    numbers = choice.numbers(value)
    trials = [Trial(numbers, chosen=True)]
    trials += [Trial(neighbour) for neighbour in neighbours(choice.fields, numbers)]
    restore = bound.restore if bound.altered() else None
    for trial in trials:
        # The current choice runs unmodified: a function may choose differently for several launches.
        other = None if trial.chosen else choice.value(value, trial.numbers)
        with _recorded(choice) if trial.chosen else _replaced(choice, other):
            try:
                bound.restore()
                check(bound.results(), expected, dtype)
                bound.restore()
                call = bound.forward if choice.forward else bound.train
                sustained = bool(case.training.flops)
                trial.timing = meter.time(call, len(bound.sets), restore, sustained=sustained)
            except Wrong as error:
                trial.note = str(error)
            except Exception as error:
                trial.note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
        found = f"{trial.timing.median:.4f} ms" if trial.timing else trial.note
        print(f"{choice.place} {'x'.join(map(str, trial.numbers))}: {found}", file=sys.stderr, flush=True)
    return sorted(trials, key=lambda trial: trial.timing.median if trial.timing else float("inf"))


def neighbours(fields: tuple[str, ...], numbers: Numbers) -> list[Numbers]:
    """All that differ by one step in one or two fields; no number below one, no more than 32 warps."""

    def steps(field: str, number: int) -> list[int]:
        others = [number - 1, number + 1] if field == "stages" else [number // 2, number * 2]
        return [n for n in others if n >= 1 and (field != "warps" or n <= 32)]

    others = [steps(field, number) for field, number in zip(fields, numbers, strict=True)]
    found = []
    for count in (1, 2):
        for places in itertools.combinations(range(len(numbers)), count):
            for values in itertools.product(*(others[place] for place in places)):
                changed = list(numbers)
                for place, n in zip(places, values, strict=True):
                    changed[place] = n
                found.append(tuple(changed))
    return found


def _module(choice: Choice) -> ModuleType:
    return importlib.import_module(f"liger_models.kernels.{choice.module}")


@contextmanager
def _replaced(choice: Choice, value: Any) -> Iterator[None]:
    """Make the kernel's file choose `value`; a callable replaces its function."""
    module = _module(choice)
    original = getattr(module, choice.name)
    if callable(original) and not callable(value):
        constant = value
        value = lambda *args, **options: constant  # noqa: E731
    setattr(module, choice.name, value)
    try:
        yield
    finally:
        setattr(module, choice.name, original)


@contextmanager
def _recorded(choice: Choice) -> Iterator[list[Any]]:
    """Record the chosen values; a constant counts as chosen once."""
    original = getattr(_module(choice), choice.name)
    values: list[Any] = [] if callable(original) else [original]

    def record(*args: Any, **options: Any) -> Any:
        values.append(original(*args, **options))
        return values[-1]

    with _replaced(choice, record if callable(original) else original):
        yield values


def _table(choice: Choice, trials: list[Trial]) -> str:
    (chosen,) = (trial for trial in trials if trial.chosen)
    lines = []
    for trial in trials:
        cells = [trial.note, "", ""]
        if trial.timing is not None:
            share = f"{trial.timing.median / chosen.timing.median:.3f}" if chosen.timing else ""
            spread = f"{trial.timing.low:.4f} to {trial.timing.high:.4f}"
            cells = [f"{trial.timing.median:.4f}", spread, share]
        lines.append([*map(str, trial.numbers), *cells, "chosen" if trial.chosen else ""])
    pass_ = "forward" if choice.forward else "forward and backward"
    return markdown_table([*choice.fields, f"ms, {pass_}", "spread", "of the chosen", ""], lines)


def _listing() -> str:
    lines = []
    for choice in CHOICES:
        value = getattr(_module(choice), choice.name)
        now = "by shape" if callable(value) else str(value)
        lines.append([", ".join(choice.operations), choice.place, ", ".join(choice.fields), now])
    return markdown_table(["operations", "chosen by", "fields", "now"], lines)
