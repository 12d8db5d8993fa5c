"""A process that dies, hangs or fails, and a full disk, at a moment each; faults.py by hand takes many."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FAULTS = Path(__file__).with_name("faults.py")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_the_others_end_and_name_it_and_the_run_goes_on_with_the_same_bits():
    command = [sys.executable, str(FAULTS), "--moments", "1"]
    kinds = ["full", "die", "hang", "fail"]
    for kind in kinds:
        command += ["--kind", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+): \{\"faults\": 1,", done.stdout, re.MULTILINE) == [
        "full",
        "die",
        "hang",
        "fail",
    ]
