"""The main job from start to finish, on two CPU cores and without a network: `make demo`.

Text (Python's own language reference, which every installation carries) -> a tokenizer -> a fresh LLaMA
checkpoint in the Hugging Face format -> a byte-exact round trip -> training -> an export that others read ->
a few words.

It runs exactly the commands that it prints, which a user could type.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

VOCABULARY = 4096
MARKER = ".liger-models-demo"
# Both losses begin near log(4096) = 8.3; knowing nothing but how often each token comes gives about 6.5.
CLEAR_FALL = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="FOLDER")
    parser.add_argument(
        "--steps", type=int, default=240, metavar="N", help="of training (default: %(default)s)"
    )
    args = parser.parse_args()
    started = time.perf_counter()
    # Matrices this small gain little from a second thread, and lose much where the core is wanted.
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = prepare(args.output)
    print(f"Everything goes to {out}; the commands run with OMP_NUM_THREADS={threads}")

    say("1. Text: Python's language reference, every tenth document held out")
    train_file, held_out_file = write_texts(out)

    say("2. A tokenizer: byte-level BPE, trained on that text")
    train_tokenizer(train_file, out / "tokenizer")

    say("3. A Hugging Face checkpoint of a small LLaMA with random weights")
    untrained = out / "untrained"
    liger_models("init", "llama-demo", untrained, "--tokenizer", out / "tokenizer", "--dtype", "float32")

    say("4. Read into our layout and written back, every byte is the same")
    liger_models("verify", untrained, "--no-transformers")

    say("5. Training")
    run = out / "run"
    liger_models(
        *("train", untrained, "--data", train_file, "--eval-data", held_out_file, "--output", run),
        *("--seq-len", 256, "--batch-size", 1, "--gradient-accumulation", 2, "--steps", args.steps),
        *("--lr", 1e-3, "--warmup", 10, "--eval-every", 60, "--save-every", 120, "--keep", 1),
    )

    say("6. An export, in bfloat16, and its contents as other tools read them")
    exported = out / "exported"
    liger_models("export", run, exported, "--dtype", "bfloat16")
    read_back(exported, untrained)
    liger_models("verify", exported)

    say("7. A few words")
    prompt = "When an object is"
    liger_models(
        *("generate", exported, "--prompt", prompt, "--max-new-tokens", 40),
        *("--temperature", 0.9, "--top-p", 0.9, "--seed", 1),
    )
    return summarise(out, time.perf_counter() - started)


def prepare(out: Path) -> Path:
    """An empty folder: new, or that of an earlier demo."""
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        sys.exit(f"{out} exists and was not made by this demo; choose another folder with --output")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARKER).touch()
    return out


def write_texts(out: Path) -> tuple[Path, Path]:
    """One JSONL record a topic of the reference."""
    from pydoc_data.topics import topics

    files = out / "train.jsonl", out / "held-out.jsonl"
    # Paragraphs as one line each: where the source breaks its lines is nothing to learn.
    texts = [re.sub(r"(?<=\S)\n(?=[^\s*=-])", " ", text) for _, text in sorted(topics.items())]
    for file, chosen in zip(files, (lambda i: i % 10 != 5, lambda i: i % 10 == 5), strict=True):
        kept = [text for i, text in enumerate(texts) if chosen(i)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept), encoding="utf-8")
        print(f"{file}: {len(kept)} documents, {sum(map(len, kept)):,} characters")
    return files


def train_tokenizer(data: Path, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers reads them too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    characters, tokens = len(texts[0]), len(tokenizer.encode(texts[0]).ids)
    print(f"{folder}: {tokenizer.get_vocab_size():,} tokens, {characters / tokens:.1f} characters a token")


def read_back(exported: Path, untrained: Path) -> None:
    """The export holds the tensors that the checkpoint held before training, trained, and no other."""
    from safetensors import safe_open

    with (
        safe_open(untrained / "model.safetensors", framework="pt") as before,
        safe_open(exported / "model.safetensors", framework="pt") as after,
    ):
        assert set(before.keys()) == set(after.keys()), "the export has other tensors than the source"
        for name in before.keys():  # noqa: SIM118 (not a mapping)
            old, new = before.get_tensor(name), after.get_tensor(name)
            assert old.shape == new.shape, f"{name} changed its shape"
            assert not old.to(new.dtype).equal(new), f"{name} was not trained"
            assert new.isfinite().all(), f"{name} is not finite"
        print(f"safetensors reads {len(list(after.keys()))} tensors, named and shaped as before, all trained")


def liger_models(*arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    print("$ liger-models " + " ".join(f'"{word}"' if " " in word else word for word in words), flush=True)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", "liger_models.cli", *words]).returncode
    if code:
        sys.exit(f"the command failed with exit code {code}")
    print(f"({time.perf_counter() - started:.0f} s)", flush=True)


def summarise(out: Path, seconds: float) -> int:
    records = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    training = [record["loss"] for record in records if "loss" in record]
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    last = sum(training[-5:]) / len(training[-5:])  # single steps scatter
    say("Summary")
    print(f"training loss  {training[0]:.2f} -> {last:.2f}   (chance: {math.log(VOCABULARY):.2f})")
    print(f"held-out loss  {held_out[0]:.2f} -> {held_out[-1]:.2f}")
    for what, path in {
        "metrics": out / "run" / "metrics.csv",
        "loss curve": out / "run" / "loss.png",
        "trained model": out / "run" / "final",
        "its bfloat16 export": out / "exported",
    }.items():
        print(f"{what + ':':<21}{path if path.exists() else 'none: matplotlib is not installed'}")
    print(f"{seconds:.0f} s in all")
    print("Next: docs/first_steps.md teaches this model an answer, and then uses models and data of your own")
    falls = training[0] - last, held_out[0] - held_out[-1]
    if not all(fall >= CLEAR_FALL for fall in falls):  # a NaN is no fall
        print(f"FAILED: a loss fell by less than {CLEAR_FALL}", file=sys.stderr)
        return 1
    return 0


def say(title: str) -> None:
    print(f"\n== {title}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
