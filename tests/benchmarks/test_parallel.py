"""Training step of a model sharded over two processes."""

import csv
import json
import re

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_measure_a_model_and_report_what_is_missing(
    benchmarks, tmp_path, monkeypatch, forked_ranks
):
    """Processes that need one without our package are programs; the others are forks."""
    from benchmarks import parallel

    def started(module, *given):
        return (forked_ranks if module == "benchmarks.parallel" else program)(module, *given)

    program = parallel.started
    monkeypatch.setattr(parallel, "started", started)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    configurations = ("ours:lean,checkpoint=1:2", "ours:some:2", "transformers:none:2")
    asked = [word for text in configurations for word in ("--configuration", text)]
    sizes = ["--model", "tiny", "--seq", "8", "--warmup", "1", "--steps", "1", "--processes", "2"]
    assert benchmarks.__main__.main(["parallel", *sizes, *asked, "--out", "out"]) == 1
    with (tmp_path / "out" / "parallel-tiny.csv").open() as file:
        first, failed, last = csv.DictReader(file)
    assert float(first["tokens_per_second"]) > 0
    assert first["levels"] == "1 lean, 1 checkpoint"
    assert not failed["tokens_per_second"]
    assert float(last["tokens_per_second"]) > 0  # measured by new processes
    report = (tmp_path / "out" / "parallel-tiny.md").read_text()
    assert "failed: ValueError" in report
    said = "Check of tiny, transformers none, 2 x 8 on each of 2 in a process without liger_models: "
    assert re.search(said + r"[\d.]+ ms, as measured [\d.]+ ms", report)


@pytest.mark.parametrize("text", ["ours", "ours:lean", "theirs:lean:2", "ours:lean:x"])
def test_an_invalid_configuration_is_refused(benchmarks, text):
    with pytest.raises(SystemExit):
        benchmarks.__main__.main(["parallel", "--configuration", text])


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_half_of_the_processes_resume_from_a_checkpoint_of_all_and_each_reads_its_part(
    benchmarks, tmp_path, monkeypatch, forked_ranks
):
    monkeypatch.setattr("benchmarks.resume.started", forked_ranks)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = ["--model", "tiny", "--seq", "32", "--processes", "2", "--out", str(tmp_path)]
    assert benchmarks.__main__.main(["resume", *asked]) == 0
    with (tmp_path / "resume-tiny.csv").open() as file:
        saved, loaded, trained, resumed = csv.DictReader(file)
    assert json.loads(saved["read"]) == [0, 0]
    whole = int(loaded["nbytes"])
    for read in json.loads(loaded["read"]):
        assert 0.49 * whole < read < 0.51 * whole
    assert json.loads(trained["read"]) == json.loads(loaded["read"])
    (alone,) = json.loads(resumed["read"])
    assert 0.98 * int(resumed["nbytes"]) < alone < 1.02 * int(resumed["nbytes"])
    # bfloat16 has a precision of 2^-8; the loss is about log(1024).
    assert float(resumed["loss"]) == pytest.approx(float(trained["loss"]), rel=2**-8)


def test_failed_parts_of_a_node_get_a_line_and_the_same_command_continues(
    benchmarks, tmp_path, monkeypatch, capsys
):
    from benchmarks import node

    asked = []

    def measure(jobs, config, processes, seconds):
        for job in jobs:
            asked.append((job["memory"], job["sharing"], job["seq"]))
            if job["memory"] == "offload" and job["seq"] > 200_000:
                yield {**job, "note": "out of memory"}
            else:
                times = {"step_ms": 2.0, "step_ms_low": 1.0, "step_ms_high": 3.0}
                yield {**job, **times, "tokens_per_second": 1e4, "peak_gib": 1.0, "levels": "lean"}

    monkeypatch.setattr(node.parallel, "measure_all", measure)
    broken = [{"what": "loaded", "processes": 2, "note": "failed: disk"}]
    monkeypatch.setattr(node.resume, "measure_all", lambda *_: iter(broken))
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n")
    arguments = ["--smallest", "--processes", "2", "--page", str(page), "--out", str(tmp_path)]
    assert benchmarks.__main__.main(["node", "--part", "experts", *arguments]) == 0
    assert asked == [("auto=100", "shard", 4096), ("auto=100", "experts=2", 4096)]
    assert benchmarks.__main__.main(["node", *arguments]) == 1
    assert asked[-2:] == [("offload", "sequence=2", 262144), ("offload", "sequence=2", 131072)]
    assert len(asked) == 11  # none ran twice
    text = page.read_text()
    for expected in ("out of memory", "failed: disk", "2 (experts=2)", "transformers+liger"):
        assert expected in text
    assert sum(part.seconds for part in node.PARTS) < 600


def test_the_longest_row_uses_the_allowed_time(benchmarks):
    from benchmarks import node
    from benchmarks.training.shapes import config_of

    config = config_of("llama-3-8b")
    # Attention only: 3 x 2 L^2 x 4096 x 32 operations in 8 x 130 s x 350e12.
    assert node.longest(config, 8) in range(500_000, 680_000)
    # Four times the operations allow about twice the tokens, rounded to the stride of row lengths.
    assert node.longest(config, 8) <= 2 * node.longest(config, 2) + 2 * node.STRIDE
