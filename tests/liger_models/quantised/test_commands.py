"""The commands on quantised checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from published import CASES
from quantised_files import QuantisedCheckpoint
from safetensors.torch import load_file

import liger_models
from liger_models.cli import main
from liger_models.convert.checkpoints import hub


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> QuantisedCheckpoint:
    checkpoint = CASES["mxfp4"](tmp_path_factory.mktemp("quantised") / "gpt_oss")
    del checkpoint.config["dtype"], checkpoint.config["torch_dtype"]  # as in the published one
    checkpoint.write()
    return checkpoint


def nbytes(tensors) -> int:
    return sum(x.nbytes for x in tensors.values())


def test_inspect_names_the_format_and_its_size_on_disk_and_in_memory(gpt_oss, capsys, monkeypatch):
    reports = []
    assert main(["inspect", str(gpt_oss.folder)]) == 0
    assert "Quantised weights (mxfp4)\n" in capsys.readouterr().out
    assert main(["inspect", str(gpt_oss.folder), "--json"]) == 0
    reports.append(json.loads(capsys.readouterr().out))

    def uncached(name, **options):
        raise liger_models.HubError("not in the cache")

    headers = {
        name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in gpt_oss.tensors.items()
    }
    monkeypatch.setattr(hub, "resolve", uncached)
    monkeypatch.setattr(hub, "read_headers", lambda name: (gpt_oss.config, headers))
    assert main(["inspect", "openai/gpt-oss", "--json"]) == 0
    reports.append(json.loads(capsys.readouterr().out))
    for report in reports:
        assert report["quantisation"] == {
            "method": "mxfp4",
            "weights": {"float4, groups of 32": 2},
            "bytes on disk": nbytes(gpt_oss.tensors),
            "bytes dense": nbytes(gpt_oss.expected(liger_models.from_hub(gpt_oss.folder).dtype)),
            "bytes kept": nbytes(gpt_oss.tensors),
        }
        (row,) = [row for row in report["parameters"] if row["name"].endswith("experts.down_proj")]
        assert row["dtype"] == "float4, groups of 32"
        assert report["memory"]["dtype"] == "bfloat16"


def test_plan_counts_weights_in_the_bits_of_the_checkpoint(gpt_oss, capsys):
    options = ["--gpu", "80GiB", "--seq-len", "64", "--json"]
    reports = []
    for keep in ([], ["--keep-quantised"]):
        assert main(["plan", str(gpt_oss.folder), "--lora", "r=4", *keep, *options]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    dense, kept = reports
    assert kept["num_parameters"] == dense["num_parameters"]
    saved = nbytes(gpt_oss.expected(torch.bfloat16)) - nbytes(gpt_oss.tensors)
    assert dense["parts"]["weights"] - kept["parts"]["weights"] == saved > 0
    assert kept["parts"]["temporary"] > dense["parts"]["temporary"]  # the decoded experts
    for arguments, message in (
        ([str(gpt_oss.folder), "--keep-quantised"], "--keep-quantised needs --lora"),
        (["llama-3.2-1b", "--lora", "r=4", "--keep-quantised"], "llama-3.2-1b has no quantised weights"),
    ):
        assert main(["plan", *arguments, *options]) == 2
        assert message in capsys.readouterr().err


def test_plan_counts_dense_parameters_in_bfloat16(gpt_oss, capsys):
    assert main(["plan", str(gpt_oss.folder), "--lora", "r=4", "--gpu", "80GiB", "--json"]) == 0
    report = capsys.readouterr().out
    model = liger_models.from_hub(gpt_oss.folder, device="cpu")
    assert f"{model.num_parameters()}" in report.replace(",", "")


def test_export_and_verify_read_quantised_checkpoints(gpt_oss, tmp_path, capsys):
    assert main(["verify", str(gpt_oss.folder)]) == 0
    shown = capsys.readouterr().out
    assert "of dense weights, every byte the same" in shown
    assert "not compared with transformers: its weights are quantised" in shown
    assert main(["export", str(gpt_oss.folder), str(tmp_path / "out")]) == 0
    dense = load_file(tmp_path / "out" / "model.safetensors")
    assert nbytes(dense) == nbytes(gpt_oss.expected(next(iter(dense.values())).dtype))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
