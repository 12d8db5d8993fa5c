"""A small model of Qwen2.5-VL's form learns to name the colour and the shape in drawn pictures, on a CPU.

    python examples/learn_to_see.py out

Pictures of several sizes are drawn, cut into patches and packed one after another, each with a question and
its answer. `out` is a checkpoint that transformers reads; where it is installed, it gives the same answers.
"""

import argparse
import itertools
import random
import time

import torch

import liger_models

COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "white": (1.0, 1.0, 1.0),
}
SHAPES = ("square", "cross", "frame")
WORDS = ("<pad>", "<start>", "<end>", "<image>", "<video>", "what?", *COLOURS, *SHAPES)
ID = {word: i for i, word in enumerate(WORDS)}
PATCH, MERGE = 4, 2

CONFIG = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": ID["<end>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
    },
    "image_token_id": ID["<image>"],
    "video_token_id": ID["<video>"],
    "vision_start_token_id": ID["<start>"],
    "vision_end_token_id": ID["<end>"],
    "tie_word_embeddings": False,
}


def draw(colour: str, shape: str) -> torch.Tensor:
    """A picture [3, height, width] of several sizes, the shape somewhere on a dark, noisy ground."""
    height, width = (random.choice((24, 32, 40)) for _ in range(2))
    radius = random.randint(6, 9)
    y, x = random.randint(radius, height - radius - 1), random.randint(radius, width - radius - 1)
    dy, dx = torch.arange(height)[:, None] - y, torch.arange(width) - x
    far = torch.maximum(dy.abs(), dx.abs())
    inside = {
        "square": far < radius,
        "cross": (far < radius) & (torch.minimum(dy.abs(), dx.abs()) < 2),
        "frame": (far < radius) & (far >= radius - 2),
    }[shape]
    ground = 0.3 * torch.randn(3, height, width) - 0.5
    return torch.where(inside, torch.tensor(COLOURS[colour])[:, None, None], ground)


def examples(model, count: int) -> dict[str, torch.Tensor]:
    """Questions with their answers, packed into one row."""
    rows, pixels, grids = [], [], []
    for _ in range(count):
        colour, shape = random.choice(list(COLOURS)), random.choice(SHAPES)
        patches, grid = model.vision.cut(draw(colour, shape))
        tokens = ["<start>", *["<image>"] * (len(patches) // MERGE**2), "<end>", "what?", colour, shape]
        rows.append([ID[token] for token in tokens])
        pixels.append(patches)
        grids.append(grid)
    ids = torch.tensor([list(itertools.chain.from_iterable(rows))])
    bounds = list(itertools.accumulate(map(len, rows), initial=0))
    labels = torch.full_like(ids, -100)
    for end in bounds[1:]:
        labels[0, end - 2 : end] = ids[0, end - 2 : end]
    return {
        "input_ids": ids,
        "labels": labels,
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == ID["<image>"]).int(),
    }


def answers(model, call: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    """The model's answer for each picture on its own: colour and shape."""
    said, begin = [], 0
    ends = call["cu_seqlens"].tolist()[1:]
    for number, end in enumerate(ends):
        one = {name: call[name][:, begin : end - 2] for name in ("input_ids", "mm_token_type_ids")}
        grid = call["image_grid_thw"][number : number + 1]
        first = int(call["image_grid_thw"][:number].prod(1).sum())
        one |= {
            "image_grid_thw": grid,
            "pixel_values": call["pixel_values"][first : first + int(grid.prod())],
        }
        words = model.generate(**one, max_new_tokens=2)[0, -2:].tolist()
        said.append((WORDS[words[0]], WORDS[words[1]]))
        begin = end
    return said


def main(out: str, steps: int = 500, batch_size: int = 32, seed: int = 0) -> tuple[float, bool | None]:
    """Train, export and compare: the share of right answers, and whether transformers gives the same."""
    random.seed(seed)
    torch.manual_seed(seed)
    model = liger_models.from_config(CONFIG)
    optimizer = liger_models.optim.AdamW(model.parameters(), lr=2e-3)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(step / 20, 1.0, (steps - step + 1) / (steps / 3))
        loss = model(**examples(model, batch_size)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    model.save_pretrained(out)
    test = examples(model, 100)
    said = answers(model, test)
    truth = [
        tuple(WORDS[i] for i in test["input_ids"][0, end - 2 : end])
        for end in test["cu_seqlens"].tolist()[1:]
    ]
    share = sum(a == b for a, b in zip(said, truth, strict=True)) / len(truth)
    print(f"{share:.0%} of {len(truth)} new pictures are named rightly, such as {truth[0]}")
    return share, same_in_transformers(out, test, said)


def same_in_transformers(out: str, test: dict[str, torch.Tensor], said: list[tuple[str, str]]) -> bool | None:
    """Whether the export gives the same answers there; None where it is not installed."""
    try:
        from transformers import AutoModelForImageTextToText
    except ImportError:
        return None
    theirs = AutoModelForImageTextToText.from_pretrained(out).eval()
    theirs.generation_config.eos_token_id = None
    same = answers(theirs, test) == said
    print(f"transformers gives {'the same' if same else 'other'} answers")
    return same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    main(args.out, args.steps)
