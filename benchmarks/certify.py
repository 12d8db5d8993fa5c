"""Random compositions of family, parallelism, packing, recomputation, accumulation, adapters and optimizer,
each compared with one process that runs every document by itself: benchmarks/certificate/.

    python -m benchmarks certify --cases 200 --seed 0
    python -m benchmarks certify --case "seed=7 family=llama ranks=2 wrapper=fsdp layout=packed"

The last line says how many hold. A composition that is refused with an error holds, and is counted. One that
fails is reduced to the smallest that still does, and printed as an argument of --case.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.certificate.case import Case, draw, parse, text_families
from benchmarks.certificate.comparison import BOUND, Outcome
from benchmarks.certificate.processes import run_cases
from benchmarks.certificate.shrinking import shrink
from benchmarks.report import machine

SUMMARY = "random compositions of parallelism, packing, recomputation and the rest, against one process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=200, help="number of compositions (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; others follow (%(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no composition after this time")
    parser.add_argument("--family", action="append", metavar="NAME", help="repeatable; all text families")
    parser.add_argument(
        "--ranks", type=int, action="append", choices=(1, 2, 4), help="repeatable; only these"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: a GPU for each process, and NCCL; leaves out those of more processes (%(default)s)",
    )
    parser.add_argument("--case", type=_case, action="append", help="run this composition, as printed")
    parser.add_argument(
        "--fault", type=float, default=1.0, help="multiply the first process's losses, to see failures"
    )


def run(args: argparse.Namespace) -> int:
    families = args.family or text_families()
    if unknown := set(families) - set(text_families()):
        print(f"no text family {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    cases = args.case or [draw(seed, families) for seed in range(args.seed, args.seed + args.cases)]
    cases = [case for case in cases if not args.ranks or case.ranks in args.ranks]
    if args.device == "cuda":
        cases = [case for case in cases if case.ranks <= torch.cuda.device_count()]
    begun, failures, refused = time.monotonic(), [], collections.Counter[str]()
    rows = []
    for case, outcome in tqdm(
        run_cases(cases, args.fault, args.device), total=len(cases), desc="certify", unit="case"
    ):
        rows.append({"case": case.text(), **outcome._asdict()})
        if outcome.refused:
            refused[outcome.refused] += 1
        if not outcome.holds:
            failures.append(_report(case, outcome, args.fault, args.device))
        if args.seconds and time.monotonic() - begun > args.seconds:
            break
    seconds = time.monotonic() - begun
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "certificate.json").write_text(json.dumps(rows, indent=1))
    print(machine(torch.device(args.device)))
    for message, count in refused.most_common():
        print(f"refused {count} x: {message}")
    print(
        f"{len(rows) - len(failures)} of {len(rows)} compositions hold ({sum(refused.values())} of them "
        f"refused), within {BOUND:.0e} of one process in float64, in {seconds:.0f} s"
    )
    return int(bool(failures))


def _report(case: Case, outcome: Outcome, fault: float, device: str) -> str:
    first = f'FAILS --case "{case.text()}": {outcome.worst}'
    tqdm.write(first)
    smallest, found = shrink(case, outcome, fault, device)
    if smallest == case:
        return first
    second = f'  smallest: --case "{smallest.text()}": {found.worst}'
    tqdm.write(second)
    return f"{first}\n{second}"


def _case(text: str) -> Case:
    try:
        return parse(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
