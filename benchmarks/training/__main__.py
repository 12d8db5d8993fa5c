"""Training steps for another program: `liger-models card` starts this.

Reads from standard input {"groups": [[job, ...], ...], "devices": [...], "time_limit": seconds, "ahead":
bool, "within": seconds or null, "together": number}, where a job is the fields of `step.Job`; writes {"job":
..., "result": ...} to standard output, one line each, when ready. Progress goes to standard error.
"""

import json
import math
import os
import sys
import time
from dataclasses import asdict

from benchmarks.training.check import check_alone
from benchmarks.training.pool import begin_to_import, measure_all
from benchmarks.training.step import Job

_SECONDS_TO_CHECK = 16.0


def main() -> None:
    begin_to_import()
    asked = json.load(sys.stdin)
    groups = [[Job(**job) for job in group] for group in asked.pop("groups")]
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep libraries' output out of ours
    within = asked.pop("within") or math.inf
    end = time.monotonic() + within
    rows = []
    to_check = _SECONDS_TO_CHECK if within > 8 * _SECONDS_TO_CHECK else 0.0
    for job, result in measure_all(groups, **asked, within=within - to_check):
        rows.append((job, result))
        print(json.dumps({"job": asdict(job), "result": dict(result)}), file=out, flush=True)
    if asked["ahead"] and to_check:  # on GPUs: check the peers with one model
        first = [row for row in rows if row[0].model == rows[0][0].model]
        left = end - time.monotonic()
        print(*check_alone(first, asked["devices"][0], asked["time_limit"], left), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
