"""Inject faults into runs; each run then continues, and in the end has the bits of an undisturbed one.

    python tests/liger_models/training/checkpoints/faults.py --kind kill --moments 30 --seed 1
    python tests/liger_models/training/checkpoints/faults.py   # every kind, 30 moments each; a few minutes

| kind   | at a random moment                                             | then                         |
|--------|----------------------------------------------------------------|------------------------------|
| `kill` | all processes are killed                                       | -                            |
| `full` | the disk is full: a write of one process fails                 | all end and name the file    |
| `die`  | one of two processes is killed                                 | the other ends and names it  |
| `hang` | the main thread of one of two processes hangs                  | both end and name it         |
| `fail` | one of two processes raises an error                           | the other ends and quotes it |

Each run continues in the folder of the one before; after the last fault, it runs to its end. After each
fault, every checkpoint-N must be complete. Processes are forks of this one, which has imported all modules
they need.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor.utils
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import liger_models
from liger_models.convert.errors import DataError
from liger_models.parallel import parallelize  # noqa: F401
from liger_models.training import TrainConfig, train
from liger_models.training.checkpoints.run_folder import checkpoints, verify
from liger_models.training.data import Documents
from liger_models.training.processes import watch

KINDS = ("kill", "full", "die", "hang", "fail")
RANKS = 2
PATIENCE, SILENCE, INTERVAL = 8.0, 4.0, 0.25
STEPS = 12

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="repeatable (all)")
    parser.add_argument("--moments", type=int, default=30, help="faults of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        whole = run(Path(folder), "whole", "none", None, random.Random(args.seed))
        assert set(whole["codes"]) == {0}, whole
        for kind in args.kind or KINDS:
            counts = break_runs(kind, args.moments, random.Random(f"{kind} {args.seed}"), Path(folder), whole)
            print(f"{kind}: {json.dumps(counts)}", flush=True)
        finish(Path(folder))


def break_runs(kind: str, moments: int, rng: random.Random, folder: Path, whole: dict) -> dict:
    """Inject `moments` faults, one after the other; return counts and seconds.

    `whole` is the result of `run` for an undisturbed run.

    Raises:
        AssertionError: a checkpoint is incomplete, a process does not end or does not report why, or a
        completed run has other bits than the undisturbed one.
    """
    counts = {"faults": 0, "finished before": 0, "from checkpoint": [], "seconds to the end of all": 0.0}
    seconds = whole["seconds"]
    while counts["faults"] < moments:
        outcome = run(folder, "broken", kind, rng.uniform(0, seconds), rng)
        found = checkpoints(folder / "broken")
        for checkpoint in found:
            verify(checkpoint)
        last = int(found[-1].name.split("-")[1]) if found else 0
        # A process killed after the end of the run does not affect the other.
        codes = [
            code for rank, code in enumerate(outcome["codes"]) if (kind, rank) != ("die", outcome["victim"])
        ]
        over = set(codes) == {0}
        if over:
            counts["finished before"] += 1
            seconds = min(seconds, outcome["seconds"])  # the undisturbed run also warmed up
        else:
            counts["faults"] += 1
            counts["from checkpoint"].append(last)
            counts["seconds to the end of all"] = max(counts["seconds to the end of all"], outcome["after"])
            check_reports(kind, outcome)
        if over:
            check_finished(folder)
        elif last >= STEPS - 2:  # the run is nearly over
            finish(folder)
    return counts


def finish(folder: Path) -> None:
    """Run the interrupted run to its end, check its weights, and delete it."""
    outcome = run(folder, "broken", "none", None, random.Random())
    assert set(outcome["codes"]) == {0}, outcome
    check_finished(folder)


def check_finished(folder: Path) -> None:
    """Check that the finished run has the bits of the undisturbed one, and delete it."""
    compare(folder)
    shutil.rmtree(folder / "broken")


def prepare(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    liger_models.from_config(SHAPE).save_pretrained(folder / "model")
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(["<s>", "</s>", *characters])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(special))
    words = random.Random(0)
    lines = ["".join(words.choices("abcdefgh ", k=words.randint(20, 90))) for _ in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def settings(folder: Path, name: str) -> TrainConfig:
    return TrainConfig(
        model=str(folder / "model"),
        data=(str(folder / "data.jsonl"),),
        data_cache=str(folder / "cache"),
        output=str(folder / name),
        seq_len=64,
        steps=STEPS,
        schedule="constant",
        lr=3e-3,
        save_every=2,
        device="cpu",
        hang_timeout=PATIENCE,
        resume="auto",
    )


def run(folder: Path, name: str, kind: str, moment: float | None, rng: random.Random) -> dict:
    """Run two processes with a fault after `moment` seconds, or without one if None.

    Returns:
        Exit codes and output of the processes, the rank with the fault, and the seconds from it to the end of
        all.
    """
    ranks, victim, limit = RANKS, rng.randrange(RANKS), rng.randrange(1, 400_000)
    for left in ("meeting", *(f"in{rank}" for rank in range(ranks))):
        (folder / left).unlink(missing_ok=True)
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            _rank(folder, name, ranks, rank, kind, moment if rank == victim else None, limit)
        children.append(child)
    while not all((folder / f"in{rank}").exists() for rank in range(ranks)):
        time.sleep(0.01)
    begun = time.monotonic()
    if moment is not None and kind in ("kill", "die"):
        time.sleep(moment)
        for rank, child in enumerate(children):
            if kind == "kill" or rank == victim:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    seconds = time.monotonic() - begun
    output = [(folder / f"output{rank}.txt").read_text() for rank in range(ranks)]
    return {
        "codes": codes,
        "output": output,
        "victim": victim,
        "after": round(seconds - (moment or 0), 1),
        "seconds": seconds,
    }


def _rank(
    folder: Path, name: str, ranks: int, rank: int, kind: str, moment: float | None, limit: int
) -> None:
    """Run one rank in this forked process, and exit."""
    code = 70
    try:
        output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
        watch.SILENCE, watch.INTERVAL, watch.GRACE = SILENCE, INTERVAL, 2.0
        enter = watch.Watch.__enter__

        def entering(self):
            entered = enter(self)
            (folder / f"in{rank}").touch()
            if moment is not None and kind in ("hang", "fail"):
                _stop_after(moment, kind)
            return entered

        watch.Watch.__enter__ = entering
        if moment is not None and kind == "full":
            _fill_disk_after(limit)
        dist.init_process_group(
            "gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks
        )
        train(settings(folder, name))
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 2
    finally:
        sys.stderr.flush()
        os._exit(code)


def _stop_after(moment: float, kind: str) -> None:
    """Make the first batch after `moment` hang or fail."""
    batch, begin = Documents.batch, time.monotonic()

    def stopping(self, rows):
        if time.monotonic() - begin > moment:
            if kind == "fail":
                raise DataError("the data are gone")
            time.sleep(3600)
        return batch(self, rows)

    Documents.batch = stopping


def _fill_disk_after(limit: int) -> None:
    """Let writes of tensors fail after `limit` bytes."""
    write, left = os.pwrite, [limit]

    def full(fd, data, offset):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(fd, data[: left[0]], offset)
        left[0] -= done
        return done

    os.pwrite = full


def check_reports(kind: str, outcome: dict) -> None:
    """Check that the processes without the fault ended by themselves and reported why."""
    output, victim = outcome["output"], outcome["victim"]
    others = [rank for rank in range(len(output)) if rank != victim]
    assert outcome["after"] < 60
    if kind == "full":
        for words in output:
            assert "No space left on device" in words, output
        assert all(code == 2 for code in outcome["codes"]), outcome
    if kind == "die":
        for rank in others:
            assert outcome["codes"][rank] == 2, outcome
            assert f"process {victim} is dead or stopped" in output[rank], output
    if kind == "fail":
        assert all(code == 2 for code in outcome["codes"]), outcome
        for rank in others:
            assert f"process {victim} ended (DataError: the data are gone)" in output[rank], output
    if kind == "hang":
        assert outcome["codes"][victim] == 2, outcome
        for rank in others:  # a data reader that hangs after the last step affects its own process only
            assert outcome["codes"][rank] == 2 or "the end of the run" in output[victim], outcome
        assert any(f"process {victim} has been stuck" in words for words in output), output


def compare(folder: Path) -> None:
    """Check that the trained weights equal those of the undisturbed run bit for bit."""
    for file in (folder / "whole" / "final").glob("*.safetensors"):
        one, other = load_file(file), load_file(folder / "broken" / "final" / file.name)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


if __name__ == "__main__":
    main()
