"""Options that several commands share: the objective, the data, and the size of images."""

from __future__ import annotations

import argparse

OBJECTIVES = ("sft", "dpo", "orpo", "simpo", "kto", "reward", "distill", "grpo")
TOKENIZED = tuple(name for name in OBJECTIVES if name != "grpo")  # whose data make a corpus
# By option: its type, its metavar and its help.
OBJECTIVE_OPTIONS: dict[str, tuple[type, str, str]] = {
    "beta": (
        float,
        "X",
        "for dpo, orpo, kto (0.1), simpo (2), grpo (weight of the KL term: 0) and distill (0: KL(teacher || "
        "student), up to 1)",
    ),
    "loss_type": (
        *(str, "NAME"),
        "for dpo (sigmoid, hinge, ipo and others, or a sum: sigmoid=0.8+sft=1), kto (kto, "
        "apo_zero_unpaired), distill (jsd, cosine), sft (nll, dft) and grpo (dapo, grpo, dr_grpo, "
        "gspo, gmpo, cispo, bnpo)",
    ),
    "mtp": (
        *(float, "X"),
        "for sft: load the checkpoint's modules for multi-token prediction, and add X times their loss (0)",
    ),
    "indexer_loss": (
        *(float, "X"),
        "for sft: train the indexers of sparse attention, too, and add X times their loss (0)",
    ),
    "label_smoothing": (
        float,
        "P",
        "for dpo and simpo: probability that a pair's labels are swapped (0)",
    ),
    "f_divergence": (
        str,
        "NAME",
        "for dpo: reverse_kl (the default), forward_kl, js_divergence or alpha_divergence",
    ),
    "desensitize": (
        float,
        "X",
        "for dpo: weight of the tokens by which one answer is longer than the other (1)",
    ),
    "margin": (float, "X", "for simpo (1) and reward (0): target margin between chosen and rejected answers"),
    "nll_weight": (float, "X", "for simpo: weight of the chosen answer's likelihood loss (0)"),
    "centering": (float, "X", "for reward: weight of a term that centres rewards around zero (0)"),
    "desirable_weight": (float, "X", "for kto: weight of good answers (1)"),
    "undesirable_weight": (float, "X", "for kto: weight of bad answers (1)"),
    "teacher": (str, "MODEL", "for distill: hub id or folder of a model with the same vocabulary"),
    "temperature": (
        float,
        "X",
        "for distill: divides both models' logits; for grpo: of sampling and of its scores (1)",
    ),
    "top_k": (
        int,
        "K",
        "for distill: compare only the teacher's K likeliest tokens, and the others as one (all)",
    ),
    "reward": (
        *(str, "FILE.py:NAME"),
        "for grpo: function that judges answers; several are joined by + (docs/grpo.md)",
    ),
    "group_size": (int, "N", "for grpo: answers to each prompt (8)"),
    "max_new_tokens": (int, "N", "for grpo: tokens of an answer, part of --seq-len (256)"),
    "updates": (int, "N", "for grpo: steps on the same answers (1)"),
    "clip_low": (float, "X", "for grpo: ratios are clipped below 1 - X (0.2)"),
    "clip_high": (float, "X", "for grpo: and above 1 + X; for cispo the largest ratio (as below; cispo: 5)"),
    "reference": (str, "MODEL", "for grpo: model of the KL term (with --lora: the model without adapters)"),
    "hard_weight": (float, "X", "for distill: weight of the cross entropy added to the divergence (0)"),
}


def add_objective(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the objective (docs/post_training.md)")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="sft",
        help="training objective: dpo, orpo, simpo and reward read records of prompt, chosen and rejected; "
        "kto reads prompt, completion and label; grpo reads prompts; sft and distill read texts or "
        "conversations (default: %(default)s). Its options follow, with defaults in brackets; others are "
        "refused:",
    )
    for name, (kind, metavar, text) in OBJECTIVE_OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def add_train_on(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--train-on",
        choices=("all", "last", "each"),
        default="all",
        help="answers of a conversation that are learned: all; only the last; or each in an example of its "
        "own, rendered as when the model is asked, reasoning included (default: %(default)s)",
    )


def add_sources(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[WEIGHT=]SOURCE",
        help=".txt, .md, .json, .jsonl[.gz or .zst], .csv, .tsv and .parquet files, folders and patterns "
        "of them, hf: data sets, - for JSON lines on standard input, or corpora; a weight is a "
        "share of the tokens, as in 0.7=a.jsonl 0.3=b",
    )


def add_data(group: argparse._ActionsContainer) -> None:
    """Add the data options shared with `tokenize`."""
    add_columns(group)
    group.add_argument(
        "--data-cache",
        metavar="FOLDER",
        help="cache for tokenized data (default: liger_models/data in the user's cache folder)",
    )
    group.add_argument(
        "--verify-data",
        action="store_true",
        help="verify the digests of all corpora (default: only of files newer than their manifest)",
    )
    add_max_image_pixels(group)


def add_columns(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--columns",
        metavar="FIELD=COLUMN,...",
        help="the data's columns where their names differ, as in prompt=question,completion=answer",
    )
    group.add_argument(
        "--split",
        metavar="SPLIT",
        help="split of the hf: data sets that name none, also a part of one or several: 'train[:90%%]', "
        "train+validation (default: train)",
    )


def add_max_image_pixels(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--max-image-pixels",
        type=int,
        metavar="N",
        help="read images of up to this many pixels (default: Pillow's limit, 89,478,485)",
    )


def use_max_image_pixels(args: argparse.Namespace) -> None:
    """Raise Pillow's limit to --max-image-pixels.

    Raises:
        ConfigError: not a number of pixels.
    """
    from liger_models.convert.errors import ConfigError
    from liger_models.images.files import allow_pixels

    if args.max_image_pixels is None:
        return
    if args.max_image_pixels < 1:
        raise ConfigError(
            f"max_image_pixels is {args.max_image_pixels}; expected a whole number of 1 or more"
        )
    allow_pixels(args.max_image_pixels)
