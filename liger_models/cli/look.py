"""`liger-models look`: show the tokens that are trained on."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from liger_models.cli.shared.arguments import TOKENIZER
from liger_models.cli.shared.data_options import (
    TOKENIZED,
    add_columns,
    add_max_image_pixels,
    add_train_on,
    use_max_image_pixels,
)

if TYPE_CHECKING:
    from liger_models.training.data import Shown
    from liger_models.training.text.tokenizer import TextTokenizer

DESCRIPTION = """\
Show what is trained on, token by token: trained tokens in colour, the others dim, or between marks where the
output is not a terminal (or NO_COLOR is set). The data are read and tokenized as `train` would:
  liger-models look chats.jsonl --model Qwen/Qwen3-0.6B --train-on last
  liger-models look pairs.jsonl --model Qwen/Qwen3-0.6B --objective dpo
"""
GREEN, OTHER_GREEN, DIM, BOLD, END = "\x1b[32m", "\x1b[92m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "look",
        help="show the tokens that are trained on",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", nargs="+", metavar="DATA", help="sources as for `train --data`")
    add("--model", required=True, metavar="MODEL", help=TOKENIZER)
    add("--examples", type=int, default=3, metavar="N", help="records to show (default: %(default)s)")
    add(
        "--rows",
        type=int,
        default=0,
        metavar="N",
        help="show this many packed rows instead, and where documents begin in them; tokenizes all data",
    )
    add(
        "--tokens",
        type=int,
        default=2000,
        metavar="N",
        help="tokens to print of a sequence (default: %(default)s)",
    )
    add("--objective", choices=TOKENIZED, default="sft", help="objective of the data (default: %(default)s)")
    add_train_on(parser)
    add_columns(parser)
    add("--seq-len", type=int, default=2048, metavar="N", help="tokens per row (default: %(default)s)")
    add("--truncate", action="store_true", help="in rows, cut examples with a prompt at --seq-len")
    add("--seed", type=int, default=0, metavar="N", help="seed of the rows' order (default: 0)")
    add("--data-cache", metavar="FOLDER", help="cache for tokenized data, for --rows")
    add_max_image_pixels(parser)


def run(args: argparse.Namespace) -> None:
    from collections import Counter

    from liger_models.cli.shared.checkpoints import find_tokenizer
    from liger_models.convert.checkpoints.hub import local_path
    from liger_models.convert.errors import ConfigError, DataError
    from liger_models.images import Preprocessor
    from liger_models.training.data import describe, load_documents, preview_records, preview_rows
    from liger_models.training.data.corpora.corpus import is_corpus
    from liger_models.training.inputs import find_spec
    from liger_models.training.objectives import OBJECTIVES
    from liger_models.training.text.tokenizer import TextTokenizer

    for name, least in (("examples", 1), ("rows", 0), ("tokens", 1), ("seq_len", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"{name} is {getattr(args, name)}; expected a whole number of {least} or more")
    use_max_image_pixels(args)
    tokenizer = TextTokenizer(find_tokenizer(args.model))
    spec = find_spec(tokenizer.folder)
    options: dict[str, Any] = {
        "train_on": args.train_on,
        "images": Preprocessor(tokenizer.folder, spec) if spec and spec.vision else None,
        "form": OBJECTIVES[args.objective].form,
        "columns": args.columns,
        "split": args.split,
    }
    screen = _Screen(tokenizer, args.tokens)
    if args.rows:
        documents = load_documents(
            args.data,
            tokenizer,
            seq_len=args.seq_len,
            vocab_size=1 << 31,
            truncate=args.truncate,
            cache=args.data_cache,
            **options,
        )
        for row in preview_rows(documents, args.seq_len, args.seed, args.rows):
            screen.show(row)
        counts = documents.counts
    else:
        if made := [name for name in args.data if is_corpus(local_path(name))]:
            raise ConfigError(f"{made[0]} is a corpus, whose records are joined to rows; add --rows 3")
        counts = Counter()
        screen.show(preview_records(args.data, tokenizer, args.examples, counts, **options))
    if not screen.sequences:
        raise DataError(f"{' '.join(args.data)}: there are no records; expected text or records")
    screen.total(describe(counts) if counts else "")


class _Screen:
    """Prints sequences, with at most `most` tokens of each, and counts all of their tokens."""

    def __init__(self, tokenizer: TextTokenizer, most: int) -> None:
        import os
        import sys

        self.tokenizer, self.most = tokenizer, most
        self.sequences = self.tokens = self.trained = 0
        self.coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.encoding = sys.stdout.encoding or "utf-8"
        self.marks = ("⟦", "⟧") if self._fits("⟦⟧") else ("[[", "]]")

    def show(self, sequences: Iterable[Shown]) -> None:
        from liger_models.training.data import pieces_of_text

        for shown in sequences:
            trained, tokens = sum(shown.trained), len(shown.ids)
            self.sequences, self.tokens, self.trained = (
                self.sequences + 1,
                self.tokens + tokens,
                self.trained + trained,
            )
            title = f"{shown.title}: {tokens:,} tokens, {trained:,} trained, {tokens - trained:,} masked"
            self._print(f"{BOLD}{title}{END}" if self.coloured else f"--- {title}")
            cut = shown._replace(ids=shown.ids[: self.most], trained=shown.trained[: self.most])
            pieces = pieces_of_text(self.tokenizer, cut)
            self._print(self._in_colour(pieces) if self.coloured else self._marked(pieces))
            if tokens > self.most:
                left = sum(shown.trained[self.most :])
                self._print(f"... and {tokens - self.most:,} more tokens, {left:,} of them trained")
            self._print("")

    def total(self, counts: str) -> None:
        share = self.trained / max(1, self.tokens)
        sequences = f"{self.sequences:,} sequence{'s' * (self.sequences != 1)}"
        self._print(
            f"{sequences}: {self.tokens:,} tokens, {self.trained:,} trained ({share:.1%}), "
            f"{self.tokens - self.trained:,} masked" + (f"; {counts}" if counts else "")
        )
        if self.tokens and not self.trained:
            self._print("none of this is trained on")

    def _in_colour(self, pieces: Iterable[tuple[str, bool]]) -> str:
        """Colour trained tokens in two alternating greens, and make their line breaks visible."""
        found = []
        for number, (text, trained) in enumerate(pieces):
            colour = (GREEN, OTHER_GREEN)[number % 2] if trained else DIM
            found.append(colour + (text.replace("\n", "↵\n") if trained else text) + END)
        return "".join(found)

    def _marked(self, pieces: Iterable[tuple[str, bool]]) -> str:
        """Put marks around each run of trained tokens."""
        found, inside = [], False
        for text, trained in (*pieces, ("", False)):
            found.append(self.marks[inside] if trained is not inside else "")
            found.append(text)
            inside = trained
        return "".join(found)

    def _print(self, text: str) -> None:
        print(
            text if self._fits(text) else text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        )

    def _fits(self, text: str) -> bool:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return False
        return True
