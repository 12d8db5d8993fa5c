"""A small model learns to be polite, from pairs of answers, on two CPU cores and without a network.

    python examples/learn_a_preference.py

Answers, three in four of them rude -> a tokenizer and a fresh LLaMA -> fine-tuning, after which it is mostly
rude -> DPO on pairs whose polite answer is chosen -> what it now answers to questions that were in no pair.

Every command that it prints is one that a user types.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from demo import liger_models, prepare, say, train_tokenizer

THINGS = ("soup", "bread", "tea", "rice", "cake", "jam", "corn", "ham", "milk", "pie", "fish", "leek")
WORDS = ("hot", "cold", "old", "fresh", "sweet", "sour", "small", "large", "cheap", "ready")
POLITE, RUDE = ", thank you for asking.", ", now leave me alone."
HELD_OUT = 4  # things that no pair is about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("preference-output"), metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=60, help="of fine-tuning, and of DPO half as many")
    args = parser.parse_args()
    begun = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices this small gain little from a second thread
    out = prepare(args.output)

    say("1. Answers, pairs of answers, a tokenizer and a fresh model")
    answers, pairs, held_out = write_data(out)
    train_tokenizer(out / "texts.jsonl", out / "tokenizer")
    fresh, tuned, preferring = out / "fresh", out / "tuned", out / "preferring"
    liger_models("init", "llama-demo", fresh, "--tokenizer", out / "tokenizer", "--dtype", "float32")

    say("2. Fine-tuning on answers of both kinds")
    common = ("--seq-len", 256, "--save-every", 0, "--warmup", 5)
    liger_models(
        *("train", fresh, "--data", answers, "--output", tuned, *common),
        *("--steps", args.steps, "--lr", 2e-3, "--batch-size", 2),
    )

    say("3. DPO: of each pair the polite answer is chosen; its own likelihood keeps a small model fluent")
    liger_models(
        *("train", tuned / "final", "--objective", "dpo", "--loss-type", "sigmoid=1+sft=1"),
        *("--data", pairs, "--eval-data", held_out),
        *("--output", preferring, *common, "--steps", args.steps // 2, "--lr", 5e-4, "--batch-size", 2),
    )

    say("4. Its answers to questions that were in no pair")
    before, after = (share_of_polite(folder / "final") for folder in (tuned, preferring))
    records = [json.loads(line) for line in (preferring / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record["eval_accuracy"] for record in records if "eval_accuracy" in record]
    print(
        f"held-out pairs, the chosen answer more likely than before: {accuracy[0]:.0%} -> {accuracy[-1]:.0%}"
    )
    print(f"polite answers: {before:.0%} -> {after:.0%}")
    print(f"curves of margin, accuracy and rewards: {preferring / 'loss.png'}")
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if not after > before + 0.2:
        print("FAILED: it did not become more polite", file=sys.stderr)
        return 1
    return 0


def write_data(out: Path) -> tuple[Path, Path, Path]:
    """Answers of both kinds about all things; pairs about some; pairs about the others."""
    files = out / "answers.jsonl", out / "pairs.jsonl", out / "held-out.jsonl"
    answers, pairs, held_out = [], [], []
    for number, thing in enumerate(THINGS):
        for word in WORDS:
            prompt, answer = f"How is the {thing}?", f" The {thing} is {word}"
            answers += [{"prompt": prompt, "completion": answer + end} for end in (POLITE, RUDE, RUDE, RUDE)]
            pair = {"prompt": prompt, "chosen": answer + POLITE, "rejected": answer + RUDE}
            (pairs if number >= HELD_OUT else held_out).append(pair)
    texts = [{"text": row["prompt"] + row["completion"]} for row in answers]
    for file, rows in zip(files, (answers, pairs, held_out), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (out / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    return files


def share_of_polite(folder: Path) -> float:
    """Score 32 answers, drawn at random, to questions outside the pairs' topics."""
    import torch

    import liger_models as library
    from liger_models.training.text.tokenizer import TextTokenizer

    model, tokenizer = library.from_hub(folder, device="cpu").eval(), TextTokenizer(folder)
    said = []
    for thing in THINGS[:HELD_OUT]:
        ids = torch.tensor([tokenizer.encode(f"How is the {thing}?")] * 8)
        said += model.generate(ids, 24, temperature=1.0, eos_token_id=tokenizer.eos_id, seed=1).tolist()
    texts = [tokenizer.decode(ids) for ids in said]
    print("\n".join(texts[::11]))
    return sum(POLITE in text for text in texts) / len(texts)


if __name__ == "__main__":
    sys.exit(main())
