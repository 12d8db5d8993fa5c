"""Training step of a whole model: measuring processes, requested configurations, attribution of kernels."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture


def job(provider="ours", memory="lean", **others):
    from benchmarks.training.step import Job

    config = dict(find_architecture("llama").tiny)
    return Job("tiny", config, provider, memory, batch=1, seq=8, warmup=1, steps=1, **others)


def test_a_report_has_each_configurations_result_or_reason(benchmarks, forked_jobs, tmp_path):
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


def test_the_cases_of_a_page_are_updated_with_ratios_and_plot(benchmarks, forked_jobs, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    from benchmarks.training import cases

    asked = (
        ("ours+stochastic", "lean", 2, "packed"),
        ("transformers+sdpa", "none", 2, "padded"),
        ("transformers+sdpa", "none", 2, "packed"),
    )
    case = cases.Case("tiny", asked, seq=64, summary="a tiny model")
    monkeypatch.setattr(cases, "CASES", {"tiny documents": case})
    page = tmp_path / "performance.md"
    page.write_text(f"# Performance\n\nBefore.\n\n{cases.BEGIN}\nold\n{cases.END}\n\nBehind.\n")
    arguments = ["--warmup", "1", "--steps", "2", "--device", "cpu", "--page", str(page)]
    assert benchmarks.__main__.main(["train", "--cases", *arguments, "--out", str(tmp_path)]) == 0
    text = page.read_text()
    assert text.startswith("# Performance\n\nBefore.\n")
    assert text.endswith("\nBehind.\n")
    assert "old" not in text
    rows = [line.split(" | ") for line in text.splitlines() if " | " in line]
    assert [row[1] for row in rows[2:]] == [provider for provider, *_ in asked]
    assert [row[2] for row in rows[2:]] == ["lean, packed", "none, padded", "none, packed"]
    ours, padded, _ = (float(row[3].replace(",", "")) for row in rows[2:])
    assert [row[6] == "-" for row in rows[2:]] == [False, True, True]  # the planned memory of ours
    rounding = 0.5 / ours + 0.5 / padded  # speeds are printed as whole numbers, their ratio to 0.01
    ratio = pytest.approx(ours / padded, rel=1.1 * rounding, abs=0.006)
    assert float(rows[3][4].removesuffix(" x")) == ratio
    assert (tmp_path / cases.PICTURE).read_bytes().startswith(b"\x89PNG")

    # Results from another machine make the same page, and the README's table with the fastest peer of each
    # kind.
    page.write_text(f"{cases.BEGIN}\n{cases.END}\n")
    readme = tmp_path / "README.md"
    readme.write_text(f"# A project\n\n{cases.SUMMARY_MARKS[0]}\n{cases.SUMMARY_MARKS[1]}\n")
    read = ["--read", str(tmp_path / "train-cases.json"), "--page", str(page), "--readme", str(readme)]
    assert benchmarks.__main__.main(["train", "--cases", *read, "--out", str(tmp_path / "again")]) == 0
    assert rows == [line.split(" | ") for line in page.read_text().splitlines() if " | " in line]
    table = [line for line in readme.read_text().splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert "| a tiny model | **liger_models** | `lean`, packed |" in table[2]
    assert table[3].startswith("|  | transformers | no checkpointing, ")


def test_each_configuration_of_the_cases_is_measured_once_and_cases_can_be_chosen(benchmarks):
    from benchmarks.training import cases

    found = [(model, seq, one) for model, seq, ones in cases.groups() for one in ones]
    assert len(found) == len(set(found))
    everything = {(case.model, case.seq, one) for case in cases.CASES.values() for one in case.configurations}
    assert set(found) == everything
    chosen = cases.groups(["1B, 8*", "1B, 16*"])
    assert [(model, seq) for model, seq, _ in chosen] == [(cases.SMALL, 2048), (cases.SMALL, 4096)]


def test_every_job_is_measured_in_a_process_of_its_own(benchmarks, forked_jobs, monkeypatch):
    from benchmarks.training import pool

    processes, do = [], pool.Worker.do

    def noted(self, *args):
        result = do(self, *args)
        processes.append(self._process.pid)
        return result

    monkeypatch.setattr(pool.Worker, "do", noted)
    jobs = [job(), job("ours+split")]
    found = list(pool.measure_all([jobs], ["cpu"], time_limit=60, ahead=False))
    assert [one for one, _ in found] == jobs
    assert len(set(processes)) == 2


def test_a_peer_is_measured_again_in_a_process_without_ours(benchmarks, capfd):
    pytest.importorskip("transformers")
    from benchmarks.training.check import check_alone, compare

    peer = replace(job("transformers+sdpa", "none"), warmup=1, steps=3, batch=2, data="padded")
    (sentence,) = check_alone([(job(), {"step_ms": 1.0}), (peer, {"step_ms": 1e9})], "cpu", 120)
    assert "process without liger_models" in sentence
    assert "THEY DIFFER" in sentence
    assert check_alone([(job(), {"step_ms": 1.0})], "cpu", 60) == []
    assert compare("it", 101.9, {"step_ms": 100.0}).endswith("(+1.9%); they agree.")
    assert "THEY DIFFER" in compare("it", 102.1, {"step_ms": 100.0})


def test_packed_documents_run_without_padding_in_the_peer(benchmarks, monkeypatch):
    """Each document is computed as if it were alone; the formula replaces the peer's GPU kernel."""
    pytest.importorskip("transformers")
    import torch
    import torch.nn.attention.varlen as varlen

    from benchmarks.training import peer
    from benchmarks.training.step import make_job_batch

    def by_hand(q, k, v, cu, cu_k, longest, longest_k, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert window_size == (-1, 0)
        assert int(cu.diff().max()) == longest == longest_k
        groups, out = q.shape[1] // k.shape[1], []
        for start, end in zip(cu[:-1].tolist(), cu_k[1:].tolist(), strict=True):
            one = [x[None, start:end].transpose(1, 2) for x in (q, k, v)]
            one[1:] = [x.repeat_interleave(groups, 1) for x in one[1:]]
            seen = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, scale=scale)
            out.append(seen[0].transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr(varlen, "varlen_attn", by_hand)
    config, device = dict(find_architecture("llama").tiny), torch.device("cpu")
    asked = replace(job("transformers+varlen", "none"), batch=3, seq=64, data="packed")
    batch = make_job_batch(asked, device)
    losses = {}
    for options in ({"varlen"}, {"sdpa"}):
        torch.manual_seed(0)
        model = peer.build_peer(config, "LlamaForCausalLM", options, "none", device).eval()
        own = batch if "varlen" in options else {name: batch[name] for name in list(batch)[:3]}
        losses[next(iter(options))] = model(**own).loss.item()
    assert losses["varlen"] == pytest.approx(losses["sdpa"], rel=2e-2)  # bfloat16, summed in another order


def test_a_timeout_stops_a_job_and_the_next_one_runs(benchmarks, forked_jobs):
    from benchmarks.training.pool import measure_all

    slow, fast = replace(job(), steps=10**5), job()
    (stopped, note), (after, result) = measure_all([[slow, fast]], ["cpu"], time_limit=4, ahead=False)
    assert (stopped, note) == (slow, {"note": "stopped after 4 s"})
    assert after == fast
    assert result["tokens_per_second"] > 0
    ((_, late),) = measure_all([[fast]], ["cpu"], time_limit=4, ahead=False, within=0)
    assert late == {"note": "no time was left for it"}


def test_a_model_that_liger_kernel_changed_is_measured_without_it_in_a_new_process(benchmarks, monkeypatch):
    from benchmarks.training import pool

    begun = []
    monkeypatch.setattr(pool.Worker, "_begin", lambda self: (begun.append(0), setattr(self, "_changed", {})))
    monkeypatch.setattr(pool.Worker, "end", lambda self: None)

    class Pipe:
        def __init__(self):
            self.recv, self.send, self.poll = dict, lambda asked: None, lambda seconds: True

    worker = pool.Worker("cpu", peers=())
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


def test_compiled_jobs_have_more_time_and_start_first(benchmarks, monkeypatch):
    from benchmarks.training import pool

    monkeypatch.setattr(pool.Worker, "_begin", lambda self: setattr(self, "_changed", {}))
    worker, limits = pool.Worker("cpu", peers=()), []
    worker._pipe = type("Pipe", (), {"recv": dict, "send": lambda self, asked: None})()
    monkeypatch.setattr(type(worker._pipe), "poll", lambda self, limit: limits.append(limit) or True, False)
    jobs = [job("transformers+sdpa", "none"), job("transformers+liger+sdpa+compile", "none")]
    for one in jobs:
        worker.do(one, 60, ahead=True)
    assert limits == [60, 60 + pool._SECONDS_TO_COMPILE]
    assert sorted(jobs, key=pool._longest_first) == jobs[::-1]


@pytest.mark.parametrize("provider", ["theirs", "ours+sdpa", "transformers+split", "transformers+fast"])
def test_an_unknown_provider_is_refused(benchmarks, provider):
    from benchmarks.training.step import check_provider

    with pytest.raises(ValueError, match=f"unknown provider '{provider}'".replace("+", r"\+")):
        check_provider(provider)


def test_ids_of_a_batch_have_embeddings_by_layer(benchmarks):
    from benchmarks.training.batches import make_batch

    config = {"vocab_size": 400, "vocab_size_per_layer_input": 100}
    for kind in ("full", "packed"):
        assert make_batch(kind, 4, 100, config, "cpu")["input_ids"].max() < 100


def test_every_shape_is_a_supported_model(benchmarks):
    import liger_models
    from benchmarks.training.shapes import MODELS, config_of

    billions = {
        name: liger_models.from_config(config, device="meta").num_parameters() / 1e9
        for name, config in MODELS.items()
    }
    assert billions["gemma-3-4b"] == pytest.approx(3.88, abs=0.01)  # 4.3 with the vision part
    assert billions["qwen2-0.5b"] == pytest.approx(0.494, abs=0.001)
    assert billions["deepseek-v3-2"] == pytest.approx(2 * 0.927 + 0.583 + 11.5, abs=0.1)
    assert config_of("llama-3-8b", layers=3)["num_hidden_layers"] == 3
    assert config_of("llama-3-8b", seq=65536)["max_position_embeddings"] == 65536
    assert config_of("llama-3-8b", seq=4096)["max_position_embeddings"] == 8192


def test_a_peer_whose_kernels_do_not_run_is_no_result(benchmarks, monkeypatch):
    """transformers uses its own slow form where a package's import fails, and says nothing."""
    pytest.importorskip("transformers")
    import torch

    from benchmarks.training import peer
    from benchmarks.training.step import measure

    asked = job("transformers+sdpa+mamba_ssm", "none")
    assert measure(asked, torch.device("cpu")) == {"note": "mamba_ssm is not installed"}
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: name)
    note = {"note": "transformers did not use the kernels of mamba_ssm"}
    assert measure(asked, torch.device("cpu")) == note


