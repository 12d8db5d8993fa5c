"""A process that dies, hangs or fails, and a full disk, once each; run faults.py by hand for many moments."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import Fork

from liger_models.training.processes import watch

FAULTS = Path(__file__).with_name("faults.py")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_the_others_end_and_name_it_and_the_run_resumes_with_the_same_bits(tmp_path, request):
    kinds = ["die", "hang"]
    if request.config.getoption("--all-families"):  # by day saves of one process meet full disks
        kinds = ["full", *kinds, "fail"]
    arguments = ["--moments", "1", *(word for kind in kinds for word in ("--kind", kind))]
    code = f"import runpy; runpy.run_path({str(FAULTS)!r}, run_name='__main__')"
    fork = Fork("code", code, *arguments, output=tmp_path / "output")
    ended, printed = fork.wait(500), fork.output.read_text()
    assert ended == 0, printed
    assert re.findall(r"^(\w+): \{\"faults\": 1,", printed, re.MULTILINE) == kinds


@pytest.mark.parametrize("done", [True, False])
def test_a_finished_first_process_is_not_reported_as_dead(done):
    """Its store ends with it; the remaining processes then watch only themselves."""

    class Store(dict):
        gone = False

        def set(self, name, value):
            if self.gone:
                raise RuntimeError("Broken pipe")
            self[name] = value

        def multi_get(self, names):
            return [self[name] for name in names]

    mine = watch.Watch(SimpleNamespace(size=2, rank=1, main=False), patience=60.0)
    mine._store = Store({"0": json.dumps(asdict(watch._Status(done=done)))})
    now = time.monotonic()
    mine._seen, mine._moved = {0: (-1, now), 1: (-1, now)}, (-1, now)
    mine.mark("the end of the run")
    assert mine._find_problem() is None
    mine._store.gone = True
    if not done:
        assert mine._find_problem().startswith("process 0 is dead or stopped: its store does not answer")
        return
    assert mine._find_problem() is None
    marks, since = mine._moved
    mine._moved = marks, since - 61.0  # as if a minute had passed
    assert mine._find_problem().startswith("process 1 has been stuck for 60 s at: the end of the run")
