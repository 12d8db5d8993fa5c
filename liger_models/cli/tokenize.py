"""`liger-models tokenize`: tokenize data into a corpus in advance, and report its contents and packing."""

from __future__ import annotations

import argparse
from typing import Any

from liger_models.cli.shared.arguments import TOKENIZER
from liger_models.cli.shared.data_options import (
    TOKENIZED,
    add_data,
    add_sources,
    add_train_on,
    use_max_image_pixels,
)

DESCRIPTION = """\
Tokenize data as `train` would, into the cache that `train` uses, or into a folder:
  liger-models tokenize Qwen/Qwen3-0.6B --data texts/ --output corpus
  liger-models train Qwen/Qwen3-0.6B --data corpus ...
Prints what was read and how well it packs into rows of --seq-len.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "tokenize",
        help="tokenize data in advance, and show how it packs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("tokenizer", metavar="MODEL", help=TOKENIZER)
    add_sources(parser)
    add_data(parser)
    add("--output", metavar="FOLDER", help="write the corpus to this folder, for --data")
    add("--seq-len", type=int, default=2048, metavar="N", help="tokens per row (default: %(default)s)")
    add(
        "--objective",
        choices=TOKENIZED,
        default="sft",
        help="objective that the data are for (default: %(default)s)",
    )
    add_train_on(parser)
    add("--truncate", action="store_true", help="cut examples with a prompt at --seq-len")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the packing order (default: 0)",
    )


def run(args: argparse.Namespace) -> None:
    from liger_models.cli.shared.checkpoints import find_tokenizer
    from liger_models.convert.errors import ConfigError
    from liger_models.images import Preprocessor
    from liger_models.training.config import TrainConfig
    from liger_models.training.data import Stream, build_corpus, describe, load_documents
    from liger_models.training.inputs import can_share_prompts, find_spec
    from liger_models.training.objectives import OBJECTIVES
    from liger_models.training.text.tokenizer import TextTokenizer

    if args.seq_len < 1:
        raise ConfigError(f"seq_len is {args.seq_len}; expected a whole number of 1 or more")
    use_max_image_pixels(args)
    tokenizer = TextTokenizer(find_tokenizer(args.tokenizer))
    # `train` checks that the model has embeddings for its ids.
    options: dict[str, Any] = {"seq_len": args.seq_len, "vocab_size": 1 << 31, "truncate": args.truncate}
    options |= {"train_on": args.train_on, "columns": args.columns}
    options["form"] = OBJECTIVES[args.objective].form
    spec = find_spec(tokenizer.folder)
    options["images"] = Preprocessor(tokenizer.folder, spec) if spec and spec.vision else None
    defaults = TrainConfig(args.tokenizer, tuple(args.data), output="", steps=1)
    options["share"] = spec is None or can_share_prompts(spec, defaults)
    data = args.data
    if args.output:
        build_corpus(args.output, data, tokenizer, split=args.split, **options)
        data, args.split = [args.output], None
    documents = load_documents(
        data, tokenizer, cache=args.data_cache, verify=args.verify_data, split=args.split, **options
    )
    stream = Stream(documents, args.seq_len, args.seed)
    for part in documents.parts:
        print(part.corpus.folder)
    print(describe(documents.counts))
    print(
        f"one epoch: {stream.rows_of(0):,} rows of {args.seq_len:,} tokens, {stream.efficiency():.2%} filled"
    )
