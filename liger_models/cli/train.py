"""liger-models train: pretrain or fine-tune on text, JSONL, Parquet or data sets of the hub."""

from __future__ import annotations

import argparse
import sys

DESCRIPTION = """\
Train a model on text (.txt, .md), JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet, or data sets of the hub
(hf:OWNER/NAME[:CONFIG[:SPLIT]]). Each record is {"text": ...}, or {"prompt": ..., "completion": ...}, or
{"messages": [{"role": ..., "content": ...}, ...]}; where there is a prompt, only the completion or what the
assistant says is trained. Data are tokenized once, into files that are mapped into memory. Documents are
packed into rows without padding, and do not see each other. More in docs/data.md.

OUTPUT gets metrics.jsonl and metrics.csv, loss.png where matplotlib is installed, checkpoint-N folders to
resume from, and final, the trained model as a Hugging Face checkpoint, or its adapter. On several GPUs, each
with a part of the model (--shard):
  torchrun --nproc-per-node 8 -m liger_models.cli train ...
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "train",
        help="pretrain or fine-tune on text, JSONL, Parquet or the hub's data sets",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "model", help="hub id, folder with a Hugging Face checkpoint, or a preset (fresh weights; see `list`)"
    )

    add("--text-only", action="store_true", help="of a multimodal checkpoint, train the language model alone")
    add(
        "--freeze",
        default="",
        metavar="PARTS",
        help="of a model that sees, parts that are not trained, joined by commas: vision, projector, "
        "language; with --lora they get no adapters",
    )
    add(
        "--dropout",
        type=float,
        metavar="0",
        help="train without the dropout that the model's config asks for (default: refuse such a model)",
    )

    group = parser.add_argument_group("data")
    add = group.add_argument
    add_data(group)
    add(
        "--eval-data",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="held-out data, evaluated and never trained on",
    )
    add(
        "--eval-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="or hold out this share of the documents",
    )
    add("--tokenizer", metavar="FOLDER", help="folder with tokenizer.json (default: the model's own)")
    add(
        "--seq-len", type=int, default=2048, metavar="N", help="tokens in a packed row (default: %(default)s)"
    )
    add(
        "--truncate",
        action="store_true",
        help="cut examples with a prompt at --seq-len (default: refuse longer ones)",
    )

    add_objective(parser)

    group = parser.add_argument_group("the run")
    add = group.add_argument
    add("--output", required=True, metavar="FOLDER", help="where everything is written")
    length = group.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, metavar="N", help="steps of the optimizer")
    length.add_argument(
        "--epochs", type=float, metavar="N", help="or passes over the data; may be a fraction"
    )
    add("--batch-size", type=int, default=1, metavar="N", help="rows in a micro-batch (default: %(default)s)")
    add(
        "--gradient-accumulation",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches in a step, exact in the count of labels (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of fresh weights and of the data's order (default: 0)",
    )
    add(
        "--eval-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between evaluations (default: at both ends)",
    )
    add(
        "--save-every",
        type=int,
        default=500,
        metavar="N",
        help="steps between checkpoints (default: %(default)s)",
    )
    add(
        "--keep",
        type=int,
        default=2,
        metavar="N",
        help="newest checkpoints that stay; 0: all (default: %(default)s)",
    )
    add(
        "--resume",
        nargs="?",
        const="auto",
        metavar="CHECKPOINT",
        help="go on from OUTPUT's newest checkpoint, or from this one, as if never stopped",
    )

    add(
        "--not-finite",
        choices=("stop", "skip"),
        default="stop",
        help="of a step whose loss or gradient is not finite: stop, or skip it, up to nine in a row "
        "(default: %(default)s)",
    )
    add("--log", metavar="NAMES", help="beside metrics.jsonl: tensorboard, wandb, or both, joined by a comma")
    add(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="profile so many steps, after the first three, into OUTPUT/profile: a trace, and what its "
        "kernels are for",
    )

    group = parser.add_argument_group("optimizer (AdamW)")
    add = group.add_argument
    add("--lr", type=float, default=3e-4, metavar="X", help="peak learning rate (default: %(default)s)")
    add(
        "--schedule",
        choices=("cosine", "linear", "constant"),
        default="cosine",
        help="its course after warmup, to zero",
    )
    add("--warmup", type=int, default=0, metavar="N", help="steps of linear warmup (default: %(default)s)")
    add(
        "--weight-decay", type=float, default=0.1, metavar="X", help="on matrices only (default: %(default)s)"
    )
    add(
        "--clip",
        type=float,
        default=1.0,
        metavar="X",
        help="largest gradient norm; 0: no clipping (default: %(default)s)",
    )

    add(
        "--weights",
        choices=("master", "compensated", "stochastic", "plain"),
        default="master",
        help="how bfloat16 weights are kept: with 16 further bits, with what rounding lost as a bfloat16, "
        "rounded at random, or to the nearest, which loses small steps (default: %(default)s)",
    )
    add(
        "--moments",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="dtype of AdamW's two moments (default: that of the weights)",
    )
    add(
        "--optimizer-memory",
        choices=("device", "host"),
        default="device",
        help="where AdamW's state is; host: each step streams it through the GPU, with the same bits "
        "(default: %(default)s)",
    )

    add(
        "--bias-update-rate",
        type=float,
        default=0.001,
        metavar="X",
        help="of models that balance the load of their experts by a correction bias: its step, each step; "
        "0: it stays (default: %(default)s)",
    )

    group = parser.add_argument_group("adapters (LoRA; needs the extra lora)")
    add = group.add_argument
    add(
        "--lora",
        nargs="?",
        const="",
        metavar="SETTINGS",
        help="train low-rank adapters alone: r=16,alpha=32,targets=all-linear,dropout=0.0[,dora][,rslora], "
        "of which each may be left out (these are the defaults); several targets are joined by +",
    )
    add(
        "--quantize",
        choices=("nf4", "int8"),
        help="the linear layers below them, to 4 bits (QLoRA) or 8 (needs the extra quantize)",
    )
    add("--merge", action="store_true", help="write OUTPUT/merged too, the model with the adapters in it")

    group = parser.add_argument_group("the machine")
    add = group.add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of weights and of what is saved (default: the checkpoint's; a preset: bfloat16 on a GPU)",
    )
    add("--device", default="auto", help="cuda, cuda:1, cpu (default: a GPU if there is one)")
    add(
        "--activation-memory",
        choices=("all", "lean", "mlp", "checkpoint", "tiled", "offload", "auto"),
        default="lean",
        help="what is kept for backward; auto: of each layer as much as fits (default: %(default)s)",
    )
    add(
        "--memory-budget",
        metavar="SIZE",
        help="of a GPU, for auto: such as 120GiB, or a share of what is free (default: 0.95)",
    )
    add(
        "--shard",
        choices=("full", "hybrid", "none"),
        help="how torchrun's processes share the model: each has a part of it (FSDP2), each node has all of "
        "it, or each has all of it (DDP); a resumed run may choose another (default: full; with --lora none)",
    )
    add(
        "--sequence-parallel",
        type=int,
        default=1,
        metavar="N",
        help="so many processes share each row and exchange heads for attention: for rows that are too long "
        "for one (default: %(default)s)",
    )
    add(
        "--expert-parallel",
        type=int,
        default=1,
        metavar="N",
        help="so many processes share the experts of each layer, and tokens are sent to them (default: "
        "%(default)s)",
    )
    add(
        "--hang-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="of several processes: in which each must come further, or all end, and name those that did not "
        "(default: %(default)g)",
    )
    add("--attention", default="auto", help="attention backend (default: %(default)s)")


# By option: its type, what stands for its value, and what it is.
OBJECTIVE_OPTIONS: dict[str, tuple[type, str, str]] = {
    "beta": (float, "X", "of dpo, orpo, kto (0.1), simpo (2) and distill (0: KL(teacher || student), to 1)"),
    "loss_type": (
        *(str, "NAME"),
        "of dpo (sigmoid, hinge, ipo and others, or a sum: sigmoid=0.8+sft=1), kto (kto, apo_zero_unpaired), "
        "distill (jsd, cosine) and sft (nll, dft)",
    ),
    "label_smoothing": (
        float,
        "P",
        "of dpo and simpo: the probability that a pair is the wrong way round (0)",
    ),
    "f_divergence": (str, "NAME", "of dpo: reverse_kl, forward_kl, js_divergence or alpha_divergence"),
    "desensitize": (float, "X", "of dpo: what a longer answer has beyond the shorter one counts so much (1)"),
    "margin": (float, "X", "of simpo (1) and reward (0): by how much the chosen answer should be above"),
    "nll_weight": (float, "X", "of simpo: of the chosen answer's own loss (0)"),
    "centering": (float, "X", "of reward: holds rewards around zero (0)"),
    "desirable_weight": (float, "X", "of kto: of good answers (1)"),
    "undesirable_weight": (float, "X", "of kto: of bad answers (1)"),
    "teacher": (str, "MODEL", "of distill: hub id or folder of a model of the same vocabulary"),
    "temperature": (float, "X", "of distill: divides both models' logits (1)"),
    "top_k": (int, "K", "of distill: compare the teacher's likeliest tokens, and the rest as one (all)"),
    "hard_weight": (float, "X", "of distill: of the labels' own loss beside the divergence (0)"),
}


OBJECTIVES = ("sft", "dpo", "orpo", "simpo", "kto", "reward", "distill")


def add_objective(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the objective (docs/post_training.md)")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="sft",
        help="what is minimised: dpo, orpo, simpo and reward read records of prompt, chosen and rejected; "
        "kto of prompt, completion and label; the others those above (default: %(default)s). Its options, of "
        "which one that it does not have is refused, with defaults in brackets:",
    )
    for name, (kind, metavar, text) in OBJECTIVE_OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def add_data(group: argparse._ActionsContainer) -> None:
    """The options that name data, which `tokenize` has too."""
    group.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[WEIGHT=]SOURCE",
        help=".txt, .md, .jsonl[.gz or .zst] and .parquet files, folders and patterns of them, hf: data "
        "sets, - for JSON lines on standard input, or corpora; a weight is a share of tokens: 0.7=a.jsonl "
        "0.3=b",
    )
    group.add_argument(
        "--data-cache",
        metavar="FOLDER",
        help="where tokenized data are kept (default: liger_models/data in the user's folder of caches)",
    )
    group.add_argument(
        "--verify-data",
        action="store_true",
        help="compute the digests of all corpora anew (default: where files are younger than manifests)",
    )


def run(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from liger_models.training import TrainConfig, TrainingInterrupted, train
    from liger_models.training.world import World

    of_objective = {name: getattr(args, name) for name in OBJECTIVE_OPTIONS}
    of_objective = {name: value for name, value in of_objective.items() if value is not None}
    names = [f.name for f in fields(TrainConfig) if f.name != "objective_options"]
    options = {name: getattr(args, name) for name in names} | {"objective_options": of_objective}
    options["freeze"] = tuple(filter(None, args.freeze.split(",")))
    options |= {"data": tuple(args.data), "eval_data": tuple(args.eval_data)}
    try:
        result = train(TrainConfig(**options))
    except TrainingInterrupted as stop:
        if World.is_main():
            print(stop, file=sys.stderr)
        return stop.exit_code
    if World.is_main():
        print(f"done: {result.steps} steps; the trained model is in {result.final}")
    return 0
