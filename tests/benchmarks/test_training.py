"""A training step of a whole model: which processes measure it, what is asked for, what its kernels do."""

import csv
from dataclasses import replace

import pytest

from liger_models.architectures import find_architecture


def job(provider="ours", memory="lean", **others):
    from benchmarks.training.step import Job

    config = dict(find_architecture("llama").tiny)
    return Job("tiny", config, provider, memory, batch=1, seq=8, warmup=1, steps=1, **others)


def test_a_report_says_what_each_configuration_reached_and_why_one_did_not(benchmarks, tmp_path):
    pytest.importorskip("transformers")
    arguments = ["--model", "tiny", "--seq", "16", "--warmup", "1", "--steps", "2", "--device", "cpu"]
    asked = ["--configuration", "ours:lean:2", "--configuration", "transformers+flash:none:2"]
    with pytest.raises(SystemExit):
        benchmarks.__main__.main(["train", *arguments, *asked])
    asked[-1] = "transformers+sdpa:some:2"
    assert benchmarks.__main__.main(["train", *arguments, *asked, "--out", str(tmp_path)]) == 0
    with (tmp_path / "train-tiny.csv").open() as file:
        ours, theirs = csv.DictReader(file)
    assert float(ours["tokens_per_second"]) > 0
    assert ours["memory"] == "lean"
    assert theirs["note"] == "failed: ValueError: memory is 'some'; transformers+sdpa has none and checkpoint"
    assert theirs["note"] in (tmp_path / "train-tiny.md").read_text()


