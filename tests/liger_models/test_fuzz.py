"""Mutated checkpoints raise one clear error or load exactly the weights of their files."""

from pathlib import Path

import fuzz_checkpoints
import torch


def test_300_mutated_checkpoints_are_refused_clearly_or_loaded_correctly():
    complaints = fuzz_checkpoints.fuzz(seed=0, count=300)
    assert not complaints, "\n".join(f"number {at}: {text}" for at, text in complaints)


def test_the_fuzzer_notices_a_wrong_load_and_an_unclear_error(tmp_path, monkeypatch):
    single, *_ = fuzz_checkpoints.make_originals(tmp_path)
    load = fuzz_checkpoints.liger_models.from_hub

    def wrong(folder: Path):
        model = load(folder)
        with torch.no_grad():
            model.norm.weight[3] += 1
        return model

    def unclear(folder: Path):
        raise KeyError("weight_map")

    assert fuzz_checkpoints.complaint(single) is None
    monkeypatch.setattr(fuzz_checkpoints.liger_models, "from_hub", wrong)
    assert fuzz_checkpoints.complaint(single).startswith("norm.weight is not model.norm.weight of")
    monkeypatch.setattr(fuzz_checkpoints.liger_models, "from_hub", unclear)
    assert "KeyError" in fuzz_checkpoints.complaint(single)