def test_a_peer_keeps_in_float32_what_loading_would(benchmarks):
    """Otherwise its products are cheaper than those of the model that people train."""
    transformers = pytest.importorskip("transformers")
    import torch

    from benchmarks.training import peer

    found = find_architecture("hy_v4")
    if not hasattr(transformers, found.reference):
        pytest.skip("this transformers does not have the family")
    model = peer.build_peer(dict(found.tiny), found.reference, {"eager"}, "none", torch.device("cpu"))
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def test_a_peer_of_bitnet_rounds_its_weights_as_the_checkpoint_asks(benchmarks):
    """All but the head's, which the loaded model does not round either."""
    pytest.importorskip("transformers")
    import torch

    from benchmarks.training import peer

    found = find_architecture("bitnet")
    asked = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    kinds = {}
    for name, config in (("plain", found.tiny), ("asked", {**found.tiny, "quantization_config": asked})):
        model = peer.build_peer(config, found.reference, {"eager"}, "none", torch.device("cpu"))
        kinds[name] = {
            type(layer).__name__ for layer in model.model.modules() if hasattr(layer, "in_features")
        }
        assert type(model.lm_head) is torch.nn.Linear
        assert model.model.layers[0].mlp.down_proj.weight.requires_grad
    assert kinds == {"plain": {"Linear"}, "asked": {"AutoBitLinear"}}


