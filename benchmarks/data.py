"""Large data sets in little memory: text is generated, tokenized by the command line, verified and read.

First the text is written: documents of random lengths (log-normal) with words that follow Zipf's law, so that
new words appear until the end, in JSON lines files of 1 GB. A word tokenizer, the fastest kind, is trained on
its beginning, so that other costs are visible. `liger-models tokenize` is killed once during its work, after
which no corpus must exist, and run to its end. A last process verifies the corpus's digest and counts,
tokenizes one document in 2,000 again and compares the ids, and reads batches in random order.

Memory is that of a process and its children, sampled four times a second: "own" is memory that the system
cannot reclaim (RssAnon), "resident" includes pages of mapped files. To limit it, run the command in a control
group: systemd-run --scope -p MemoryMax=4G -p MemorySwapMax=0 python -m benchmarks data
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.report import machine, markdown_table, publish

SUMMARY = "large data sets in little memory: tokenizing into a corpus, and reading it, on the CPU"
GB = 1_000_000_000
WORDS = 200_000
VOCABULARY = 60_000
SAMPLED = 2_000  # one document in so many is tokenized again
TRAINED_ON = 30_000_000  # bytes of text, for the tokenizer
SEQ_LEN, BATCH, BATCHES = 4096, 4, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gigabytes", type=float, default=10.0, help="size of the text (%(default)s)")
    add("--folder", type=Path, default=Path("data-benchmark"), help="for text and corpus (%(default)s)")
    add("--kill-after", type=float, default=30.0, help="seconds until the kill; 0: no kill (%(default)s)")
    add("--keep", action="store_true", help="keep the folder")


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    text, corpus = folder / "text", folder / "corpus"
    start = time.monotonic()
    written = _write_text(folder, int(args.gigabytes * GB))
    _train_tokenizer(folder)
    print(f"{written} written in {time.monotonic() - start:.0f} s", flush=True)

    tokenize = [sys.executable, "-m", "liger_models.cli", "tokenize", str(folder / "tokenizer")]
    tokenize += ["--data", str(text), "--output", str(corpus), "--seq-len", str(SEQ_LEN)]
    rows = []
    if args.kill_after:
        rows.append({"what": "tokenize, killed", **_watched(tokenize, args.kill_after)})
        if rows[-1]["status"] != -9 or corpus.exists():
            raise RuntimeError(f"killed in the middle it left a corpus: {rows[-1]}")
    rows.append({"what": "tokenize", **_watched(tokenize)})
    rows.append({"what": "verify, read", **_watched([sys.executable, "-m", "benchmarks.data", str(folder)])})
    publish(args.out, "data", _report(written, corpus, rows), rows)
    if failed := [row for row in rows[-2:] if row["status"]]:
        print(failed, file=sys.stderr)
        return 1
    if not args.keep:
        shutil.rmtree(folder)
    return 0


def _report(written: dict[str, int], corpus: Path, rows: list[dict]) -> str:
    manifest = json.loads((corpus / "manifest.json").read_text())
    size = sum(path.stat().st_size for path in corpus.iterdir())
    about = (
        f"{machine(torch.device('cpu'))}. {written['bytes'] / GB:.2f} GB of text in {written['documents']:,} "
        f"documents became {manifest['tokens']:,} tokens in {len(manifest['shards'])} shards "
        f"({size / GB:.2f} GB)."
    )
    header = ["", "s", "processor s", "tokens/s", "own memory, MiB", "resident, MiB"]
    lines = [
        [
            row["what"],
            f"{row['seconds']:.0f}",
            f"{row['processor']:.0f}",
            f"{manifest['tokens'] / row['seconds']:,.0f}" if row["what"] == "tokenize" else "",
            f"{row['own'] >> 20:,}",
            f"{row['resident'] >> 20:,}",
        ]
        for row in rows
    ]
    return f"{about}\n\n{markdown_table(header, lines)}"


# ------------------------------------------------------------------------------------------- what is written


def _documents(size: int) -> Iterator[str]:
    """Texts of this total size in bytes, the same ones each time."""
    import numpy as np

    rng = np.random.default_rng(0)
    parts = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "is", "ou")]
    words = []
    for number in range(WORDS):
        word = "".join(parts[k] for k in rng.integers(0, len(parts), 1 + min(4, number // 200)))
        words.append(word.capitalize() if number % 9 == 4 else word + ("", ",", "", ".", "")[number % 5])
    done = 0
    while done < size:
        lengths = np.exp(rng.normal(6.0, 1.0, 1000)).astype(int) + 1  # a median of 403 words
        ranks = (
            np.exp(rng.random(int(lengths.sum())) * np.log(WORDS)).astype(int) - 1
        )  # Zipf: P(rank) ~ 1/rank
        drawn = [words[k] for k in ranks.tolist()]
        place = 0
        for length in lengths.tolist():
            text = " ".join(drawn[place : place + length])
            place += length
            done += len(text)
            yield text
            if done >= size:
                return


def _write_text(folder: Path, size: int) -> dict[str, int]:
    """Write files of up to 1 GB to `text`, and `samples.jsonl` and `written.json` next to it."""
    if (folder / "written.json").exists():
        return json.loads((folder / "written.json").read_text())
    (folder / "text").mkdir(exist_ok=True)
    number = total = 0
    file = None
    with (folder / "samples.jsonl").open("w") as samples:
        for number, text in enumerate(_documents(size)):
            if file is None or total // GB != (total + len(text)) // GB:
                if file is not None:
                    file.close()
                file = (folder / "text" / f"{(total + len(text)) // GB:04}.jsonl").open("w")
            file.write(f'{{"text": "{text}"}}\n')
            total += len(text)
            if number % SAMPLED == 0:
                samples.write(json.dumps([number, text]) + "\n")
    if file is not None:
        file.close()
    written = {"documents": number + 1, "bytes": total}
    (folder / "written.json").write_text(json.dumps(written))
    return written


def _train_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<eos>", "<unk>"]
    trainer = trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_documents(TRAINED_ON), trainer)
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


# ---------------------------------------------------------------------------------------------- what is read


def _read(folder: Path) -> None:
    """Runs in its own process. Raises AssertionError if the corpus differs from the text."""
    from liger_models.training.data import Stream, load_documents
    from liger_models.training.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(folder / "tokenizer")
    start = time.monotonic()
    documents = load_documents(
        [str(folder / "corpus")], tokenizer, seq_len=SEQ_LEN, vocab_size=VOCABULARY, verify=True
    )
    print(f"digest compared in {time.monotonic() - start:.0f} s", flush=True)
    corpus = documents.parts[0].corpus
    written = json.loads((folder / "written.json").read_text())
    assert len(corpus) == written["documents"], (len(corpus), written)
    checked = 0
    for line in (folder / "samples.jsonl").read_text().splitlines():
        number, text = json.loads(line)
        ids, trained = corpus.read(int(corpus.starts[number]), int(corpus.starts[number + 1]))
        assert ids.tolist() == [*tokenizer.encode(text), tokenizer.eos_id], number
        assert trained.tolist() == [False] + [True] * (len(ids) - 1), number
        checked += len(ids)
    print(f"{checked:,} tokens are those of their texts", flush=True)
    stream = Stream(documents, SEQ_LEN, seed=0)
    start = time.monotonic()
    tokens = sum(documents.batch(stream.take(BATCH)).input_ids.numel() for _ in range(BATCHES))
    seconds = time.monotonic() - start
    print(f"{tokens:,} tokens in {BATCHES} batches of {stream.rows_of(0):,} rows an epoch: {seconds:.1f} s")


# ------------------------------------------------------------------------------------------------ how much


def _watched(command: list[str], kill_after: float = 0.0) -> dict:
    """Run a command; returns status, seconds, processor seconds, and peak memory including its children."""
    start = time.monotonic()
    process = subprocess.Popen(command)
    most = {"own": 0, "resident": 0, "processor": 0.0}
    while process.poll() is None:
        found = [_used(pid) for pid in _family(process.pid)]
        for name in most:
            most[name] = max(most[name], sum(one[name] for one in found))
        if kill_after and time.monotonic() - start > kill_after:
            process.kill()
        time.sleep(0.25)
    return {"status": process.returncode, "seconds": time.monotonic() - start, **most}


def _family(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [k for child in children.read_text().split() for k in _family(int(child))]
        except OSError:  # a thread that has ended
            continue
    return found


def _used(pid: int) -> dict[str, float]:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        times = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    except OSError:  # it has ended
        return {"own": 0, "resident": 0, "processor": 0.0}
    lines = dict(line.split(":", 1) for line in status.splitlines())
    own, resident = (1024 * int(lines.get(name, "0").split()[0]) for name in ("RssAnon", "VmRSS"))
    return {"own": own, "resident": resident, "processor": sum(map(int, times)) / os.sysconf("SC_CLK_TCK")}


if __name__ == "__main__":
    _read(Path(sys.argv[1]))
