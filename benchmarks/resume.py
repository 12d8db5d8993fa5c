"""A checkpoint written by many processes and resumed by half of them: bytes read by each, and time.

Random weights in bfloat16 are saved from shards as a Hugging Face checkpoint. All processes load it and train
it for three steps, writing a checkpoint after the second; then half of them, with twice the micro-batches,
repeat the third step from that checkpoint. Both runs end with an export. Bytes read are the tensor bytes that
a process takes from files.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import liger_models
from benchmarks.ranks import be_a_rank, result, started, write
from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.shapes import MODELS, config_of
from benchmarks.training.step import free
from liger_models import parallelize
from liger_models.training import TrainConfig, train

SUMMARY = "a checkpoint written by many processes and resumed by half of them: bytes read by each, seconds"
HEADER = ("what", "processes", "GB of the files", "GB read by each", "seconds", "loss of the third step")
MOST_PER_FILE = "2GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="(%(default)s)")
    parser.add_argument("--layers", type=int, help="use only this many of the model's layers")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per row (%(default)s)")
    gpus = torch.cuda.device_count()
    parser.add_argument("--processes", type=int, default=gpus or 2, help="one per GPU (%(default)s)")
    parser.add_argument("--folder", help="where the files are written, and removed again (a temporary one)")
    parser.add_argument("--time-limit", type=float, default=600, help="time limit in seconds (%(default)s)")


def run(args: argparse.Namespace) -> int:
    config, rows = config_of(args.model, args.layers), []
    for row in measure_all(config, args.seq, args.processes, args.time_limit, args.folder):
        rows.append(row)
        about = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        text = f"{about}. {args.model}, bfloat16.\n\n{markdown_table(HEADER, map(cells, rows))}"
        publish(args.out, f"resume-{args.model}", text, rows, show=False)
    print((Path(args.out) / f"resume-{args.model}.md").read_text(), flush=True)
    return int(any("note" in row for row in rows))


def measure_all(
    config: Mapping[str, Any], seq: int, processes: int, seconds: float, folder: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each action when finished; the last one has a note if it failed."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=folder) as name:
        files = Path(name)
        _write_text_and_tokenizer(files)
        for stage, ranks in (("all", processes), ("half", max(1, processes // 2))):
            task = {"config": config, "seq": seq, "stage": stage, "accumulate": processes // ranks}
            (files / stage).mkdir()
            with started("benchmarks.resume", task, files / stage, ranks) as group:
                for what in STAGES[stage]:
                    found = result(files / stage / f"{what}.json", group, end)
                    yield {"what": what, "processes": ranks} | found
                    if "note" in found:
                        return


def cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of a table with `HEADER`."""
    first = [row["what"], str(row["processes"])]
    if "note" in row:
        return [*first, row["note"], "", "", ""]
    read = sorted({f"{nbytes / 1e9:.2f}" for nbytes in (min(row["read"]), max(row["read"]))})
    loss = f"{row['loss']:.4f}" if "loss" in row else ""
    return [*first, f"{row['nbytes'] / 1e9:.2f}", " to ".join(read), f"{row['seconds']:.1f}", loss]


def _write_text_and_tokenizer(folder: Path) -> None:
    """Write a text of bytes, and a byte tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={"</s>": 0} | {x: i for i, x in enumerate(alphabet, 1)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    generator = torch.Generator().manual_seed(0)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(64):
            letters = torch.randint(97, 123, (2048,), generator=generator).tolist()
            file.write(json.dumps({"text": bytes(letters).decode()}) + "\n")


# ------------------------------------------------------------------------------------------- in each process

STAGES = {
    "all": ("saved from shards", "loaded", "three steps, a checkpoint after two, export"),
    "half": ("resumed from it, third step, export",),
}


def _main(task: dict[str, Any], folder: Path) -> None:
    files, stage = folder.parent, task["stage"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if stage == "all":
        with _Row("saved from shards", folder, files / "model"):
            _save_fresh(task["config"], files, device)
        with _Row("loaded", folder, files / "model"):
            liger_models.from_hub(files / "model", dtype="bfloat16", device=device, shard=parallelize)
        free(device)
    checkpoint = files / "run-all" / "checkpoint-2"
    with _Row(STAGES[stage][-1], folder, checkpoint) as row:
        settings = TrainConfig(
            model=str(files / "model"),
            data=(str(files / "data.jsonl"),),
            output=str(files / f"run-{stage}"),
            data_cache=str(files / "cache"),
            seq_len=task["seq"],
            gradient_accumulation=task["accumulate"],
            steps=3,
            save_every=2,
            keep=0,
            resume=str(checkpoint) if stage == "half" else None,
        )
        if records := train(settings).records:  # which the first process has
            row["loss"] = records[-1]["loss"]


class _Row(dict[str, Any]):
    """Measure an action of all processes as a row of the table, which the first process writes.

    Args:
        what: the action.
        folder: where the row is written.
        files: folder of safetensors files, whose size is measured at the end.
    """

    def __init__(self, what: str, folder: Path, files: Path) -> None:
        self.path, self.files = folder / f"{what}.json", files

    def __enter__(self) -> _Row:
        self.read, self.preadv, self.begun = 0, os.preadv, time.perf_counter()
        os.preadv = self._preadv
        return self

    def _preadv(self, *arguments: Any) -> int:
        count = self.preadv(*arguments)
        self.read += count
        return count

    def __exit__(self, failed: object, *_: object) -> None:
        os.preadv = self.preadv
        if failed is not None:
            return
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, self.read)
        seconds = time.perf_counter() - self.begun
        nbytes = sum(path.stat().st_size for path in self.files.rglob("*.safetensors"))
        if dist.get_rank() == 0:
            write(self.path, {"seconds": seconds, "nbytes": nbytes, "read": of_all, **self})


def _save_fresh(config: Mapping[str, Any], files: Path, device: torch.device) -> None:
    model = liger_models.from_config(config, dtype=torch.bfloat16, device=device, shard=parallelize)
    model.save_pretrained(files / "model", max_shard_size=MOST_PER_FILE)
    if dist.get_rank() == 0:
        for path in (files / "tokenizer").iterdir():
            (files / "model" / path.name).write_bytes(path.read_bytes())
    dist.barrier()


if __name__ == "__main__":
    be_a_rank(_main)
