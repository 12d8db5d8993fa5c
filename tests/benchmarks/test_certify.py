"""`python -m benchmarks certify`: a few compositions hold, and a wrong one is found and reduced."""

import subprocess
import sys

import pytest

from benchmarks.certificate.case import Case, draw, parse, simpler, text_families
from benchmarks.certificate.comparison import compare

CASES = (
    "seed=5 family=qwen3_moe ranks=2 wrapper=fsdp experts=2 layout=packed level=mixed optimizer=adamw",
    "seed=6 family=qwen3_next ranks=2 wrapper=fsdp sequence=2 layout=positions level=checkpoint",
    "seed=8 family=llama ranks=2 wrapper=ddp accumulation=3 layout=padded freeze=True",
)


def certify(*arguments: str, folder) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks", "certify", *arguments, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


def test_compositions_on_two_processes_hold(tmp_path, request):
    cases = CASES if request.config.getoption("--all-families") else CASES[:1]
    code, output = certify(*(part for case in cases for part in ("--case", case)), folder=tmp_path)
    assert code == 0, output
    assert f"{len(cases)} of {len(cases)} compositions hold (0 of them refused)" in output.splitlines()[-1]


def test_a_wrong_loss_is_found_and_reduced_to_the_simplest_composition(tmp_path):
    case = "seed=3 family=llama layout=packed"
    code, output = certify("--case", case, "--fault", "1.0001", folder=tmp_path)
    assert code == 1
    assert "0 of 1 compositions hold" in output.splitlines()[-1]
    assert 'smallest: --case "seed=3 family=llama"' in output


@pytest.mark.parametrize("seed", range(6))
def test_compositions_in_one_process_hold(seed):
    families = text_families()
    case = next(case for n in range(100 * seed, 10**6) if (case := draw(n, families)).ranks == 1)
    assert compare(case).holds, case.text()


def test_a_composition_is_its_text():
    for seed in range(50):
        case = draw(seed, text_families())
        assert parse(case.text()) == case
    with pytest.raises(ValueError, match="wrapper is 'ray'"):
        parse("seed=1 family=llama wrapper=ray")
    with pytest.raises(ValueError, match="expected seed="):
        parse("familie=llama")


def test_every_simplification_ends():
    case = draw(3, text_families())
    seen: set[Case] = set()
    waiting = [case]
    while waiting:
        for other in simpler(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    assert all(not simpler(other) or other != case for other in seen)
