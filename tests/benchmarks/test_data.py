"""The benchmark of much text in little memory, run on little text."""

import sys

import pytest

from liger_models.cli import main as command
from liger_models.convert.errors import DataError


def test_the_corpus_matches_the_text_and_damage_is_detected(benchmarks, tmp_path, monkeypatch):
    pytest.importorskip("numpy")
    from benchmarks import data

    for name, number in {
        "WORDS": 500,
        "TRAINED_ON": 10**5,
        "SAMPLED": 7,
        "SEQ_LEN": 64,
        "BATCHES": 3,
    }.items():
        monkeypatch.setattr(data, name, number)
    text, begun = 300_000, []

    def watched(arguments, kill_after=0.0):
        begun.append(kill_after)
        if kill_after:
            return {"status": -9, "seconds": 1.0, "processor": 0.0, "own": 0, "resident": 0}
        run, *rest = arguments[3:]
        command([run, *rest]) if rest else data._read(data.Path(run))
        return {"status": 0, "seconds": 1.0, "processor": 0.0, "own": 0, "resident": 0}

    monkeypatch.setattr(data, "_watched", watched)
    arguments = ["--gigabytes", str(text / 1e9), "--folder", str(tmp_path / "text"), "--keep"]
    assert benchmarks.__main__.main(["data", *arguments, "--out", str(tmp_path)]) == 0
    assert begun == [30.0, 0.0, 0.0]
    assert "| verify, read |" in (tmp_path / "data.md").read_text()
    samples = (tmp_path / "text" / "samples.jsonl").read_text().splitlines()
    assert len(samples) > 10
    tokens = tmp_path / "text" / "corpus" / "tokens-00000.bin"
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(DataError, match="has changed since it was written"):
        data._read(tmp_path / "text")


def test_a_process_is_watched_and_killed(benchmarks):
    from benchmarks import data

    hungry = "import time; x = bytearray(200 << 20); time.sleep(60)"
    found = data._watched([sys.executable, "-c", hungry], kill_after=3.0)
    assert found["status"] == -9
    assert 200 < found["own"] / 2**20 < 260
    assert found["resident"] >= found["own"]
