"""Scans of recurrent mixers are measured, and a library that is not installed becomes a note."""

import json
import sys


def test_every_mixer_is_measured_and_missing_libraries_are_noted(benchmarks, tmp_path, monkeypatch):
    from benchmarks.recurrent import FLA, MIXERS

    monkeypatch.setitem(sys.modules, "fla", None)  # as if it were not installed
    rows = []
    for provider in ("ours", FLA):
        asked = ["recurrent", "--provider", provider, "--documents", "16 documents", "--device", "cpu"]
        assert benchmarks.__main__.main([*asked, "--rows", str(tmp_path / "rows.json")]) == 0
        rows += json.loads((tmp_path / "rows.json").read_text())
    assert [row["mixer"] for row in rows if row.get("ms", 0) > 0] == list(MIXERS)
    assert sum("ModuleNotFoundError" in row.get("note", "") for row in rows) == 2
