"""Data and settings for tests of transformers' Trainer with plain gradient descent."""

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS, LENGTH = 8, 12
PLAIN = {
    "max_steps": 2,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_rows(vocab_size: int) -> Iterator[dict[str, Tensor]]:
    """Make sequences with very different label counts, as in fine-tuning."""
    generator = torch.Generator().manual_seed(0)
    for row in range(ROWS):
        ids = torch.randint(3, vocab_size, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 10 - 3 * (row % 4)] = -100
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
