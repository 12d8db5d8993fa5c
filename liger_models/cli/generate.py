"""`liger-models generate`: answer a prompt, or continue a text, streaming.

If the tokenizer has a chat template, the prompt is a user's message; --raw continues it as text instead.
"""

import argparse
from typing import TYPE_CHECKING, Any

from liger_models.cli.shared.data_options import add_max_image_pixels, use_max_image_pixels
from liger_models.cli.shared.speaking import Speaker, add_model, add_sampling, check_text

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from liger_models.layers.specs import ModelSpec
    from liger_models.training.text.tokenizer import TextTokenizer


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="answer a prompt or continue a text", description=__doc__)
    add_model(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="a message, or text to continue")
    parser.add_argument("--system", metavar="TEXT", help="system message, for the chat template")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as text, without the chat template"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="PATH",
        help="an image that the prompt is about, for multimodal models; repeatable (needs the extra vision)",
    )
    add_max_image_pixels(parser)
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="number of answers (default: %(default)s)"
    )
    add_sampling(parser, temperature=0.0, max_new_tokens=100)


def run(args: argparse.Namespace) -> None:
    from liger_models.convert.errors import ConfigError
    from liger_models.layers.vision.packing import ON_HOST

    prompt = check_text(args.prompt, "the prompt")
    if args.samples < 1 or (args.samples > 1 and args.temperature == 0):
        raise ConfigError(
            f"--samples {args.samples}: expected 1 or more; several need a --temperature above 0, since "
            "greedy decoding repeats itself"
        )
    if args.raw and (args.system is not None or args.image):
        raise ConfigError("--raw continues plain text; omit --system and --image")
    use_max_image_pixels(args)
    speaker = Speaker(args)
    tokenizer = speaker.tokenizer
    in_turns = not args.raw and tokenizer.has_chat_template
    images: dict[str, Any] = {}
    if args.system is not None and not in_turns:
        raise ConfigError(f"--system needs a chat template, and the tokenizer in {tokenizer.folder} has none")
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    if args.image:
        ids, images = ask(prompt, args.image, speaker.folder, speaker.model.spec, tokenizer, system)
        images = {name: x if name in ON_HOST else x.to(speaker.device) for name, x in images.items()}
    elif in_turns:
        question = tokenizer.render_question([*system, {"role": "user", "content": prompt}])
        [(ids, _)] = tokenizer.encode_spans([question], [[]], add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    for number in range(args.samples):
        if args.samples > 1:
            print(f"--- {number + 1} of {args.samples}")
        print(prompt, end="\n" if images or in_turns else "", flush=True)
        speaker.say(ids, None if args.seed is None else args.seed + number, **images)


def ask(
    prompt: str,
    paths: list[str],
    folder: "Path",
    spec: "ModelSpec",
    tokenizer: "TextTokenizer",
    system: list[dict[str, Any]],
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
    text = tokenizer.render_question([*system, {"role": "user", "content": content}])
    preprocessor = Preprocessor(folder, spec)
    shown = preprocessor(text, [], [find_image(path, Path()) for path in paths])
    return shown.ids.tolist(), preprocessor.call(shown)