def test_kernels_of_packages_are_compiled_without_timing_them(benchmarks, monkeypatch):
    pytest.importorskip("triton")
    import triton.testing

    from benchmarks.training import peer

    monkeypatch.setattr(triton.testing, "do_bench", lambda function, warmup=25, rep=100: (warmup, rep))
    peer.tune_briefly()
    assert triton.testing.do_bench(print) == (2, 10)
    peer.tune_briefly(once=True)
    runs = []
    assert triton.testing.do_bench(lambda: runs.append(1), quantiles=(0.5, 0.2, 0.8)) == [1.0] * 3
    assert runs == [1]


def test_a_family_that_hears_gets_ids_of_its_language_model(benchmarks):
    from benchmarks.training.batches import make_batch

    config = find_architecture("qwen3_asr").tiny
    assert "vocab_size" not in config
    ids = make_batch("full", 2, 100, config, "cpu")["input_ids"]
    assert config["text_config"]["vocab_size"] * 0.9 < ids.max() < config["text_config"]["vocab_size"]


@pytest.mark.parametrize("name", ["EXAONE-3.5-2.4B-Instruct", "internlm3-8b-instruct", "sarvam-105b"])
def test_a_peer_reads_the_config_as_its_own_family_does(benchmarks, name):
    """Its model class may be another family's, whose config class would skip keys of other names."""
    from benchmarks.training.peer import build_peer, lacking

    published = Path(__file__).parents[1] / "architectures" / "published" / f"{name}.json"
    config = json.loads(published.read_text())["config"]
    reference = find_architecture(config["model_type"]).reference
    if lacks := lacking(config["model_type"], reference, set()):
        pytest.skip(lacks)
    peer = build_peer(config, reference, {"sdpa"}, "none", torch.device("meta"))
    ours = liger_models.from_config(config, device="meta")
    assert sum(p.numel() for p in peer.parameters()) == ours.num_parameters()
