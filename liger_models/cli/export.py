"""`liger-models export`: write a checkpoint, or a training run's newest one, as a Hugging Face checkpoint.

An adapter is merged into its base model.
"""

import argparse

from liger_models.cli.shared.arguments import MODEL
from liger_models.cli.shared.checkpoints import add_base


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a Hugging Face checkpoint of a run or model",
        description=__doc__,
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="MODEL", help=MODEL)
    parser.add_argument("out", metavar="FOLDER", help="output folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: the source's)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=size,
        help="maximum file size, such as 5GB or 500MiB (default: the source's files)",
    )

    parser.add_argument(
        "--quantization",
        choices=("as_loaded", "fp8-block", "nvfp4", "mxfp4"),
        help="format of the layers' matrices, for servers: the source's, or a new one (default: dense)",
    )
    add_base(parser)
    parser.add_argument(
        "--text-only", action="store_true", help="take only the language model of a multimodal checkpoint"
    )


def size(text: str) -> int:
    from liger_models.convert.sizes import parse_size

    return parse_size(text)


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    import torch

    import liger_models
    from liger_models.cli.shared.checkpoints import find_checkpoint
    from liger_models.convert.errors import CheckpointError

    source, out = find_checkpoint(args.src), Path(args.out)
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{out} is the source checkpoint; choose another output folder")
    if source.resolve().is_relative_to(out.resolve()):
        raise CheckpointError(f"{out} holds the source, {source}; choose another output folder")
    model = liger_models.from_hub(source, base=args.base, device="cpu", text_only=args.text_only, dropout=0.0)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    if args.command == "merge" and model.adapter_folder is None:
        raise CheckpointError(
            f"{source} is not an adapter, so there is nothing to merge; see `liger-models export`"
        )
    model.save_pretrained(
        out, max_shard_size=args.max_shard_size, dtype=dtype, quantization=args.quantization
    )
    print(f"{out}: {model.num_parameters():,} parameters from {source}")
