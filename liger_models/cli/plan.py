"""`liger-models plan`: whether a training step fits on a GPU, the activation memory levels it needs, the
largest batch and the longest context. Runs on any machine and reads only config.json.

Rows longer than the model's `max_position_embeddings` are allowed. Pinned host memory (the level `offload`,
--optimizer-memory host) is counted, too.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_models.cli.shared.gpus import GPUS, find_gpu

if TYPE_CHECKING:
    from liger_models.layers.memory import Plan, Shown, StepMemory
    from liger_models.models.causal_lm import LigerCausalLM

SHARE = 0.95  # of the memory, for the plan: the rest is for fragmentation, workspaces and the driver
MOST = 1 << 24  # upper bound of the search, in tokens
QUANTISED = {"nf4": 0.5 + 4 / 64, "int8": 1.0}  # bytes per element, with a float32 scale per 64 of nf4


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="check whether training fits on a GPU",
        description=__doc__,
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="hub id, checkpoint folder, config.json, or preset")
    add(
        "--gpu",
        metavar="GPU",
        help=f"{', '.join(GPUS)}, or a memory size such as 80GiB (default: the GPU of this machine)",
    )
    add("--batch", type=_positive, default=1, metavar="N", help="rows per GPU (default: %(default)s)")
    add(
        "--seq",
        type=_tokens,
        default=4096,
        metavar="N",
        help="tokens per row (%(default)s); max: as many as fit",
    )
    add(
        "--labels",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="fraction of the tokens with a label (%(default)s)",
    )
    add(
        "--images",
        type=_count,
        default=0,
        metavar="N",
        help="images per row; their tokens count towards --seq",
    )
    add(
        "--image-size",
        type=_size_of_image,
        default=(1024, 1024),
        metavar="HxW",
        help="image size in pixels, after the model's processor has resized it (default: 1024x1024)",
    )
    add("--freeze", default="", metavar="PARTS", help="as for `train`: vision, projector, language")
    add(
        "--gpus",
        type=_positive,
        default=1,
        metavar="N",
        help="number of GPUs that share the parameters (FSDP2)",
    )
    add(
        "--sequence-parallel",
        type=_positive,
        default=1,
        metavar="N",
        help="GPUs that share each row; --batch and --seq are then per group of N",
    )
    add("--lora", metavar="r=16", help="as for `train`: adapters of this rank on all linear layers")
    add("--quantize", choices=tuple(QUANTISED), help="quantise the base matrices below the adapters")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the weights (%(default)s)",
    )
    add("--weights", choices=("master", "compensated", "stochastic", "plain"), default="master")
    add("--moments", choices=("auto", "float32", "bfloat16"), default="auto", help="see `train --help`")
    add(
        "--optimizer-memory",
        choices=("device", "host"),
        default="device",
        help="where the optimizer state is kept (default: %(default)s)",
    )
    add("--host-memory", metavar="SIZE", help="host memory per GPU, such as 256GiB (default: unlimited)")
    add("--accumulate", action="store_true", help="plan for several micro-batches per step")
    add(
        "--activation-memory",
        choices=("auto", "all", "lean", "mlp", "checkpoint", "tiled", "offload"),
        default="auto",
        help="auto: the least recomputation that fits (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit code is 1 if the step does not fit."""
    report = plan(args)
    if args.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0 if report["fits"] else 1


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Everything the command shows, as JSON-serialisable data."""
    from liger_models.convert.errors import ConfigError
    from liger_models.layers.memory import NOTHING, largest, shown_of_size
    from liger_models.layers.recompute.activation_memory import LEVELS

    model = _model(args)
    vision = model.spec.vision
    counted = _step_memory(args, model)
    gpu, memory = find_gpu(args.gpu)
    budget = int(SHARE * memory)
    host_budget = None if args.host_memory is None else _size(args.host_memory)

    height, width = args.image_size

    def shown(rows: int) -> "Shown":
        return NOTHING if vision is None else shown_of_size(vision, args.images, height, width, rows)

    def planned(batch: int, seq: int, level: str) -> "Plan":
        found = counted.resized(batch, seq, shown(batch))
        if level == "auto":
            return found.choose_levels(budget, host_budget)
        return found.plan([level] * len(found.stages), budget, host_budget)  # type: ignore[list-item]

    def longest(batch: int, level: str) -> int:
        return largest(lambda n: planned(batch, n, level).fits, max(256, shown(1).features), MOST)

    of_images = shown(1).features
    if args.seq is not None and args.seq <= of_images:
        raise ConfigError(
            f"--seq {args.seq}: {args.images} images of {height}x{width} pixels "
            f"take {of_images} tokens of {args.name}; pass a larger --seq"
        )
    counted.plan(["all"] * len(counted.stages))  # caches everything independent of the batch
    seq = args.seq or longest(args.batch, args.activation_memory) or 256

    def most(level: str) -> dict[str, int]:
        rows = largest(lambda n: planned(n, seq, level).fits, most=MOST // seq)
        return {"batch": rows, "context": longest(1, level)}

    chosen = planned(args.batch, seq, args.activation_memory)
    return {
        "name": args.name,
        "num_parameters": model.num_parameters(),
        "gpu": gpu,
        "gpus": args.gpus,
        "memory": memory,
        "budget": budget,
        "batch": args.batch,
        "seq": seq,
        "images": args.images,
        "image_tokens": of_images,
        "fits": chosen.fits,
        "levels": list(chosen.levels),
        "encoder_levels": list(chosen.encoder_levels),
        "summary": str(chosen),
        "peak": chosen.peak,
        "moment": chosen.moment,
        "parts": chosen.parts,
        "repeated": chosen.repeated,
        "host": chosen.host,
        "by_level": {
            level: {
                "fits": of_level.fits,
                "peak": of_level.peak,
                "host": of_level.host,
                "repeated": of_level.repeated,
                **most(level),
            }
            for level in LEVELS
            for of_level in [planned(args.batch, seq, level)]
        },
    }


def _model(args: argparse.Namespace) -> "LigerCausalLM":
    """Build the model on the meta device, partly frozen; raises ConfigError for incompatible options."""
    import torch

    import liger_models
    from liger_models.cli.inspect import find_config
    from liger_models.convert.errors import ConfigError
    from liger_models.training.inputs import freeze

    if args.quantize and args.lora is None:
        raise ConfigError("--quantize needs --lora: quantised weights are not trained")
    if args.gpus % args.sequence_parallel:
        raise ConfigError(
            f"--sequence-parallel {args.sequence_parallel} does not divide --gpus {args.gpus}, of which its "
            "GPUs are"
        )
    config = args.name if Path(args.name).is_file() else find_config(args.name)[0]
    dtype = getattr(torch, args.dtype)
    model = liger_models.from_config(config, device="meta", dtype=dtype, dropout=0.0)
    if args.images and model.spec.vision is None:
        raise ConfigError(f"--images {args.images}: {args.name} does not accept images; omit it")
    if args.freeze:
        freeze(model, tuple(args.freeze.split(",")))
    return model


def _step_memory(args: argparse.Namespace, model: "LigerCausalLM") -> "StepMemory":
    """Memory of a step with rows of one token, to be resized."""
    import torch

    from liger_models.layers.memory import Step, StepMemory
    from liger_models.optim.adamw import state_bytes
    from liger_models.optim.host_state import lane_bytes
    from liger_models.training.lora import LoraSettings

    lora = None if args.lora is None else LoraSettings.parse(args.lora)
    rank = 0 if lora is None else lora.r
    # Adapters and their moments are in float32.
    dtype, moments = (torch.float32, "auto") if rank else (getattr(torch, args.dtype), args.moments)
    per_element = state_bytes(dtype, args.weights, moments)
    on_host = args.optimizer_memory == "host"
    return StepMemory(
        model,
        Step(
            args.batch,
            1,
            per_element,
            args.accumulate,
            args.gpus,
            rank,
            lora is not None and lora.dora,
            QUANTISED[args.quantize] if args.quantize else None,
            labels=args.labels,
            sequence_ranks=args.sequence_parallel,
            optimizer_on_host=on_host,
            optimizer_work=lane_bytes(per_element) if on_host else 0,
        ),
    )


def print_report(report: dict[str, Any]) -> None:
    from liger_models.cli.shared.checkpoints import print_table

    def gib(count: float) -> str:
        return f"{count / 2**30:.1f} GiB"

    gpus = f"each of {report['gpus']} {report['gpu']}" if report["gpus"] > 1 else report["gpu"]
    images = ""
    if report["images"]:
        images = f" with {report['images']} images of {report['image_tokens']} tokens together in each row"
    print(
        f"{report['name']}, {report['num_parameters']:,} parameters: {report['batch']} x {report['seq']} "
        f"tokens{images} on {gpus}; the plan may use {gib(report['budget'])} of its {gib(report['memory'])}\n"
    )
    print("It fits:" if report["fits"] else "It does NOT fit:", report["summary"])
    print(f"\nPeak memory, in {report['moment']}")
    print_table([(name, gib(count)) for name, count in report["parts"].items()] + [("", gib(report["peak"]))])
    print("\nAll layers at the same --activation-memory level")
    host = any(found["host"] for found in report["by_level"].values())
    head = ("level", "peak", *["pinned on the host"] * host, "work repeated")
    rows = [(*head, f"rows of {report['seq']} that fit", "longest row")]
    for level, found in report["by_level"].items():
        fitting = "" if found["fits"] else " (does not fit)"
        figures = [gib(found["peak"]) + fitting, *[gib(found["host"])] * host, f"{found['repeated']:.1%}"]
        rows.append((level, *figures, str(found["batch"]), f"{found['context']:,}"))
    print_table(rows)


def _size(text: str) -> int:
    from liger_models.convert.errors import ConfigError
    from liger_models.convert.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--host-memory is {text!r}; expected a size such as 256GiB") from error


def _tokens(text: str) -> int | None:
    """Parse --seq; None means as many as fit."""
    return None if text == "max" else _positive(text)


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, found {text}")
    return value


def _size_of_image(text: str) -> tuple[int, int]:
    height, by, width = text.partition("x")
    if not by or not height.isdecimal() or not width.isdecimal() or not int(height) * int(width):
        raise argparse.ArgumentTypeError(f"expected height and width such as 1024x768, found {text}")
    return int(height), int(width)


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, found {text}")
    return value


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value
