"""The benchmarks' command line.

    python -m benchmarks [ops]    kernels against liger-kernel, torch.compile and eager PyTorch
    python -m benchmarks recurrent  scans of recurrent mixers against flash-linear-attention and mamba_ssm
    python -m benchmarks tune     alternative tile sizes of our kernels
    python -m benchmarks train    a training step against transformers, and transformers with liger-kernel
    python -m benchmarks vision   a training step of vision-language models, against the same
    python -m benchmarks long     peak memory of training steps with long contexts, against the plan
    python -m benchmarks lengths  the longest sequences of DPO, KTO, GRPO and SFT, against TRL
    python -m benchmarks lora     a training step with LoRA against transformers and PEFT
    python -m benchmarks kept     a step with LoRA over the bits of a quantised checkpoint, loading, decoding
    python -m benchmarks prompt   answers with a shared prompt, against separate sequences
    python -m benchmarks invariant  batch-invariant scores and steps, against ordinary ones
    python -m benchmarks stream   a stream of weights to an inference engine, against copying its bytes
    python -m benchmarks parallel  a training step of a model sharded over several GPUs
    python -m benchmarks resume    a checkpoint written by many processes and resumed by half of them
    python -m benchmarks node      everything on a machine with several GPUs, in under ten minutes
    python -m benchmarks generate  generation against transformers
    python -m benchmarks data     tokenizing and reading large data sets in little memory
    python -m benchmarks load     loading a checkpoint against transformers
    python -m benchmarks optimizer  a step of AdamW with clipping against torch's
    python -m benchmarks certify  compositions of parallelism, packing and the rest, against one process
    python -m benchmarks devices  every kernel compiled for twelve GPUs, without having them
    python -m benchmarks learn    training with each representation of bfloat16 weights, against float32

Each prints Markdown tables with the machine and the versions, and writes them with a CSV to --out. A library
that is not installed becomes a note. `liger-models bench` is the same.
"""

import argparse
import sys

from benchmarks import (
    certify,
    data,
    devices,
    generate,
    invariant,
    kept,
    learn,
    lengths,
    load,
    long,
    lora,
    node,
    ops,
    optimizer,
    parallel,
    prompt,
    recurrent,
    resume,
    stream,
    train,
    tune,
    vision,
)

COMMANDS = {
    "ops": ops,
    "recurrent": recurrent,
    "tune": tune,
    "train": train,
    "vision": vision,
    "long": long,
    "lengths": lengths,
    "lora": lora,
    "kept": kept,
    "prompt": prompt,
    "invariant": invariant,
    "stream": stream,
    "parallel": parallel,
    "resume": resume,
    "node": node,
    "generate": generate,
    "data": data,
    "load": load,
    "optimizer": optimizer,
    "devices": devices,
    "learn": learn,
    "certify": certify,
}


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    return COMMANDS[args.command].run(args)


def parse(argv: list[str]) -> argparse.Namespace:
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["ops", *argv]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(command)
        command.add_argument(
            "--out", default="benchmark-results", help="folder for the results (%(default)s)"
        )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
