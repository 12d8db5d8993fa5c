"""`liger-models plan`: show whether a training step fits on a GPU, the activation memory levels it needs, the
largest batch and the longest context. Runs on any machine and reads only config.json.

It takes the options of `train`, --config included. Rows longer than the model's `max_position_embeddings` are
allowed. Pinned host memory (the level `offload`, --optimizer-memory host) is counted, too.
"""

import argparse
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_models.cli.shared import arguments
from liger_models.cli.shared.config_file import add_config
from liger_models.cli.shared.gpus import GPUS, limits_of, sharding_of
from liger_models.cli.shared.train_options import add_train_options

if TYPE_CHECKING:
    from liger_models.layers.memory import Plan, Shown, StepMemory
    from liger_models.models.causal_lm import LigerCausalLM

MOST = 1 << 24  # upper bound of the search, in tokens
# Bytes per element. A block of 64 has a scale of one byte, and 256 scales one in float32.
QUANTISED = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}


# Options that `train` has, too, with the same meaning.
OF_TRAIN = (
    *("model", "base", "tokenizer", "text_only", "freeze", "train_only", "seq_len", "batch_size"),
    *("gradient_accumulation", "lora", "quantize", "dtype", "optimizer", "weights", "moments"),
    *("keep_quantised", "optimizer_memory", "weights_memory", "activation_memory", "memory_budget", "shard"),
    *("sequence_parallel", "mtp", "float8"),
)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="check whether training fits on a GPU",
        usage="liger-models plan MODEL [--gpu GPU] [--batch-size N] [--seq-len N] [options]",
        description=__doc__,
    )
    add = parser.add_argument
    add(
        "--gpu",
        metavar="GPU",
        help=f"{', '.join(GPUS)}, or a memory size such as 80GiB (default: the GPU of this machine)",
    )
    add(
        "--gpus",
        type=arguments.positive,
        default=1,
        metavar="N",
        help="number of GPUs, which share the parameters as --shard says (default: %(default)s)",
    )
    text = "fraction of the tokens with a label (%(default)s)"
    add("--labels", type=arguments.share, default=1.0, metavar="SHARE", help=text)
    text = "images per row; their tokens count towards --seq-len"
    add("--images", type=arguments.count, default=0, metavar="N", help=text)
    add(
        "--image-size",
        type=arguments.size_of_image,
        default=(1024, 1024),
        metavar="HxW",
        help="image size in pixels, after the model's processor has resized it (default: 1024x1024)",
    )
    text = "audio clips per row; their tokens count towards --seq-len"
    add("--sounds", type=arguments.count, default=0, metavar="N", help=text)
    text = "length of an audio clip in seconds (default: 30)"
    add("--sound-length", type=arguments.positive, default=30, metavar="SECONDS", help=text)
    text = "with --sequence-parallel: recurrent layers pass states instead of exchanging heads"
    add("--pass-states", action="store_true", help=text)
    add("--host-memory", metavar="SIZE", help="host memory per GPU, such as 256GiB (default: unlimited)")
    add("--json", action="store_true", help="print JSON")
    add("--picture", type=Path, metavar="FILE.svg", help="also draw the parts of the peak, for each level")
    train = argparse.ArgumentParser(add_help=False)
    add_train_options(train)
    group = parser.add_argument_group("as for `train`")
    for action in train._actions:
        if action.dest in OF_TRAIN:
            (group if action.option_strings else parser)._add_action(copy.copy(action))
    add_config(group, train)
    own = {action.dest: action for action in parser._actions}
    own["seq_len"].type = arguments.tokens
    own["seq_len"].help = "tokens per row (default: %(default)s); max: as many as fit"
    own["activation_memory"].help = "auto: the least recomputation that fits (default: auto; `train`: lean)"
    own["activation_memory"].default = "auto"
    own["batch_size"].type = own["gradient_accumulation"].type = own["sequence_parallel"].type = (
        arguments.positive
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit code is 1 if the step does not fit."""
    report = plan(args)
    if args.picture:
        from liger_models.pictures.plan import write_plan

        write_plan(report, args.picture)
    if args.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0 if report["fits"] else 1


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Everything the command shows, as JSON-serialisable data."""
    from liger_models.layers.memory import NOTHING, heard_of_length, largest, shown_of_size
    from liger_models.layers.recompute.activation_memory import LEVELS

    limits_of(args)  # or raise, before the model is built
    model = _model(args)  # and --lora, where an adapter is planned
    gpu, memory, budget, host_budget = limits_of(args)
    vision, audio = model.spec.vision, model.spec.audio
    counted = _step_memory(args, model)
    height, width = args.image_size

    def shown(rows: int) -> "Shown":
        return NOTHING if vision is None else shown_of_size(vision, args.images, height, width, rows)

    def heard(rows: int) -> "Shown":
        return NOTHING if audio is None else heard_of_length(audio, args.sounds, args.sound_length, rows)

    def planned(batch: int, seq: int, level: str) -> "Plan":
        found = counted.resized(batch, seq, shown(batch), heard(batch))
        if level == "auto":
            return found.choose_levels(budget, host_budget)
        return found.plan([level] * len(found.stages), budget, host_budget)  # type: ignore[list-item]

    def longest(batch: int, level: str) -> int:
        return largest(lambda n: planned(batch, n, level).fits, max(256, features), MOST)

    of_images, of_sounds = shown(1).features, heard(1).features
    features = of_images + of_sounds
    _check_row(args, of_images, of_sounds)
    counted.plan(["all"] * len(counted.stages))  # caches everything independent of the batch
    seq = args.seq_len or longest(args.batch_size, args.activation_memory) or 256

    def most(level: str) -> dict[str, int]:
        rows = largest(lambda n: planned(n, seq, level).fits, most=MOST // seq)
        return {"batch_size": rows, "seq_len": longest(1, level)}

    chosen = planned(args.batch_size, seq, args.activation_memory)
    return {
        "model": args.model,
        "num_parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "gpu": gpu,
        "gpus": args.gpus,
        "memory": memory,
        "budget": budget,
        "batch_size": args.batch_size,
        "seq_len": seq,
        "images": args.images,
        "image_tokens": of_images,
        "sounds": args.sounds,
        "sound_tokens": of_sounds,
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
                "parts": of_level.parts,
                "host": of_level.host,
                "repeated": of_level.repeated,
                **most(level),
            }
            for level in LEVELS
            for of_level in [planned(args.batch_size, seq, level)]
        },
    }


