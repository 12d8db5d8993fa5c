"""Command lines of the benchmarks, and errors for impossible requests."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from liger_models.cli import bench
from liger_models.cli import main as liger_models_main

ROOT = Path(__file__).parents[2]


def test_without_a_command_the_operations_are_measured(benchmarks, monkeypatch):
    asked = []
    monkeypatch.setattr(benchmarks.__main__.COMMANDS["ops"], "run", lambda args: asked.append(args) or 0)
    assert benchmarks.__main__.main([]) == 0
    assert benchmarks.__main__.main(["--op", "linear_*", "--quick"]) == 0
    assert [args.op for args in asked] == [None, ["linear_*"]]


@pytest.mark.parametrize("page", [ROOT / "README.md", *ROOT.glob("docs/*.md")], ids=lambda page: page.name)
def test_every_command_of_a_page_is_understood(page, benchmarks):
    text = re.sub(r" \\\n +", " ", page.read_text())  # one command per line
    for command in re.findall(r"^    (?:python -m benchmarks|liger-models bench)(.*)$", text, re.MULTILINE):
        benchmarks.__main__.parse(shlex.split(command, comments=True))


def test_operations_are_chosen_by_pattern_in_the_tables_order(benchmarks):
    from benchmarks.ops import matching

    names = [operation.name for operation in matching(["*rms_norm", "linear_cross*", "rms_norm"])]
    assert names == [
        "rms_norm",
        "add_rms_norm",
        "linear_cross_entropy",
        "linear_cross_entropy_75_ignored",
        "gated_rms_norm",
    ]
    assert [operation.name for operation in matching(None)] == list(benchmarks.operations.REGISTRY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "rms_nrom"], "no operation matches 'rms_nrom'; expected rms_norm"),
        (["--op", "swiglu", "--shape", "8x8x8"], "expected tokens x intermediate, such as 32768x14336"),
        (["--op", "swiglu", "--shape", "8x"], "found --shape 8x for swiglu"),
        (["--op", "swiglu", "--shape", "8x0"], "found --shape 8x0 for swiglu"),
        (["--op", "relu2", "--provider", "varlen"], "none of these operations is measured with varlen"),
        (["tune", "moe_router"], "no operation matches 'moe_router'"),
        (["tune", "layer_norm", "--device", "cpu"], "the kernels do not run on a cpu"),
        (["tune", "relu2", "--device", "cpu"], "relu2 has no tunable tile sizes"),
    ],
)
def test_impossible_requests_give_one_line_errors(benchmarks, capsys, tmp_path, arguments, message):
    assert benchmarks.__main__.main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_cases_beyond_the_time_limit_become_notes(benchmarks, tmp_path):
    arguments = ["--op", "relu2", "--device", "cpu", "--minutes", "0", "--out", str(tmp_path)]
    assert benchmarks.__main__.main(arguments) == 0
    report = (tmp_path / "ops.md").read_text()
    assert "- ours: skipped: the 0 minutes are over (relu2)" in report
    assert not (tmp_path / "ops.png").exists()


def test_liger_models_bench_passes_all_arguments_on_and_returns_the_exit_code(monkeypatch):
    ran = {}

    def run(command, env):
        ran.update(command=command, path=env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert liger_models_main(["bench", "--op", "linear_*", "--quick", "--help"]) == 1
    assert ran["command"] == [sys.executable, "-m", "benchmarks", "--op", "linear_*", "--quick", "--help"]
    assert ran["path"].startswith(str(ROOT))


def test_liger_models_bench_runs_from_another_folder(tmp_path):
    command = [sys.executable, "-m", "liger_models.cli", "bench", "ops", "--op", "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no operation matches 'nothing'" in done.stderr


def test_liger_models_bench_without_a_checkout_says_how_to_get_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "liger_models" / "cli" / "bench.py"))
    assert liger_models_main(["bench"]) == 2
    assert "Clone it, and run `pip install -e '.[bench]'`" in capsys.readouterr().err


def test_other_commands_still_refuse_unknown_arguments(capsys):
    with pytest.raises(SystemExit):
        liger_models_main(["list", "--op", "rms_norm"])
    assert "unrecognized arguments: --op rms_norm" in capsys.readouterr().err
