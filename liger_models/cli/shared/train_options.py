"""Options of `train`, in the groups of its help."""

from __future__ import annotations

import argparse

from liger_models.cli.shared.arguments import MODEL_TO_TRAIN
from liger_models.cli.shared.config_file import add_config
from liger_models.cli.shared.data_options import add_data, add_objective, add_sources, add_train_on


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_TO_TRAIN)
    _add_most_used(parser)
    _add_model(parser)
    _add_data_group(parser)
    add_objective(parser)
    _add_run(parser)
    _add_optimizer(parser)
    _add_adapters(parser)
    _add_machine(parser)
    add_config(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as a file for --config, and exit"
    )


def _add_most_used(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("most used")
    add = group.add_argument
    add_sources(group)
    add("--output", required=True, metavar="FOLDER", help="output folder")
    length = group.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=float, metavar="N", help="passes over the data; may be a fraction")
    length.add_argument("--steps", type=int, metavar="N", help="or optimizer steps")
    add(
        "--lr",
        type=float,
        metavar="X",
        help="peak learning rate (default: 3e-4 from fresh weights, 2e-5 for sft and distill, 1e-5 for "
        "reward, 1e-6 for preferences; ten times as much for adapters; see docs/training.md for "
        "--optimizer adafactor, and none for sgd)",
    )
    add("--batch-size", type=int, default=1, metavar="N", help="rows per micro-batch (default: %(default)s)")
    add("--seq-len", type=int, default=2048, metavar="N", help="tokens per packed row (default: %(default)s)")
    add(
        "--lora",
        nargs="?",
        const="",
        metavar="SETTINGS",
        help="train only low-rank adapters, with settings such as r=8,targets=q_proj+v_proj,dora (default: "
        "r=16, alpha=2r, targets=all-linear, dropout=0, neither dora nor rslora nor experts)",
    )
    add(
        "--eval-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="hold out this fraction of the tokens for evaluation, in whole documents (see also --eval-data)",
    )
    add(
        "--resume",
        nargs="?",
        const="auto",
        metavar="CHECKPOINT",
        help="resume exactly from OUTPUT's newest checkpoint, or from this one",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--base", metavar="MODEL", help="base model of an adapter (default: the one that it names)")
    add("--tokenizer", metavar="FOLDER", help="folder with tokenizer.json (default: the model's own)")
    add(
        "--add-tokens",
        default="",
        metavar="TOKENS",
        help="special tokens to add to the tokenizer and the model, separated by commas: <|think|>,<|tool|>; "
        "their rows of the embedding and the head are trained, with --lora too",
    )
    add("--text-only", action="store_true", help="train only the language model of a multimodal checkpoint")
    add(
        "--freeze",
        default="",
        metavar="PATTERNS",
        help="freeze the weights with such names in the checkpoint, separated by commas: "
        "embed_tokens,layers.0-15,layers.*.mlp; or parts of a multimodal model: vision, projector, language; "
        "with --lora they get no adapters",
    )
    add(
        "--train-only",
        default="",
        metavar="PATTERNS",
        help="freeze all weights except those with such names, as for --freeze: lm_head,layers.3?.*",
    )
    add(
        "--dropout",
        type=float,
        metavar="0",
        help="disable the dropout in the model's config (default: as in the config)",
    )


def _add_data_group(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add = group.add_argument
    add_data(group)
    add(
        "--eval-data",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="held-out data for evaluation, never trained on, in place of --eval-fraction",
    )
    add(
        "--streaming",
        action="store_true",
        help="read, tokenize and pack the data as they come, for data that do not fit on the disk; needs "
        "--steps",
    )
    add(
        "--shuffle-buffer",
        type=int,
        default=10_000,
        metavar="N",
        help="records of a block of streamed data, within which documents are shuffled "
        "(default: %(default)s)",
    )
    add(
        "--eval-tokens",
        type=int,
        default=0,
        metavar="N",
        help="maximum tokens of each evaluation, from the first held-out rows (default: all)",
    )
    add(
        "--eval-steps",
        type=int,
        default=0,
        metavar="N",
        help="maximum batches of each evaluation (default: all); see also --eval-every",
    )
    add(
        "--sample-prompts",
        metavar="FILE|TEXT",
        help="at each evaluation, answer a prompt, or those of a .txt file (one a line) or a .jsonl file "
        "(prompt, or messages), greedily, into OUTPUT/samples.jsonl",
    )
    add(
        "--truncate",
        action="store_true",
        help="cut examples with a prompt at --seq-len (default: refuse longer ones)",
    )
    add_train_on(group)


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    add = group.add_argument
    add(
        "--gradient-accumulation",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches per step; the loss is the exact mean over their labels (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of fresh weights and of the data's order (default: 0)",
    )
    add(
        "--eval-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between evaluations (default: only before the first and after the last step)",
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
        help="how many of the newest checkpoints to keep; 0: all (default: %(default)s)",
    )
    add(
        "--keep-best",
        nargs="?",
        const="eval_loss",
        choices=("eval_loss", "eval_accuracy", "eval_margin"),
        help="also write the model to OUTPUT/best at each best evaluation (default: eval_loss)",
    )
    add(
        "--patience",
        type=int,
        default=0,
        metavar="N",
        help="stop after N evaluations in a row that do not improve --keep-best, or eval_loss; 0: never",
    )

    add(
        "--not-finite",
        choices=("stop", "skip"),
        default="stop",
        help="for a step with a non-finite loss or gradient: stop, or skip up to nine in a row "
        "(default: %(default)s)",
    )
    add(
        "--log",
        metavar="NAMES",
        help="also log to tensorboard, wandb, trackio or mlflow; several are separated by commas",
    )
    add(
        "--log-every",
        type=int,
        default=10,
        metavar="N",
        help="steps between lines, where the output is not a terminal (default: %(default)s)",
    )
    add(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="profile this many steps, after the first three, into OUTPUT/profile: a trace, and a table of "
        "kernel times by purpose",
    )


def _steps_or_share(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimizer").add_argument
    add(
        "--optimizer",
        choices=("adamw", "adamw_8bit", "muon", "muon_heads", "adafactor", "sgd"),
        default="adamw",
        help="adamw_8bit keeps moments in 8 bits (extra quantize); muon orthogonalises updates of matrices, "
        "muon_heads also of each head; adafactor keeps a row and a column for each matrix; sgd has momentum "
        "(default: %(default)s)",
    )
    add(
        "--schedule",
        choices=("cosine", "linear", "wsd", "constant"),
        default="cosine",
        help="learning rate after warmup; wsd holds the peak and decays at the end (default: %(default)s)",
    )
    add("--min-lr", type=float, default=0.0, metavar="X", help="final learning rate (default: 0)")
    add(
        "--warmup",
        type=_steps_or_share,
        default=0,
        metavar="N",
        help="steps of linear warmup, or a fraction of the run below 1 (default: %(default)s)",
    )
    add(
        "--decay",
        type=_steps_or_share,
        default=0.2,
        metavar="N",
        help="steps of the decay of wsd, or a fraction of the run below 1 (default: %(default)s)",
    )
    add(
        "--weight-decay",
        type=float,
        metavar="X",
        help="applied to matrices only (default: 0.1 from fresh weights, otherwise 0)",
    )
    add(
        "--clip",
        type=float,
        default=1.0,
        metavar="X",
        help="clip the gradient to this norm; 0: no clipping (default: %(default)s)",
    )

    add(
        "--weights",
        choices=("master", "compensated", "stochastic", "plain"),
        help="how bfloat16 weights are updated: with 16 more bits of state, with the rounding error kept in "
        "bfloat16, with stochastic rounding, or rounded to nearest, which loses small steps (default: "
        "master; other optimizers than adamw take master or plain)",
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
        help="where AdamW's state is kept; host: each step streams it through the GPU (default: %(default)s)",
    )
    add(
        "--weights-memory",
        choices=("device", "host"),
        default="device",
        help="with --lora: where the frozen weights are kept; host: streamed to the GPU a layer ahead of "
        "their use, with the same results (default: %(default)s)",
    )

    add(
        "--bias-update-rate",
        type=float,
        default=0.001,
        metavar="X",
        help="step size of the correction bias in models that balance experts with one; 0: do not change it "
        "(default: %(default)s)",
    )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("adapters (LoRA; needs the extra lora)").add_argument
    add(
        "--quantize",
        choices=("nf4", "int8"),
        help="quantise the linear layers below the adapters (QLoRA; needs the extra quantize)",
    )
    add(
        "--keep-quantised",
        action="store_true",
        help="keep the weights of a quantised checkpoint in its own bits below the adapters",
    )
    add(
        "--merge",
        action="store_true",
        help="also write OUTPUT/merged, the model with merged adapters",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the machine").add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="dtype of trained and saved weights (default: the checkpoint's; for presets bfloat16 on a GPU)",
    )
    add("--device", default="auto", help="cuda, cuda:1, mps, cpu (default: a GPU if there is one)")
    add(
        "--activation-memory",
        choices=("all", "lean", "mlp", "checkpoint", "tiled", "offload", "auto"),
        default="lean",
        help="activations saved for the backward pass; auto: as many as fit (default: %(default)s)",
    )
    add(
        "--memory-budget",
        metavar="SIZE",
        help="GPU memory that auto may use, such as 120GiB, or a fraction of the free memory "
        "(default: 0.95, or 0.9 for a sharded model)",
    )
    add(
        "--shard",
        choices=("full", "hybrid", "none"),
        help="how torchrun's processes share the model: each holds a part (FSDP2), each node all of it, or "
        "each process (DDP); a resumed run may choose another (default: full; with --lora none)",
    )
    for name, shared in (
        ("--sequence-parallel", "each row, for rows that are too long for one"),
        ("--expert-parallel", "the experts of each layer"),
    ):
        text = f"processes that share {shared} (default: %(default)s)"
        add(name, type=int, default=1, metavar="N", help=text)
    text = "what sends tokens between those: torch's collectives, or the package deep_ep (%(default)s)"
    add("--expert-comm-backend", choices=("standard", "deepep"), default="standard", help=text)
    add(
        "--hang-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="all processes exit if one makes no progress for this long (default: %(default)g)",
    )
    add(
        "--float8",
        choices=("rowwise", "tensorwise", "rowwise_with_gw_hp"),
        help="run linear layers in float8, with weights in --dtype (docs/float8.md)",
    )
    add(
        "--cuda-graphs",
        action="store_true",
        help="record the layers of steps as CUDA graphs, for small steps (docs/training.md)",
    )
    add("--attention", default="auto", help="sdpa, varlen, flash, triton, masked or eager (default: auto)")