def _check_row(args: argparse.Namespace, of_images: int, of_sounds: int) -> None:
    """Refuse rows that images and sounds of these numbers of tokens fill.

    Raises:
        ConfigError: no room for text.
    """
    from liger_models.convert.errors import ConfigError

    if args.seq_len is None or args.seq_len > of_images + of_sounds:
        return
    height, width = args.image_size
    images = [f"{args.images} images of {height}x{width} pixels"] if of_images else []
    sounds = [f"{args.sounds} sounds of {args.sound_length} seconds"] if of_sounds else []
    raise ConfigError(
        f"--seq-len {args.seq_len}: {' and '.join(images + sounds)} take {of_images + of_sounds} tokens of "
        f"{args.model}; pass a larger --seq-len"
    )


def _model(args: argparse.Namespace) -> "LigerCausalLM":
    """Build the model on the meta device, partly frozen; raises ConfigError for incompatible options."""
    import torch

    import liger_models
    from liger_models.cli.headers import keep_quantised
    from liger_models.convert.errors import ConfigError
    from liger_models.models.float8 import set_float8
    from liger_models.training.trained_part import freeze, split_patterns

    config = _config(args)
    if args.quantize and args.lora is None:
        raise ConfigError("--quantize needs --lora: quantised weights are not trained")
    if args.gpus % args.sequence_parallel:
        raise ConfigError(
            f"--sequence-parallel {args.sequence_parallel} does not divide --gpus {args.gpus}; give a divisor"
        )
    if args.pass_states and args.sequence_parallel == 1:
        raise ConfigError("--pass-states needs --sequence-parallel: one GPU has no other to pass states to")
    _check_config_file(args)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    if dtype == "auto" and _is_preset(args.model):
        dtype = torch.bfloat16  # on a GPU
    options: dict[str, Any] = {"dropout": 0.0, "text_only": args.text_only, "mtp": bool(args.mtp)}
    model = liger_models.from_config(config, device="meta", dtype=dtype, **options)
    if model.dtype == torch.float16:
        raise ConfigError(f"{args.model} is in float16, which `train` refuses; choose --dtype bfloat16")
    if args.images and model.spec.vision is None:
        raise ConfigError(f"--images {args.images}: {args.model} does not accept images; omit it")
    if args.sounds and model.spec.audio is None:
        raise ConfigError(f"--sounds {args.sounds}: {args.model} does not accept sounds; omit it")
    if args.keep_quantised:
        keep_quantised(args, model)
    freeze(model, split_patterns(args.freeze), split_patterns(args.train_only))
    if args.float8:
        set_float8(model, args.float8)
    return model


