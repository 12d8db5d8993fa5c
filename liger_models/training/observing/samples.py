"""Samples of what a model writes during a run: answers to fixed prompts, at each evaluation.

    samples = Samples(read_prompts("prompts.txt", tokenizer), tokenizer, output)
    samples.generate(model, step, device, print)

OUTPUT/samples.jsonl receives {"step", "time", "prompt", "completion"} for each prompt. Decoding is greedy, so
that only the weights change between samples of different steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import ConfigError, DataError, TrainingError
from liger_models.training.observing.display import timestamp
from liger_models.training.observing.metrics import read_metrics
from liger_models.training.text.tokenizer import TextTokenizer

SAMPLES = "samples.jsonl"
NEW_TOKENS = 128
MOST = 64  # prompts
AT_ONCE = 8  # prompts


class SamplePrompt(NamedTuple):
    """A prompt as it was given, and its ids up to where the answer begins."""

    text: str
    ids: list[int]


def read_prompts(given: str, tokenizer: TextTokenizer, positions: int | None) -> list[SamplePrompt]:
    """Read the prompts of a run. With a chat template each is the message of a user.

    Args:
        given: the name of a .txt file with a prompt on each line, or of a .jsonl file with "prompt", text or
            messages, or "messages" on each line; anything else is the text of a prompt.
        positions: the most that the model has.

    Raises:
        ConfigError: a missing or unusable file, or a prompt that is too long.
    """
    asked: list[Any] = [given] if given.strip() else []
    if given.endswith((".txt", ".jsonl")) and not any(map(str.isspace, given)):
        asked = _read(local_path(given, ConfigError))
    if not 0 < len(asked) <= MOST:
        raise ConfigError(f"sample_prompts {given[:50]!r} has {len(asked)} prompts; expected 1 to {MOST}")
    prompts = [_encode(one, tokenizer) for one in asked]
    for prompt in prompts:
        if positions is not None and len(prompt.ids) >= positions:
            raise ConfigError(
                f"sample_prompts: the prompt {prompt.text[:50]!r} has {len(prompt.ids)} tokens, but the "
                f"model has {positions} positions"
            )
    return prompts


def _read(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"sample_prompts {path} cannot be read ({reason})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".txt":
        return [line for _, line in numbered]
    return [_parse(line, f"{path}, line {number}") for number, line in numbered]


def _parse(line: str, where: str) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    asked = record.get("prompt", record.get("messages")) if isinstance(record, dict) else None
    if not isinstance(asked, (str, list)) or not asked:
        raise ConfigError(f'{where}: expected a "prompt", text or messages, or "messages"')
    return asked


def _encode(asked: Any, tokenizer: TextTokenizer) -> SamplePrompt:
    if isinstance(asked, str) and not tokenizer.has_chat_template:
        return SamplePrompt(asked, tokenizer.encode(asked))
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    try:
        text = tokenizer.render_question(messages)
    except DataError as error:
        raise ConfigError(f"sample_prompts: {error}") from error
    [(ids, _)] = tokenizer.encode_spans([text], [[]], add_special_tokens=False)
    shown = asked if isinstance(asked, str) else str(asked[-1].get("content"))
    return SamplePrompt(shown, ids)


def _shortened(text: str, most: int = 240) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")


class Samples:
    """Prompts, and the file of the answers.

    Args:
        positions: the most that the model has, within which answers end.
        output: the run's folder.
    """

    def __init__(
        self,
        prompts: Sequence[SamplePrompt],
        tokenizer: TextTokenizer,
        positions: int | None,
        output: Path,
    ) -> None:
        self.prompts, self.tokenizer, self.path = prompts, tokenizer, output / SAMPLES
        self.positions = positions

    def begin(self, resumed_step: int | None) -> None:
        """Start a new file, or keep the samples up to and including `resumed_step`."""
        kept = [r for r in read_metrics(self.path) if resumed_step is not None and r["step"] <= resumed_step]
        self._write(kept, "w")

    @torch.no_grad()
    def generate(self, model: Any, step: int, device: torch.device, say: Callable[[str], object]) -> None:
        """Answer the prompts, greedily, and write and print the answers."""
        ends = self.tokenizer.ends(model.special_id("eos_token_id"))
        records = []
        for first in range(0, len(self.prompts), AT_ONCE):
            prompts = self.prompts[first : first + AT_ONCE]
            longest = max(len(prompt.ids) for prompt in prompts)
            padding = [longest - len(prompt.ids) for prompt in prompts]
            ids = [[0] * n + prompt.ids for n, prompt in zip(padding, prompts, strict=True)]
            mask = [[0] * n + [1] * len(prompt.ids) for n, prompt in zip(padding, prompts, strict=True)]
            room = NEW_TOKENS if self.positions is None else min(NEW_TOKENS, self.positions - longest)
            out = model.generate(
                torch.tensor(ids, device=device),
                room,
                attention_mask=torch.tensor(mask, device=device),
                eos_token_id=ends,
            )
            for prompt, answer in zip(prompts, out[:, longest:].tolist(), strict=True):
                end = next((n for n, token in enumerate(answer) if token in ends), len(answer))
                text = self.tokenizer.decode(answer[:end])
                records.append({"step": step, "time": timestamp(), "prompt": prompt.text, "completion": text})
                say(f"sample at step {step}: {_shortened(prompt.text)} -> {_shortened(text)}")
        self._write(records, "a")

    def _write(self, records: list[dict[str, Any]], mode: str) -> None:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written ({error.strerror or error})") from error