def test_the_cases_of_a_page_are_renewed_with_their_ratios_and_their_picture(
    benchmarks, tmp_path, monkeypatch
):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    from benchmarks.training import cases

    asked = (
        ("ours+stochastic", "lean", 2, "packed"),
        ("transformers+sdpa", "none", 2, "padded"),
        ("transformers+sdpa", "none", 2, "packed"),
    )
    monkeypatch.setattr(cases, "CASES", {"tiny documents": ("tiny", asked)})
    page = tmp_path / "performance.md"
    page.write_text(f"# Performance\n\nBefore.\n\n{cases.BEGIN}\nold\n{cases.END}\n\nBehind.\n")
    arguments = ["--warmup", "1", "--steps", "2", "--device", "cpu", "--seq", "64", "--page", str(page)]
    assert benchmarks.__main__.main(["train", "--cases", *arguments, "--out", str(tmp_path)]) == 0
    text = page.read_text()
    assert text.startswith("# Performance\n\nBefore.\n")
    assert text.endswith("\nBehind.\n")
    assert "old" not in text
    rows = [line.split(" | ") for line in text.splitlines() if " | " in line]
    assert [row[1] for row in rows[2:]] == [provider for provider, *_ in asked]
    assert [row[2] for row in rows[2:]] == ["lean, packed", "none, padded", "none, packed"]
    ours, padded, _ = (float(row[3].replace(",", "")) for row in rows[2:])
    assert [row[6] == "-" for row in rows[2:]] == [False, True, True]  # what ours was planned to take
    # Both speeds and their ratio are rounded.
    assert float(rows[3][4].removesuffix(" x")) == pytest.approx(ours / padded, rel=0.01, abs=0.006)
    assert (tmp_path / cases.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_what_was_asked_for_comes_first_and_what_compiles_for_minutes_last(benchmarks):
    from benchmarks.training import cases

    groups = cases.groups()
    assert [(model, len(found)) for model, found in groups][2:] == [(cases.LARGE, 1), (cases.SMALL, 1)]
    assert groups[2][1][0][0] == "transformers"
    assert "flex_attention" in groups[3][1][0][0]
    found = [(model, one) for model, of_model in groups for one in of_model]
    assert len(found) == len(set(found))
    assert set(found) == {(model, one) for model, ones in cases.CASES.values() for one in ones}


def test_what_takes_too_long_is_stopped_and_the_next_one_goes_on(benchmarks):
    from benchmarks.training.pool import measure_all

    slow, fast = replace(job(), steps=10**5), job()
    (stopped, note), (after, result) = measure_all([[slow, fast]], ["cpu"], time_limit=8, ahead=False)
    assert (stopped, note) == (slow, {"note": "stopped after 8 s"})
    assert after == fast
    assert result["tokens_per_second"] > 0
    ((_, late),) = measure_all([[fast]], ["cpu"], time_limit=8, ahead=False, within=0)
    assert late == {"note": "no time was left for it"}


def test_a_model_that_liger_kernel_changed_is_measured_without_it_in_a_new_process(benchmarks, monkeypatch):
    from benchmarks.training import pool

    begun = []
    monkeypatch.setattr(pool.Worker, "_begin", lambda self: (begun.append(0), setattr(self, "_changed", {})))
    monkeypatch.setattr(pool.Worker, "end", lambda self: None)

    class Pipe:
        def __init__(self):
            self.recv, self.send, self.poll = dict, lambda asked: None, lambda seconds: True

    worker = pool.Worker("cpu", peers=True)
    worker._pipe = Pipe()

    def processes(provider):
        worker.do(job(provider, "none"), 1, ahead=False)
        return len(begun)

    assert processes("transformers+sdpa") == 1
    assert processes("transformers+liger+sdpa+grouped_mm") == 1
    assert processes("transformers+liger+sdpa") == 1
    assert processes("ours") == 1
    assert processes("transformers+liger+grouped_mm") == 2
    assert processes("transformers") == 3
    assert processes("transformers") == 3


def test_what_is_compiled_has_more_time_and_begins_first(benchmarks, monkeypatch):
    from benchmarks.training import pool

    monkeypatch.setattr(pool.Worker, "_begin", lambda self: setattr(self, "_changed", {}))
    worker, limits = pool.Worker("cpu", peers=True), []
    worker._pipe = type("Pipe", (), {"recv": dict, "send": lambda self, asked: None})()
    monkeypatch.setattr(type(worker._pipe), "poll", lambda self, limit: limits.append(limit) or True, False)
    jobs = [job("transformers+sdpa", "none"), job("transformers+liger+sdpa+compile", "none")]
    for one in jobs:
        worker.do(one, 60, ahead=True)
    assert limits == [60, 60 + pool._SECONDS_TO_COMPILE]
    assert sorted(jobs, key=pool._longest_first) == jobs[::-1]


def test_jobs_are_ordered_so_that_few_processes_are_needed(benchmarks):
    from benchmarks.training.pool import _changes

    providers = ["transformers+liger", "ours", "transformers+liger+loop", "transformers+sdpa"]
    ordered = sorted((job(provider, "none") for provider in providers), key=_changes)
    assert [one.provider for one in ordered] == [providers[1], providers[3], providers[2], providers[0]]


@pytest.mark.parametrize("provider", ["theirs", "ours+sdpa", "transformers+split", "transformers+fast"])
def test_an_unknown_provider_is_refused(benchmarks, provider):
    from benchmarks.training.step import check_provider

    with pytest.raises(ValueError, match=f"no provider is called '{provider}'".replace("+", r"\+")):
        check_provider(provider)


def test_every_shape_is_a_model_of_ours(benchmarks):
    import liger_models
    from benchmarks.training.shapes import MODELS, config_of

    billions = {
        name: liger_models.from_config(config, device="meta").num_parameters() / 1e9
        for name, config in MODELS.items()
    }
    assert billions["gemma-3-4b"] == pytest.approx(3.88, abs=0.01)  # 4.3 with what sees
    assert billions["qwen2-0.5b"] == pytest.approx(0.494, abs=0.001)
    assert billions["deepseek-v3-2"] == pytest.approx(2 * 0.927 + 0.583 + 11.5, abs=0.1)
    assert config_of("llama-3-8b", layers=3)["num_hidden_layers"] == 3
    assert config_of("llama-3-8b", seq=65536)["max_position_embeddings"] == 65536
    assert config_of("llama-3-8b", seq=4096)["max_position_embeddings"] == 8192
