"""A training step of a model that two processes share."""

import csv

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_measure_a_model_and_say_what_is_missing(benchmarks, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    configurations = ("ours:lean,checkpoint=1:2", "ours:some:2", "ours:lean:1")
    asked = [word for text in configurations for word in ("--configuration", text)]
    sizes = ["--model", "tiny", "--seq", "8", "--warmup", "1", "--steps", "1", "--processes", "2"]
    assert benchmarks.__main__.main(["parallel", *sizes, *asked, "--out", "out"]) == 1
    with (tmp_path / "out" / "parallel-tiny.csv").open() as file:
        first, failed, last = csv.DictReader(file)
    assert float(first["tokens_per_second"]) > 0
    assert first["levels"] == "1 lean, 1 checkpoint"
    assert not failed["tokens_per_second"]
    assert not last["tokens_per_second"]  # which came after a failure in the middle of the others' work
    assert "not measured" in (tmp_path / "out" / "parallel-tiny.md").read_text()


@pytest.mark.parametrize("text", ["ours", "ours:lean", "theirs:lean:2", "ours:lean:x"])
def test_a_configuration_that_is_none_is_refused(benchmarks, text):
    with pytest.raises(SystemExit):
        benchmarks.__main__.main(["parallel", "--configuration", text])
