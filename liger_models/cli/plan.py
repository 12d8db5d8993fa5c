"""`liger-models plan`: whether a training step fits on a GPU, with which levels of activation memory, the
largest batch and the longest context. On any machine: nothing is loaded but config.json.

A row beyond the model's `max_position_embeddings` is counted like any other.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_models.layers.memory_plan import Plan, Step

# Memory that a program can have, in GiB, of GPUs by the names that people know them by: of H200 and H100 as
# their driver says, of the others a little under what their makers state.
GPUS = {
    "B200": 178.0,
    "H200": 139.8,
    "H100": 79.1,
    "A100": 79.1,
    "A100-40GB": 39.4,
    "L40S": 44.4,
    "RTX5090": 31.4,
    "RTX4090": 23.5,
    "T4": 14.6,
}
SHARE = 0.95  # of it that is planned with: the allocator's gaps, workspaces and the driver need the rest
MOST = 1 << 24  # tokens that are looked for
QUANTISED = {"nf4": 0.5 + 4 / 64, "int8": 1.0}  # bytes an element, with a float32 scale for each 64


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "plan", help="whether a training step fits on a GPU, and with what", description=__doc__
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="hub id, checkpoint folder, config.json, or preset")
    add("--gpu", required=True, metavar="GPU", help=f"{', '.join(GPUS)}, or its memory, such as 80GiB")
    add("--batch", type=_positive, default=1, metavar="N", help="rows on a GPU (default: %(default)s)")
    add("--seq", type=_positive, default=4096, metavar="N", help="tokens in a row (default: %(default)s)")
    add("--gpus", type=_positive, default=1, metavar="N", help="that divide the parameters (FSDP2)")
    add("--lora", metavar="r=16", help="as for `train`: adapters of this rank on all linear layers")
    add("--quantize", choices=tuple(QUANTISED), help="of the layers' matrices, beside adapters")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights (%(default)s)")
    add("--weights", choices=("master", "compensated", "stochastic", "plain"), default="master")
    add("--moments", choices=("auto", "float32", "bfloat16"), default="auto", help="see `train --help`")
    add("--accumulate", action="store_true", help="more micro-batches than one in a step")
    add(
        "--activation-memory",
        choices=("auto", "all", "lean", "mlp", "checkpoint", "tiled", "offload"),
        default="auto",
        help="auto: the levels that repeat least among those that fit (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if it does not fit."""
    report = plan(args)
    if args.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0 if report["fits"] else 1


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """All that the command shows, as JSON holds it."""
    from dataclasses import replace

    import torch

    import liger_models
    from liger_models.cli.inspect import find_config
    from liger_models.convert.errors import ConfigError
    from liger_models.layers.activation_memory import LEVELS
    from liger_models.layers.memory_plan import Step, StepMemory, largest
    from liger_models.optim import state_bytes
    from liger_models.training.lora import LoraSettings

    if args.quantize and not args.lora:
        raise ConfigError("--quantize is for --lora: quantised weights are not trained")
    dtype = getattr(torch, args.dtype)
    config = args.name if Path(args.name).is_file() else find_config(args.name)[0]
    model = liger_models.from_config(config, device="meta", dtype=dtype, dropout=0.0)
    rank = LoraSettings.parse(args.lora).r if args.lora else 0
    step = Step(
        args.batch,
        args.seq,
        # Adapters are in float32, and so are the moments of theirs.
        state_bytes(torch.float32 if rank else dtype, args.weights, "auto" if rank else args.moments),
        args.accumulate,
        args.gpus,
        rank,
        QUANTISED[args.quantize] if args.quantize else None,
    )
    memory = int(_gib(args.gpu) * 2**30)
    budget = int(SHARE * memory)

    def planned(step: "Step", level: str) -> "Plan":
        found: StepMemory = StepMemory(model, step)
        if level == "auto":
            return found.choose_levels(budget)
        return found.plan([level] * len(model.layers), budget)  # type: ignore[list-item]

    def most(level: str) -> dict[str, int]:
        rows = largest(lambda n: planned(replace(step, batch=n), level).fits, most=MOST // args.seq)
        tokens = largest(lambda n: planned(replace(step, batch=1, seq=n), level).fits, 256, MOST)
        return {"batch": rows, "context": tokens}

    chosen = planned(step, args.activation_memory)
    return {
        "name": args.name,
        "num_parameters": model.num_parameters(),
        "gpu": args.gpu,
        "gpus": args.gpus,
        "memory": memory,
        "budget": budget,
        "batch": args.batch,
        "seq": args.seq,
        "fits": chosen.fits,
        "levels": list(chosen.levels),
        "summary": str(chosen),
        "peak": chosen.peak,
        "moment": chosen.moment,
        "parts": chosen.parts,
        "repeated": chosen.repeated,
        "by_level": {
            level: {"peak": of_level.peak, "repeated": of_level.repeated, **most(level)}
            for level in LEVELS
            for of_level in [planned(step, level)]
        },
    }


def print_report(report: dict[str, Any]) -> None:
    from liger_models.cli.checkpoints import print_table

    def gib(count: float) -> str:
        return f"{count / 2**30:.1f} GiB"

    gpus = f"each of {report['gpus']} {report['gpu']}" if report["gpus"] > 1 else report["gpu"]
    print(
        f"{report['name']}, {report['num_parameters']:,} parameters: {report['batch']} x {report['seq']} "
        f"tokens on {gpus}, of whose {gib(report['memory'])} {gib(report['budget'])} are planned with\n"
    )
    print("It fits:" if report["fits"] else "It does NOT fit:", report["summary"])
    print(f"\nAt its largest, in {report['moment']}")
    print_table([(name, gib(count)) for name, count in report["parts"].items()] + [("", gib(report["peak"]))])
    print("\nAll layers at one level of --activation-memory")
    rows = [("level", "peak", "work repeated", f"rows of {report['seq']} that fit", "longest row")]
    for level, found in report["by_level"].items():
        fitting = "" if found["peak"] <= report["budget"] else " (does not fit)"
        repeated = f"{found['repeated']:.1%}"
        rows.append(
            (level, gib(found["peak"]) + fitting, repeated, str(found["batch"]), f"{found['context']:,}")
        )
    print_table(rows)


def _gib(gpu: str) -> float:
    from liger_models.convert.errors import ConfigError
    from liger_models.layers.memory_plan import parse_budget

    for name, memory in GPUS.items():
        if gpu.lower() == name.lower():
            return memory
    try:
        count = parse_budget(gpu)[1]
    except ValueError:
        count = None
    if count is None:
        raise ConfigError(
            f"the GPU {gpu!r} is not known; name its memory, such as 80GiB, or {', '.join(GPUS)}"
        )
    return count / 2**30


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value
