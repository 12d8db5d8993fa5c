"""`liger-models card`: check families and write the results to docs/families, in a checkout.

For each family, transformers writes a tiny random checkpoint, which is loaded, saved, compared with
transformers, used for generation, trained, resumed and exported. On machines with GPUs, a training step at
the family's real sizes is benchmarked against transformers and liger-kernel, one family per GPU at a time;
--compiled also measures these under torch.compile. Results that this machine cannot produce are kept from the
existing card. Each card is written as soon as it has a new result. At the end (at once if no family is
given), the pages generated from the registry and the cards are updated.

Exit code 1 if a check failed.
"""

import argparse
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "card",
        help="check families and write their cards (in a checkout)",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="a model_type; see `list`")
    parser.add_argument("--all", action="store_true", help="every family")
    parser.add_argument(
        "--only",
        action="append",
        metavar="CHECK",
        help="run only this check, such as training_step (repeatable)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="for the training step: also measure the other libraries under torch.compile (minutes each)",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="for the training step: time limit for all families; the others keep their cards",
    )
    parser.add_argument(
        "--repository",
        metavar="FOLDER",
        type=Path,
        default=Path(__file__).parents[2],
        help="the checkout with docs/families (default: the one that contains this installation)",
    )


def run(args: argparse.Namespace) -> int:
    import importlib.util
    import sys
    from functools import partial

    from tqdm import tqdm

    from liger_models.architectures import Architecture, find_architecture, list_architectures
    from liger_models.cards import training_step
    from liger_models.cards.card import make_card, with_training_step
    from liger_models.cards.checks import CHECKS, TRAINING_STEP
    from liger_models.cards.pages import write_pages
    from liger_models.cards.results import Card, Line, card_path, read_card
    from liger_models.convert.errors import LigerModelsError

    if not (args.repository / "README.md").is_file():
        raise LigerModelsError(
            f"{args.repository} is not a checkout of liger_models; pass one with --repository"
        )
    every = [*list_architectures(), *list_architectures(vision=True, audio=True)]
    names = every if args.all else args.families
    families = [find_architecture(name) for name in names]
    if families and importlib.util.find_spec("transformers") is None:
        raise LigerModelsError("transformers is not installed: pip install 'liger_models[hf]'")
    checks = args.only or list(CHECKS)
    if unknown := set(checks) - CHECKS.keys():
        raise LigerModelsError(f"found --only {', '.join(sorted(unknown))}; expected {', '.join(CHECKS)}")
    cards: dict[str, Card] = {}

    def show(family: Architecture, line: Line) -> None:
        verdict = {True: "passed", False: "FAILED", None: "not run"}[line.passed]
        reason = line.values.get("error") or line.values.get("not_run") or ""
        reason = f" ({reason})" if reason else ""
        tqdm.write(f"{family.model_type}: {CHECKS[line.check].title}: {verdict}{reason}")

    def keep(family: Architecture, card: Card) -> None:
        cards[family.model_type] = card
        card.write(card_path(family.model_type, args.repository))

    with tqdm(families, disable=len(families) < 2, unit="family", file=sys.stderr) as bar:
        for family in bar:
            bar.set_postfix_str(family.model_type)
            earlier = read_card(family.model_type, args.repository)
            keep(
                family,
                make_card(family, args.repository, earlier, checks, partial(show, family)),
            )
    if TRAINING_STEP in checks:
        measured = training_step.measure(families, args.repository, None, args.compiled, args.within)
        for family, found in measured:
            keep(family, with_training_step(cards[family.model_type], family, found))
            show(family, cards[family.model_type].lines[-1])
    for path in write_pages(args.repository, args.families or None):
        print(f"wrote {path}")
    return 0 if all(card.passed for card in cards.values()) else 1