def _config(args: argparse.Namespace) -> Any:
    """The model's config. An adapter's settings take the place of --lora, as in `train`."""
    from liger_models.cli.inspect import find_config
    from liger_models.convert.checkpoints.adapter import LowRankAdapter
    from liger_models.convert.checkpoints.hub import ADAPTER_CONFIG, latest_in_run, local_path
    from liger_models.presets import preset
    from liger_models.training.adapters.lora_settings import LoraSettings
    from liger_models.training.text.tokenizer import TextTokenizer

    name = str(latest_in_run(args.model))
    if Path(name).is_file():
        return name
    if _is_preset(name) and args.tokenizer:
        tokenizer = TextTokenizer(local_path(args.tokenizer))
        return preset(name, vocab_size=tokenizer.vocab_size)
    if (local_path(name) / ADAPTER_CONFIG).is_file():
        adapter = LowRankAdapter.open(local_path(name), args.base)
        adapter.resolve_base()
        args.lora, name = LoraSettings.text_of(adapter), adapter.base
    return find_config(name)[0]


def _is_preset(name: str) -> bool:
    from liger_models.presets import PRESETS

    return name in PRESETS and not Path(name).exists()


def _check_config_file(args: argparse.Namespace) -> None:
    """Refuse settings of a run that a plan does not count.

    Raises:
        ConfigError: there are such settings.
    """
    from liger_models.convert.errors import ConfigError

    settings = getattr(args, "of_config", {})
    if settings.get("objective") in ("distill", "grpo"):
        raise ConfigError(
            f"objective {settings['objective']} also takes memory for another model or for sampling, which "
            "a plan does not count; expected one of the other objectives"
        )
    if settings.get("expert_parallel", 1) > 1:
        raise ConfigError(f"expert_parallel is {settings['expert_parallel']}; a plan counts 1 only")
    if args.shard == "hybrid":
        raise ConfigError("--shard hybrid: plan one node, with --gpus of a node and --shard full")


