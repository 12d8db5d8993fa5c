"""Shared parts of the commands that generate text: their options, the loaded model, and streaming with stop
strings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from liger_models.cli.shared import arguments
from liger_models.cli.shared.checkpoints import add_base, find_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from liger_models.training.text.tokenizer import TextTokenizer


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", help=arguments.MODEL)
    add_base(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights (default: the checkpoint's)",
    )
    parser.add_argument(
        "--text-only", action="store_true", help="take only the language model of a multimodal checkpoint"
    )
    parser.add_argument("--device", help="such as cuda, mps or cpu (default: a GPU if there is one)")


def add_sampling(parser: argparse.ArgumentParser, temperature: float, max_new_tokens: int) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add(
        "--max-new-tokens",
        type=arguments.positive,
        default=max_new_tokens,
        metavar="N",
        help="maximum number of new tokens (default: %(default)s)",
    )
    add(
        "--temperature",
        type=_number(0, float("inf")),
        default=temperature,
        metavar="T",
        help="sampling temperature; 0 is greedy decoding (default: %(default)s)",
    )
    add(
        "--top-p",
        type=_number(0, 1, lowest=False),
        default=1.0,
        metavar="P",
        help="nucleus sampling: only the likeliest tokens up to this probability (default: %(default)s)",
    )
    add(
        "--min-p",
        type=_number(0, 1),
        default=0.0,
        metavar="P",
        help="only tokens with this share of the likeliest token's probability (default: %(default)s)",
    )
    add(
        "--repetition-penalty",
        type=_number(0, float("inf"), lowest=False),
        default=1.0,
        metavar="X",
        help="make tokens that occurred before less likely, above 1 (default: %(default)s)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    add("--seed", type=_seed, metavar="N", help="seed for reproducible sampling")


class Speaker:
    """A model with its tokenizer, as the options ask.

    Raises:
        LigerModelsError: it cannot be loaded.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        import liger_models
        from liger_models.convert.checkpoints.adapter import resolve_model
        from liger_models.models.devices import default_device
        from liger_models.training.text.tokenizer import TextTokenizer

        named = find_checkpoint(args.name)
        self.folder, _ = resolve_model(named, args.base)
        self.tokenizer = TextTokenizer(named if (named / "tokenizer.json").is_file() else self.folder)
        self.device = args.device or default_device()
        options: dict[str, Any] = {"dtype": args.dtype, "device": self.device, "text_only": args.text_only}
        self.model = liger_models.from_hub(named, base=args.base, dropout=0.0, **options).eval()
        self.options: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "eos_token_id": self.tokenizer.ends(self.model.special_id("eos_token_id")),
        }
        self.stop = tuple(args.stop)

    def say(self, ids: list[int], seed: int | None, **images: Any) -> str:
        """Print the continuation of a prompt as it is generated; returns it."""
        import torch

        def show(text: str) -> None:
            print(text, end="", flush=True)

        stream = TextStream(self.tokenizer, ids, self.stop, show)
        prompt = torch.tensor([ids], device=self.device)
        try:
            self.model.generate(prompt, seed=seed, on_token=stream, **self.options, **images)
        finally:
            stream.close()
            print()
        return stream.text


class TextStream:
    """Text of the tokens of one sequence, shown as it becomes certain: whole characters, and nothing that may
    turn out to be the beginning of a stop string.

    Attributes:
        text: shown so far, without the stop string.
    """

    def __init__(
        self, tokenizer: TextTokenizer, ids: Sequence[int], stop: Sequence[str], show: Callable[[str], None]
    ) -> None:
        from tokenizers.decoders import DecodeStream

        # A token may be part of a character, and a word's leading space depends on the previous token: the
        # stream was fed the prompt, and buffers bytes until characters are complete.
        self._stream = DecodeStream(ids=list(ids), skip_special_tokens=True)
        self._backend = tokenizer.backend
        self._stop, self._show = tuple(filter(None, stop)), show
        self._held, self.text = "", ""

    def __call__(self, token: Tensor) -> Tensor | None:
        self._held += self._stream.step(self._backend, int(token.item())) or ""
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self._release(min(found))
            self._held = ""
            return token == token
        beginnings = (n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        self._release(len(self._held) - max(beginnings, default=0))
        return None

    def close(self) -> None:
        """Show the rest."""
        self._release(len(self._held))

    def _release(self, count: int) -> None:
        ready, self._held = self._held[:count], self._held[count:]
        self.text += ready
        self._show(ready)


def check_text(text: str, name: str) -> str:
    """The text, if it is valid.

    Raises:
        DataError: bytes of the command line that are not valid text, which arrive as lone surrogates.
    """
    from liger_models.convert.errors import DataError

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} is not valid text in the terminal's encoding") from error
    return text


def _seed(text: str) -> int:
    if abs(value := int(text)) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a 64-bit integer, found {text}")
    return value


def _number(least: float, most: float, lowest: bool = True) -> Callable[[str], float]:
    """A type of option: numbers from `least`, which is allowed only if `lowest`, to `most`."""

    def parse(text: str) -> float:
        value = float(text)
        if not (least <= value <= most) or (value == least and not lowest):
            begin = f"{'at least' if lowest else 'above'} {least:g}"
            end = "" if most == float("inf") else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"must be {begin}{end}, found {text}")
        return value

    return parse
