"""`liger-models generate`: continue a prompt, streaming the text.

With --chat the prompt is a user's message, formatted with the model's chat template; with --image too, where
it is about the images.
"""

import argparse
from typing import TYPE_CHECKING, Any

from liger_models.cli.data_options import add_max_image_pixels, use_max_image_pixels

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from liger_models.layers.specs import ModelSpec
    from liger_models.training.text.tokenizer import TextTokenizer


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("generate", help="continue a prompt", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="hub id, checkpoint folder, or a training run's folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to a chat model")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="PATH",
        help="an image that the prompt is about, for multimodal models; repeatable (needs the extra vision)",
    )
    add_max_image_pixels(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=100,
        metavar="N",
        help="maximum number of new tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy decoding (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=_probability,
        default=1.0,
        metavar="P",
        help="nucleus sampling: only the likeliest tokens up to this probability (default: %(default)s)",
    )
    parser.add_argument("--seed", type=_seed, metavar="N", help="seed for reproducible sampling")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--text-only", action="store_true", help="take only the language model of a multimodal checkpoint"
    )
    parser.add_argument("--device", help="such as cuda or cpu (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    import torch
    from tokenizers.decoders import DecodeStream

    import liger_models
    from liger_models.cli.checkpoints import find_checkpoint
    from liger_models.convert.errors import DataError
    from liger_models.layers.vision.packing import ON_HOST
    from liger_models.training.text.tokenizer import TextTokenizer

    try:  # undecodable bytes of the command line arrive as lone surrogates
        args.prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not valid text in the terminal's encoding") from error
    use_max_image_pixels(args)
    folder = find_checkpoint(args.name)
    tokenizer = TextTokenizer(folder)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"dtype": args.dtype, "device": device, "text_only": args.text_only, "dropout": 0.0}
    model = liger_models.from_hub(folder, **options).eval()
    images: dict[str, Any] = {}
    if args.image:
        ids, images = ask(args.prompt, args.image, Path(folder), model.spec, tokenizer)
        images = {name: x if name in ON_HOST else x.to(device) for name, x in images.items()}
    elif args.chat:
        question = tokenizer.render_question([{"role": "user", "content": args.prompt}])
        [(ids, _)] = tokenizer.encode_spans([question], [[]], add_special_tokens=False)
    else:
        ids = tokenizer.encode(args.prompt)
    # A token may be part of a character, and a word's leading space depends on the previous token: the stream
    # was fed the prompt, and buffers bytes until characters are complete.
    stream = DecodeStream(ids=ids, skip_special_tokens=True)

    def show(token: torch.Tensor) -> None:
        print(stream.step(tokenizer.backend, token.item()) or "", end="", flush=True)

    print(args.prompt, end="\n" if images or args.chat else "", flush=True)
    try:
        model.generate(
            torch.tensor([ids], device=device),
            args.max_new_tokens,
            args.temperature,
            args.top_p,
            eos_token_id=_ends(model.special_id("eos_token_id"), tokenizer.eos_id),
            seed=args.seed,
            on_token=show,
            **images,
        )
    finally:
        print()


def _ends(of_model: Any, of_tokenizer: int | None) -> list[int]:
    """Ids that end the text: the model's, which may include end-of-turn ids, and the end-of-document id used
    in training.
    """
    named = of_model if isinstance(of_model, list) else [of_model]
    return sorted({end for end in (*named, of_tokenizer) if end is not None})


def ask(
    prompt: str, paths: list[str], folder: "Path", spec: "ModelSpec", tokenizer: "TextTokenizer"
) -> "tuple[list[int], dict[str, Tensor]]":
    """Token ids of a question about images, up to the start of the answer, and the model's keyword arguments
    for the images.

    Raises:
        ConfigError: the model does not accept images.
        DataError: an unusable image or question.
    """
    from pathlib import Path

    from liger_models.convert.errors import ConfigError
    from liger_models.images import Preprocessor, find_image

    if spec.vision is None:
        raise ConfigError(
            f"--image: the model in {folder} does not accept images; omit --image and --text-only"
        )
    content = [*({"type": "image"} for _ in paths), {"type": "text", "text": prompt}]
    text = tokenizer.render_question([{"role": "user", "content": content}])
    preprocessor = Preprocessor(folder, spec)
    shown = preprocessor(text, [], [find_image(path, Path()) for path in paths])
    return shown.ids.tolist(), preprocessor.call(shown)


def _seed(text: str) -> int:
    if abs(value := int(text)) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a 64-bit integer, found {text}")
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
