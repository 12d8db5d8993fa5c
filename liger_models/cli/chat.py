"""`liger-models chat`: talk to a model in turns, through its chat template.

Each line is a message; the answer streams. /reset forgets the conversation; /exit, or the end of the input,
ends it.
"""

import argparse

from liger_models.cli.shared.speaking import Speaker, add_model, add_sampling, check_text


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("chat", help="talk to a model", description=__doc__)
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, temperature=0.7, max_new_tokens=1024)


def run(args: argparse.Namespace) -> None:
    speaker = Speaker(args)
    tokenizer, seed = speaker.tokenizer, args.seed
    start = (
        [] if args.system is None else [{"role": "system", "content": check_text(args.system, "--system")}]
    )
    messages = list(start)
    tokenizer.render_question([*start, {"role": "user", "content": "?"}])  # fail before the first question
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            return
        if said in ("/exit", "/quit"):
            return
        if said == "/reset":
            messages = list(start)
        elif said:
            messages.append({"role": "user", "content": check_text(said, "the message")})
            question = tokenizer.render_question(messages)
            [(ids, _)] = tokenizer.encode_spans([question], [[]], add_special_tokens=False)
            messages.append({"role": "assistant", "content": speaker.say(ids, seed)})
            seed = None if seed is None else seed + 1
