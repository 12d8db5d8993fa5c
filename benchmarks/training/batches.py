"""What a model is trained on: random tokens, in sequences or in documents.

| data     | a batch                                                                                      |
|----------|----------------------------------------------------------------------------------------------|
| `full`   | sequences of random tokens without padding, all of them labels                               |
| `padded` | documents of random lengths (median 545), padded to the longest; the first 75% are no labels |
| `packed` | the same documents behind one another in one row, told apart by their position ids           |
"""

from __future__ import annotations

import torch
from torch import Tensor

DATA = ("full", "padded", "packed")


def make_batch(data: str, batch: int, seq: int, vocab_size: int, device: torch.device) -> dict[str, Tensor]:
    """What a model is called with: `batch` sequences of `seq` tokens, or documents of up to as many."""
    generator = torch.Generator().manual_seed(0)
    if data == "full":
        ids = torch.randint(vocab_size, (batch, seq), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}
    lengths = _lengths(batch, seq)
    documents = [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]
    labels = [ids.where(torch.arange(len(ids)) >= int(0.75 * len(ids)), -100) for ids in documents]
    if data == "packed":
        positions = torch.cat([torch.arange(length) for length in lengths])
        row = {"input_ids": torch.cat(documents), "position_ids": positions, "labels": torch.cat(labels)}
        return {name: tensor[None].to(device) for name, tensor in row.items()}
    pad = torch.nn.utils.rnn.pad_sequence
    rows = {
        "input_ids": pad(documents, batch_first=True),
        "attention_mask": pad([torch.ones(length, dtype=torch.long) for length in lengths], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
    return {name: tensor.to(device) for name, tensor in rows.items()}


def count_tokens(data: str, batch: int, seq: int) -> int:
    """Those of a batch that are no padding."""
    return batch * seq if data == "full" else sum(_lengths(batch, seq))


def _lengths(batch: int, seq: int) -> list[int]:
    """Log-normal, as lengths of conversations are."""
    spread = torch.randn(batch, generator=torch.Generator().manual_seed(0)).exp()
    return [int(length.clamp(32, seq)) for length in 545 * spread]
