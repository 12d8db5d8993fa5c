"""Do bfloat16 weights learn like float32 weights, and float8 products like bfloat16's? The same training in
each mode.

A small LLaMA is trained from scratch in float32 and saved in bfloat16. Every mode then continues with the
same data in the same order at a constant rate, through `liger_models.training`; or with --from-scratch every
mode starts from the same random weights, and with --start from a trained model, to be fine-tuned on other
texts. --orders runs each mode with several orders of the data, which shows the effect of chance. The losses
become a table, a CSV file and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.peer import use_torchao
from liger_models.layers.projections.float8 import RECIPES
from liger_models.training.learning_rate import SCHEDULES

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
    **{recipe: BFLOAT16 | {"weights": "master", "float8": recipe} for recipe in RECIPES},
    "torchao rowwise": BFLOAT16 | {"weights": "master", "torchao": "rowwise"},
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
    **dict.fromkeys(RECIPES, 10),
    "torchao rowwise": 10,
}
TEXTS = {
    "reference": "the texts of Python's help()",
    "library": "Python's library",
    "torch": "torch's sources",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="demo", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="steps per mode (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="highest learning rate (%(default)s)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="constant", help="default: %(default)s")
    parser.add_argument("--mode", action="append", choices=MODES, help="repeatable; default: all")
    parser.add_argument("--orders", type=int, default=1, help="orders of the data per mode (%(default)s)")
    parser.add_argument("--from-scratch", action="store_true", help="start from random weights, and warm up")
    parser.add_argument("--start", type=Path, help="a trained model to start from, with its tokenizer")
    parser.add_argument("--text", choices=TEXTS, help="texts to learn; default: the experiment's")
    parser.add_argument("--cuda-graphs", action="store_true", help="record the layers")
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations per run (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> int:
    experiment = EXPERIMENTS[args.experiment]
    if args.text:
        experiment = replace(experiment, text=args.text)
    folder = Path(args.out) / f"learn-{args.experiment}"
    common = _prepare(experiment, folder, args)
    started = time.perf_counter()
    start = args.start or folder / ("fresh" if args.from_scratch else "start")
    runs = {
        _named(mode, order): mode for mode in args.mode or list(MODES) for order in range(1, args.orders + 1)
    }

    def train(name: str) -> None:
        mode = MODES[runs[name]]
        order = {} if name == runs[name] else {"seed": int(name.rpartition(" ")[2]) - 1}
        options = common | {
            "model": str(start),
            "warmup": args.steps // 20 if args.from_scratch or args.start else 0,
            "data": [str(folder / "train.jsonl")],
            "eval_data": [str(folder / "held-out.jsonl")],
            "output": str(_output(folder, name)),
            "steps": args.steps,
            "lr": args.lr,
            "schedule": args.schedule,
            "eval_every": max(1, args.steps // args.evaluations),
            "cuda_graphs": args.cuda_graphs,
        }
        _in_own_process(options | mode | order)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(train, runs))
    curves = {name: _records(_output(folder, name)) for name in runs}
    title = machine(torch.device(args.device))
    rate = "a constant" if args.schedule == "constant" else f"a {args.schedule} schedule from"
    about = (
        f"{title}. {args.experiment}: {args.steps} steps of {_tokens(experiment):,} tokens of "
        f"{TEXTS[experiment.text]} at {rate} {args.lr:g}; {time.perf_counter() - started:.0f} s."
    )
    rows = [_row(name, runs[name], curves) for name in curves]
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
    means = "" if args.orders == 1 else f"\n\n{_over_orders(curves, runs)}"
    publish(args.out, f"learn-{args.experiment}", f"{about}\n\n{markdown_table(header, table)}{means}", rows)
    _draw(curves, runs, about, Path(args.out) / f"learn-{args.experiment}.png")
    return 0


def _named(mode: str, order: int) -> str:
    return mode if order == 1 else f"{mode}, order {order}"


def _output(folder: Path, name: str) -> Path:
    return folder / name.replace(", ", "-").replace(" ", "-")


def _over_orders(curves: dict[str, list[dict[str, Any]]], runs: dict[str, str]) -> str:
    """Table of the last losses of each mode over the orders of the data."""
    last: dict[str, list[float]] = {}
    for name, mode in runs.items():
        last.setdefault(mode, []).append(curves[name][-1]["eval_loss"])
    reference = statistics.mean(last.get(_reference(curves), [float("nan")]))
    table = [
        [
            mode,
            ", ".join(f"{loss:.4f}" for loss in losses),
            f"{statistics.mean(losses):.4f}",
            f"{100 * (max(losses) - min(losses)) / min(losses):.2f}%",
            f"{100 * (statistics.mean(losses) / reference - 1):+.2f}%",
        ]
        for mode, losses in last.items()
    ]
    header = ["weights", "held-out loss of each order", "mean", "spread", f"mean from {_reference(curves)}'s"]
    return markdown_table(header, table)


def _row(name: str, mode: str, curves: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    losses = [record["eval_loss"] for record in curves[name]]
    reference = curves.get(_reference(curves))
    distance = None if reference is None else losses[-1] - reference[-1]["eval_loss"]
    fall = losses[0] - losses[-1]
    ends = {"before": losses[0], "after": losses[-1], "fall": fall, "distance": distance}
    return {"mode": name, "bytes": BYTES[mode], **ends, "curve": json.dumps(losses)}


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
    if args.start:
        return common | {"tokenizer": str(args.start)}
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
    from liger_models.training import TrainConfig
    from liger_models.training.loop import Run, train_as

    class Converted(Run):
        """A run whose linear layers, except the head, are torchao's in float8."""

        def _load_model(self, checkpoint: Path | None) -> None:
            super()._load_model(checkpoint)
            self.model.split_projections()
            use_torchao(self.model, recipe, emulate=self.world.device.type == "cpu")
            self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    torch.backends.cuda.matmul.allow_tf32 = True  # the float32 runs would take most of the time
    recipe = options.pop("torchao", None)
    lists = {"data": tuple(options["data"]), "eval_data": tuple(options.get("eval_data", ()))}
    train_as(Converted if recipe else Run, TrainConfig(**options | lists))


def _records(output: Path) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "eval_loss" in record]


def _draw(curves: dict[str, list[dict[str, Any]]], runs: dict[str, str], title: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    colours = {mode: f"C{number % 10}" for number, mode in enumerate(dict.fromkeys(runs.values()))}
    styles = ("-", "--", ":", "-.")
    for number, (name, records) in enumerate(curves.items()):
        order = number - list(runs.values()).index(runs[name])
        drawn = {"color": colours[runs[name]], "linestyle": styles[order % len(styles)]}
        losses = [record["eval_loss"] for record in records]
        label = f"{name}: {losses[-1]:.4f}"
        axes.plot([record["step"] for record in records], losses, linewidth=1.3, label=label, **drawn)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss")
    axes.set_title(title, fontsize=7, wrap=True)
    axes.legend(title="weights: last loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    _train(json.loads(sys.argv[1]))