def _step_memory(args: argparse.Namespace, model: "LigerCausalLM") -> "StepMemory":
    """Memory of a step with rows of one token, to be resized."""
    import torch

    from liger_models.layers.memory import Step, StepMemory
    from liger_models.models.float8 import copied_bytes
    from liger_models.optim.host_state import lane_bytes
    from liger_models.training.adapters.lora_settings import LoraSettings
    from liger_models.training.optimizer import optimizer_memory

    lora = None if args.lora is None else LoraSettings.parse(args.lora)
    rank = 0 if lora is None else lora.r
    # Adapters and their moments are in float32.
    dtype, moments = (torch.float32, "auto") if rank else (model.dtype, args.moments)
    shard = sharding_of(args)
    _check_optimizer(args)
    of_optimizer = args.optimizer, dtype, args.weights or "master", moments, rank
    per_element, work = optimizer_memory(model, *of_optimizer)
    on_host = args.optimizer_memory == "host"
    whole = shard == "none" or args.gpus == 1
    casts_once = args.gradient_accumulation > 1 and whole and args.activation_memory != "auto"
    return StepMemory(
        model,
        Step(
            batch=args.batch_size,
            seq=1,
            optimizer_bytes=per_element,
            accumulates=args.gradient_accumulation > 1,
            gpus=1 if shard == "none" else args.gpus,
            lora_rank=rank,
            lora_experts=lora is not None and lora.experts,
            dora=lora is not None and lora.dora,
            weight_bytes=QUANTISED[args.quantize] if args.quantize else None,
            labels=args.labels,
            sequence_ranks=args.sequence_parallel,
            pass_states=args.pass_states,
            optimizer_on_host=on_host,
            optimizer_work=lane_bytes(per_element) if on_host else work,
            weights_on_host=args.weights_memory == "host",
            float8_copies=copied_bytes(model) if casts_once else 0,
        ),
    )


def _check_optimizer(args: argparse.Namespace) -> None:
    """Raise ConfigError for settings of AdamW's with another optimizer."""
    from liger_models.convert.errors import ConfigError
    from liger_models.optim.library import LIBRARY_WEIGHTS

    if args.optimizer in ("muon", "muon_heads") and args.lora is not None:
        raise ConfigError(
            f"--optimizer {args.optimizer} trains no adapters; omit --lora, or choose another optimizer"
        )
    known = args.weights in (None, *LIBRARY_WEIGHTS)
    if args.optimizer != "adamw" and not (
        known and args.moments == "auto" and args.optimizer_memory == "device"
    ):
        raise ConfigError(
            f"--optimizer {args.optimizer} takes --weights {' or '.join(LIBRARY_WEIGHTS)}, and neither "
            "--moments nor --optimizer-memory; omit them, or choose adamw"
        )


def print_report(report: dict[str, Any]) -> None:
    from liger_models.cli.shared.checkpoints import print_table

    def gib(count: float) -> str:
        return f"{count / 2**30:.1f} GiB"

    gpus = f"each of {report['gpus']} {report['gpu']}" if report["gpus"] > 1 else report["gpu"]
    shown = [(report["images"], "images", "image_tokens"), (report["sounds"], "sounds", "sound_tokens")]
    media = [f"{count} {kind} of {report[size]} tokens together" for count, kind, size in shown if count]
    images = f" with {' and '.join(media)} in each row" if media else ""
    print(
        f"{report['model']}, {report['num_parameters']:,} parameters in {report['dtype']}: "
        f"{report['batch_size']} x {report['seq_len']} tokens{images} on {gpus}; the plan may use "
        f"{gib(report['budget'])} of its {gib(report['memory'])}\n"
    )
    print("It fits:" if report["fits"] else "It does NOT fit:", report["summary"])
    print(f"\nPeak memory, during {report['moment']}:")
    print_table([(name, gib(count)) for name, count in report["parts"].items()] + [("", gib(report["peak"]))])
    print("\nIf all layers have the same --activation-memory level:")
    host = any(found["host"] for found in report["by_level"].values())
    head = ("level", "peak", *["pinned on the host"] * host, "recomputation")
    rows = [(*head, f"rows of {report['seq_len']} that fit", "longest row")]
    for level, found in report["by_level"].items():
        fitting = "" if found["fits"] else " (does not fit)"
        figures = [gib(found["peak"]) + fitting, *[gib(found["host"])] * host, f"{found['repeated']:.1%}"]
        rows.append((level, *figures, str(found["batch_size"]), f"{found['seq_len']:,}"))
    print_table(rows)
