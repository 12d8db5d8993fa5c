"""`liger-models init`: create a checkpoint with random weights in the Hugging Face format."""

import argparse


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "init", help="write a checkpoint with random weights from a preset", description=__doc__
    )
    parser.add_argument("preset", metavar="PRESET", help="a preset's name (`liger-models list` shows them)")
    parser.add_argument("out", metavar="FOLDER", help="output folder")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="a folder with tokenizer.json: its vocabulary size and ids replace the preset's, and its files "
        "are copied to the output folder",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    import torch

    import liger_models
    from liger_models.cli.shared.checkpoints import bytes_text
    from liger_models.convert.errors import CheckpointError
    from liger_models.presets import preset
    from liger_models.training.checkpoints.saving import write
    from liger_models.training.checkpoints.state import Trained, describe_export
    from liger_models.training.text.tokenizer import TextTokenizer

    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder; choose another or remove it first")
    if args.tokenizer:
        tokenizer = TextTokenizer(args.tokenizer)
        config = preset(
            args.preset, vocab_size=tokenizer.vocab_size, bos=tokenizer.bos_id, eos=tokenizer.eos_id
        )
    else:
        config = preset(args.preset)
    torch.manual_seed(args.seed)
    model = liger_models.from_config(config, dtype=args.dtype)
    if args.tokenizer:
        write(describe_export(out, Trained.of_model(model), tokenizer.folder))
    else:
        model.save_pretrained(out)
    count = model.num_parameters()
    size = bytes_text(count * model.dtype.itemsize)
    print(f"{out}: {args.preset}, {count:,} random parameters in {args.dtype}, {size}")
