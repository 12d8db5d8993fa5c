"""Answers that share their prompt, timed against separate sequences."""

import csv


def test_all_methods_compute_the_same_loss_over_the_reported_number_of_tokens(benchmarks, tmp_path):
    page = tmp_path / "page.md"
    command = ["prompt", "--model", "tiny", "--layers", "1", "--case", "2x9:3x5", "--steps", "1"]
    assert benchmarks.__main__.main([*command, "--out", str(tmp_path), "--page", str(page)]) == 0
    with (tmp_path / "prompt-tiny.csv").open() as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    tokens = {way: int(row["tokens"]) for way, row in rows.items()}
    assert tokens == {"shared": 2 * (8 + 3 * 6), "packed": 2 * 3 * 14, "rows": 2 * 3 * 14}
    losses = [float(row["loss"]) for row in rows.values()]
    assert max(losses) - min(losses) < 2**-8 * min(losses)  # bfloat16
    assert "| 2 of 9 | 3 of 5 | packed | 84 |" in page.read_text()
