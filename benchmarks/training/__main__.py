"""Training steps for another program: `liger-models card` starts this.

Reads from standard input {"groups": [[job, ...], ...], "devices": [...], "time_limit": seconds, "ahead":
bool}, a job being the fields of `step.Job`; writes {"job": ..., "result": ...} to standard output, a line
each, as they come. Progress goes to standard error.
"""

import json
import os
import sys
from dataclasses import asdict

from benchmarks.training.pool import measure_all
from benchmarks.training.step import Job


def main() -> None:
    asked = json.load(sys.stdin)
    groups = [[Job(**job) for job in group] for group in asked.pop("groups")]
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is none of ours
    for job, result in measure_all(groups, **asked):
        print(json.dumps({"job": asdict(job), "result": dict(result)}), file=out, flush=True)


if __name__ == "__main__":
    main()
