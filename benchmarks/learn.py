"""Do bfloat16 weights learn like float32 weights, and float8 products like bfloat16's? The same training in
each mode.

A small LLaMA is trained from scratch in float32 and saved in bfloat16. Every mode then continues with the
same data in the same order at a constant rate, through `liger_models.training`; or with --from-scratch every
mode starts from the same random weights. Two runs with different data orders show the effect of chance. The
losses become a table, a CSV file and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, markdown_table, publish
from liger_models.layers.projections.float8 import RECIPES

SUMMARY = "held-out losses with each representation of bfloat16 weights, Muon and float8, against float32"


@dataclass(frozen=True)
class Experiment:
    """A model's shape, the texts of its first training and of its fine-tuning, and the size of a step."""

    shape: dict[str, Any]
    first_text: str
    text: str
    first_steps: int
    first_lr: float
    seq_len: int
    batch_size: int
    gradient_accumulation: int


EXPERIMENTS = {
    "demo": Experiment({}, "reference", "reference", 240, 1e-3, 256, 1, 2),
    "139m": Experiment(
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        *("library", "torch", 300, 5e-4, 1024, 4, 1),
    ),
}

BFLOAT16 = {"dtype": "bfloat16"}
MODES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, other order": {"dtype": "float32", "seed": 1},
    "master": BFLOAT16 | {"weights": "master"},
    "master, float32 moments": BFLOAT16 | {"weights": "master", "moments": "float32"},
    "compensated": BFLOAT16 | {"weights": "compensated"},
    "stochastic": BFLOAT16 | {"weights": "stochastic"},
    "stochastic, float32 moments": BFLOAT16 | {"weights": "stochastic", "moments": "float32"},
    "plain": BFLOAT16 | {"weights": "plain"},
    "muon": BFLOAT16 | {"optimizer": "muon"},
    "muon_heads": BFLOAT16 | {"optimizer": "muon_heads"},
    "master, other order": BFLOAT16 | {"weights": "master", "seed": 1},
    **{recipe: BFLOAT16 | {"weights": "master", "float8": recipe} for recipe in RECIPES},
    "rowwise, other order": BFLOAT16 | {"weights": "master", "float8": "rowwise", "seed": 1},
}
# Weight, gradient, residue, and two moments; Muon's one, in float32.
BYTES = {
    "float32": 16,
    "float32, other order": 16,
    "master": 10,
    "master, float32 moments": 14,
    "compensated": 10,
    "stochastic": 8,
    "stochastic, float32 moments": 12,
    "plain": 8,
    "muon": 10,
    "muon_heads": 10,
    "master, other order": 10,
    **dict.fromkeys(RECIPES, 10),
    "rowwise, other order": 10,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="demo", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="steps per mode (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="constant (%(default)s)")
    parser.add_argument("--mode", action="append", choices=MODES, help="repeatable; default: all")
    parser.add_argument("--from-scratch", action="store_true", help="start from random weights, and warm up")
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations per run (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> int:
    experiment = EXPERIMENTS[args.experiment]
    folder = Path(args.out) / f"learn-{args.experiment}"
    common = _prepare(experiment, folder, args)
    started = time.perf_counter()
    chosen = args.mode or list(MODES)

    def train(mode: str) -> None:
        options = common | {
            "model": str(folder / ("fresh" if args.from_scratch else "start")),
            "warmup": args.steps // 20 if args.from_scratch else 0,
            "data": [str(folder / "train.jsonl")],
            "eval_data": [str(folder / "held-out.jsonl")],
            "output": str(folder / mode.replace(", ", "-").replace(" ", "-")),
            "steps": args.steps,
            "lr": args.lr,
            "schedule": "constant",
            "eval_every": max(1, args.steps // args.evaluations),
        }
        _in_own_process(options | MODES[mode])

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(train, chosen))
    curves = {mode: _records(folder / mode.replace(", ", "-").replace(" ", "-")) for mode in chosen}
    title = machine(torch.device(args.device))
    about = (
        f"{title}. {args.experiment}: {args.steps} steps of {_tokens(experiment):,} tokens at a constant "
        f"{args.lr:g}; {time.perf_counter() - started:.0f} s."
    )
    rows = [_row(mode, curves) for mode in curves]
    header = [
        "weights",
        "bytes per parameter",
        "held-out loss, before",
        "after",
        "fall",
        f"from {_reference(curves)}'s",
    ]
    table = [
        [
            row["mode"],
            str(row["bytes"]),
            f"{row['before']:.4f}",
            f"{row['after']:.4f}",
            f"{row['fall']:.4f}",
            "" if row["distance"] is None else f"{row['distance']:+.4f}",
        ]
        for row in rows
    ]
    publish(args.out, f"learn-{args.experiment}", f"{about}\n\n{markdown_table(header, table)}", rows)
    _draw(curves, about, Path(args.out) / f"learn-{args.experiment}.png")
    return 0


def _row(mode: str, curves: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    losses = [record["eval_loss"] for record in curves[mode]]
    reference = curves.get(_reference(curves))
    distance = None if reference is None else losses[-1] - reference[-1]["eval_loss"]
    fall = losses[0] - losses[-1]
    ends = {"before": losses[0], "after": losses[-1], "fall": fall, "distance": distance}
    return {"mode": mode, "bytes": BYTES[mode], **ends, "curve": json.dumps(losses)}


def _reference(curves: dict[str, list[dict[str, Any]]]) -> str:
    return "float32" if "float32" in curves else "master"


def _tokens(experiment: Experiment) -> int:
    return experiment.seq_len * experiment.batch_size * experiment.gradient_accumulation


def _prepare(experiment: Experiment, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Texts, a tokenizer, and folder/start: the model after its first training, in bfloat16."""
    import liger_models
    from examples.demo import train_tokenizer
    from liger_models.presets import preset

    common = {
        "tokenizer": str(folder / "tokenizer"),
        "seq_len": experiment.seq_len,
        "batch_size": experiment.batch_size,
        "gradient_accumulation": experiment.gradient_accumulation,
        "save_every": 0,
        "device": args.device,
    }
    last = folder / ("fresh" if args.from_scratch else "start")
    if last.exists():  # already prepared
        return common
    folder.mkdir(parents=True, exist_ok=True)
    _write_texts(experiment.text, folder, "")
    _write_texts(experiment.first_text, folder, "first-")
    train_tokenizer(folder / "first-train.jsonl", folder / "tokenizer")
    torch.manual_seed(0)
    shape = preset("llama-demo") | experiment.shape | {"bos_token_id": 0, "eos_token_id": 1}
    fresh = liger_models.from_config(shape, dtype=torch.float32, device="cpu")
    fresh.save_pretrained(folder / "fresh")
    if args.from_scratch:
        return common
    options = common | {
        "model": str(folder / "fresh"),
        "data": [str(folder / "first-train.jsonl")],
        "output": str(folder / "first"),
        "steps": experiment.first_steps,
        "lr": experiment.first_lr,
        "warmup": experiment.first_steps // 20,
    }
    _in_own_process(options)
    trained = liger_models.from_hub(str(folder / "first" / "final"), dtype=torch.bfloat16, device="cpu")
    trained.save_pretrained(folder / "start", dtype=torch.bfloat16)
    return common


def _write_texts(text: str, folder: Path, prefix: str) -> None:
    """prefix-train.jsonl and prefix-held-out.jsonl: every tenth document is held out."""
    if text == "reference":
        from pydoc_data.topics import topics

        documents = [document for _, document in sorted(topics.items())]
    else:
        paths = sysconfig.get_paths()
        root = Path(paths["stdlib"]) if text == "library" else Path(torch.__file__).parent
        files = sorted(root.rglob("*.py"))
        kept = [file for file in files if text == "torch" or "site-packages" not in file.parts]
        documents = [file.read_text(encoding="utf-8", errors="ignore") for file in kept]
        documents = [document[:20_000] for document in documents if document.strip()]
    for name, held_out in (("train", False), ("held-out", True)):
        chosen = [document for i, document in enumerate(documents) if (i % 10 == 5) == held_out]
        if held_out:
            chosen = chosen[:40]  # enough for three digits of the loss
        lines = "".join(json.dumps({"text": document}) + "\n" for document in chosen)
        (folder / f"{prefix}{name}.jsonl").write_text(lines, encoding="utf-8")


def _in_own_process(options: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "benchmarks.learn", json.dumps(options)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"training failed:\n{done.stderr[-3000:]}")
    print(f"trained {options['output']}", file=sys.stderr, flush=True)


def _train(options: dict[str, Any]) -> None:
    """Runs in the process of its own."""
    from liger_models.training import TrainConfig, train

    torch.backends.cuda.matmul.allow_tf32 = True  # the float32 runs would take most of the time
    lists = {"data": tuple(options["data"]), "eval_data": tuple(options.get("eval_data", ()))}
    train(TrainConfig(**options | lists))


def _records(output: Path) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "eval_loss" in record]


def _draw(curves: dict[str, list[dict[str, Any]]], title: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    for mode, records in curves.items():
        style = "--" if mode.startswith("float32") else "-"
        width = 2.5 if mode == "float32" else 1.3
        losses = [record["eval_loss"] for record in records]
        label = f"{mode}: {losses[-1]:.4f}"
        axes.plot([record["step"] for record in records], losses, style, linewidth=width, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss")
    axes.set_title(title, fontsize=7, wrap=True)
    axes.legend(title="weights: last loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    _train(json.loads(sys.argv[1]))
