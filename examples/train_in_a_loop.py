"""Fine-tune a checkpoint in a plain training loop.

    python examples/train_in_a_loop.py meta-llama/Llama-3.2-1B data.jsonl out

data.jsonl holds one {"prompt": ..., "completion": ...} per line; only completions are trained on. `out`
becomes a Hugging Face checkpoint.

It needs `pip install 'liger_models[hf]'`, for the tokenizer. A checkpoint of a few million parameters, such
as demo-output/run/final after `make demo`, trains on a CPU in seconds.
"""

import argparse
import itertools
import json
import random

import torch
from train_with_trainer import tokenize
from transformers import AutoTokenizer

import liger_models


def main(
    checkpoint: str, data: str, out: str, epochs: int = 1, batch_size: int = 4, learning_rate: float = 2e-5
) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = liger_models.from_hub(checkpoint, device=device).train()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with open(data, encoding="utf-8") as lines:
        rows = [tokenize(tokenizer, **json.loads(line)) for line in lines]
    optimizer = liger_models.optim.AdamW(model.parameters(), lr=learning_rate)  # loses no step to rounding
    losses = []
    for _ in range(epochs):
        random.shuffle(rows)
        for start in range(0, len(rows), batch_size):
            loss = model(**pack(rows[start : start + batch_size], device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return losses


def pack(rows, device: str) -> dict[str, torch.Tensor]:
    """Rows packed without padding, and their boundaries."""
    bounds = itertools.accumulate((len(row["input_ids"]) for row in rows), initial=0)
    flat = {name: [list(itertools.chain.from_iterable(row[name] for row in rows))] for name in rows[0]}
    packed = {name: torch.tensor(ids, device=device) for name, ids in flat.items()}
    return {**packed, "cu_seqlens": torch.tensor(list(bounds), dtype=torch.int32)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("checkpoint", "data", "out"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
