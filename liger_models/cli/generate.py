"""`liger-models generate`: continue a prompt; the words appear as they come."""

import argparse


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("generate", help="continue a prompt", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="hub id, checkpoint folder, or a training run's folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to continue")
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=100, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="flattens the choice; 0 takes the likeliest token each time (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=_probability,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens that have this share (default: %(default)s)",
    )
    parser.add_argument("--seed", type=_seed, metavar="N", help="makes the sampling repeatable")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--text-only", action="store_true", help="of a multimodal checkpoint, take the language model alone"
    )
    parser.add_argument("--device", help="such as cuda or cpu (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> None:
    import torch
    from tokenizers.decoders import DecodeStream

    import liger_models
    from liger_models.cli.checkpoints import find_checkpoint
    from liger_models.convert.errors import DataError
    from liger_models.training.tokenizer import TextTokenizer

    try:  # bytes of the command line that are no text arrive as halves of surrogate pairs
        args.prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not valid text in the terminal's encoding") from error
    folder = find_checkpoint(args.name)
    tokenizer = TextTokenizer(folder)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"dtype": args.dtype, "device": device, "text_only": args.text_only, "dropout": 0.0}
    model = liger_models.from_hub(folder, **options).eval()
    ids = tokenizer.encode(args.prompt)
    # A token may be part of a character, and a word's leading space depends on the token before it: the
    # stream has seen the prompt, and holds bytes back until they are whole.
    stream = DecodeStream(ids=ids, skip_special_tokens=True)

    def show(token: torch.Tensor) -> None:
        print(stream.step(tokenizer.backend, token.item()) or "", end="", flush=True)

    print(args.prompt, end="", flush=True)
    try:
        model.generate(
            torch.tensor([ids], device=device),
            args.max_new_tokens,
            args.temperature,
            args.top_p,
            eos_token_id=tokenizer.eos_id,
            seed=args.seed,
            on_token=show,
        )
    finally:
        print()


def _seed(text: str) -> int:
    if abs(value := int(text)) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a number of 64 bits, found {text}")
    return value


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def _temperature(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must not be negative, found {text}")
    return value


def _probability(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, found {text}")
    return value
