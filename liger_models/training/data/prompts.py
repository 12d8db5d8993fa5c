"""Prompts for sampling: records with a "prompt" (text, or messages) whose other columns go to the rewards.

All prompts of a run are held in memory; `MOST_BYTES` bounds them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.training.data.documents import Counts
from liger_models.training.data.permutation import Permutation
from liger_models.training.data.reading.records import Conversation
from liger_models.training.data.reading.schema import PROMPT, Schema, parse_columns
from liger_models.training.data.reading.sources import find_sources, with_split
from liger_models.training.data.steps import StepData
from liger_models.training.data.stream import Position
from liger_models.training.text.tokenizer import TextTokenizer

MOST_BYTES = 1 << 32  # of prompts and columns, as JSON


@dataclass(frozen=True)
class Prompt:
    """A prompt: its ids up to where the answer begins, and the record."""

    ids: list[int]
    said: Any  # text or messages
    columns: dict[str, Any]


@dataclass
class PromptBatch:
    """Micro-batch of prompts. `lengths` [prompts * group] is part of the step's counts: once the answers are
    sampled, they are added to it. The objective keeps the samples in `samples`.
    """

    prompts: list[Prompt]
    lengths: Tensor
    samples: Any = field(default=None, repr=False)

    def to(self, device: torch.device) -> PromptBatch:
        return self


class Prompts:
    """The prompts of a run, in an order computed from the seed and the epoch.

    Args:
        names, columns, split: of the data, as `load_documents` takes them.
        longest: tokens that a prompt may have.

    Raises:
        DataError: unusable data, with file and line.
    """

    blocks = None  # read at once, not streamed

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: TextTokenizer,
        *,
        longest: int,
        columns: str | None = None,
        split: str | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        schema = Schema((PROMPT,), parse_columns(columns))
        sources = [source for name in with_split(names, split) for source in find_sources(name, self.counts)]
        self.prompts: list[Prompt] = []
        digest, size = hashlib.sha256(tokenizer.digest().encode()), 0
        for source in sources:
            for record in source.records(self.counts, lambda _: None, schema):
                text = json.dumps([_said(record.content), dict(record.options)], default=str)
                digest.update(text.encode())
                size += len(text)
                if size > MOST_BYTES:
                    raise DataError(
                        f"{record.where}: the prompts take more than {MOST_BYTES:,} bytes; give fewer"
                    )
                ids = _ids(tokenizer, record.content, record.where)
                if not 0 < len(ids) <= longest:
                    raise DataError(
                        f"{record.where}: the prompt has {len(ids)} tokens; expected 1 to {longest}, "
                        "which is --seq-len less --max-new-tokens"
                    )
                self.prompts.append(Prompt(ids, _said(record.content), dict(record.options)))
        if not self.prompts:
            raise DataError(f"there is no prompt in {', '.join(names)}")
        self.counts["prompts"] = len(self.prompts)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        return self.digest

    def steps(
        self, position: Position, seed: int, batch_size: int, accumulation: int, group: int, updates: int
    ) -> Iterator[StepData]:
        """Yield steps forever; each step's batches come `updates` times, and the position moves on with the
        last of them.
        """
        epoch, row = position
        while True:
            before, prompts = Position(epoch, row), list[Prompt]()
            while len(prompts) < batch_size * accumulation:
                if row == len(self):
                    epoch, row = epoch + 1, 0
                place = Permutation(len(self), f"epoch {epoch} of seed {seed}")(torch.tensor([row]))
                prompts.append(self.prompts[int(place)])
                row += 1
            lengths = torch.tensor([len(prompt.ids) for prompt in prompts for _ in range(group)])
            batches = [
                PromptBatch(
                    prompts[first : first + batch_size], lengths[first * group :][: batch_size * group]
                )
                for first in range(0, len(prompts), batch_size)
            ]
            counts = Counts(lengths, 0)
            for number in range(updates):
                after = Position(epoch, row) if number == updates - 1 else before
                yield StepData(batches, counts, False, after)


def _said(content: Any) -> Any:
    return content.messages if isinstance(content, Conversation) else content


def _ids(tokenizer: TextTokenizer, content: Any, where: str) -> list[int]:
    if isinstance(content, str):
        return tokenizer.encode(content)
    if content.images:
        raise DataError(f"{where}: the prompt has images, which GRPO does not sample from")
    try:
        text = tokenizer.render_question(content.messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    [(ids, _)] = tokenizer.encode_spans([text], [[]], add_special_tokens=False)
    return ids
