"""`liger-models train`: pretrain or fine-tune on text, JSONL, Parquet or data sets of the hub."""

from __future__ import annotations

import argparse
import sys

from liger_models.cli.shared.data_options import OBJECTIVE_OPTIONS, use_max_image_pixels
from liger_models.cli.shared.train_options import add_train_options

DESCRIPTION = """\
Pretrain or fine-tune a model (docs/training.md, docs/data.md):
  liger-models train Qwen/Qwen3-0.6B --data chats.jsonl --output run --epochs 1
  liger-models train --config run.yaml --lr 1e-5
  torchrun --nproc-per-node 8 -m liger_models.cli train ...     # several GPUs; see --shard
"""
EPILOG = """\
Each record of the data is {"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ...,
"content": ...}, ...]}, or ShareGPT's {"conversations": [...]}. If there is a prompt, the loss covers only the
completion or the assistant's answers. Data are tokenized once, into memory-mapped files. Documents are packed
into rows without padding and do not attend to one another.

OUTPUT receives config.yaml, metrics.jsonl, metrics.csv, loss.png if matplotlib is installed, checkpoint-N
folders for --resume, and final: the trained model as a Hugging Face checkpoint, or its adapter.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "train",
        help="pretrain or fine-tune a model",
        usage="liger-models train MODEL --data SOURCE ... --output FOLDER (--epochs N | --steps N) [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_train_options(parser)
    parser._action_groups.append(parser._action_groups.pop(1))  # --help and its like come last


def run(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from liger_models.convert.checkpoints.hub import ADAPTER_CONFIG
    from liger_models.convert.errors import ConfigError
    from liger_models.training import TrainConfig, TrainingInterrupted, train
    from liger_models.training.processes.world import World
    from liger_models.training.trained_part import split_patterns

    if args.eval_every and not (args.eval_data or args.eval_fraction or args.sample_prompts):
        raise ConfigError("--eval-every needs held-out data: pass --eval-data or --eval-fraction")
    use_max_image_pixels(args)
    of_objective = {name: getattr(args, name) for name in OBJECTIVE_OPTIONS}
    of_objective = {name: value for name, value in of_objective.items() if value is not None}
    names = [f.name for f in fields(TrainConfig) if f.name not in ("objective_options", "adapter")]
    options = {name: getattr(args, name) for name in names} | {"objective_options": of_objective}
    options |= {name: split_patterns(getattr(args, name)) for name in ("freeze", "train_only", "add_tokens")}
    options |= {"data": tuple(args.data), "eval_data": tuple(args.eval_data)}
    if args.base is not None:
        options |= {"model": args.base, "adapter": args.model}
    config = TrainConfig(**options)
    if args.print_config:
        from liger_models.training.inputs import with_adapter
        from liger_models.training.settings_file import settings_text

        print(settings_text(with_adapter(config)), end="")
        return 0
    try:
        result = train(config)
    except TrainingInterrupted as stop:
        if World.is_main():
            print(stop, file=sys.stderr)
        return stop.exit_code
    if World.is_main():
        kind = "adapter" if (result.final / ADAPTER_CONFIG).is_file() else "model"
        steps = f"{result.steps} step{'s' * (result.steps != 1)}"
        print(f"done: {steps}; the trained {kind} is in {result.final}")
    return 0
