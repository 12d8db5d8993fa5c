"""The commands that measure batch_invariant() and streams of weights."""

import csv


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_packed_documents_are_compared_with_single_ones(benchmarks, tmp_path):
    page = tmp_path / "page.md"
    command = ["invariant", "--model", "tiny", "--layers", "1", "--case", "3x9", "--steps", "1"]
    assert benchmarks.__main__.main([*command, "--out", str(tmp_path), "--page", str(page)]) == 0
    rows = rows_of(tmp_path / "invariant-tiny.csv")
    assert [row["step"] for row in rows] == ["score", "train"]
    assert {row["equal alone"] for row in rows} == {"3 of 3"}
    assert "| 3x9 | train |" in page.read_text()


def test_a_stream_has_every_tensor_of_the_model(benchmarks, tmp_path):
    command = ["stream", "--model", "tiny", "--layers", "1", "--steps", "1", "--out", str(tmp_path)]
    assert benchmarks.__main__.main(command) == 0
    rows = rows_of(tmp_path / "stream-tiny.csv")
    assert [row["to"] for row in rows] == ["device", "host"]
    # Embeddings and norm, and the tied or untied head; a layer's seven projections and two norms.
    assert {int(row["tensors"]) - 9 for row in rows} <= {2, 3}
