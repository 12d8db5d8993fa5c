"""Order of rows: mixtures by weight, and positions from which any number of processes can continue."""

import random
from collections import Counter

import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.training.data import Documents, Stream, load_documents, split
from liger_models.training.data.reading.sources import split_weights
from liger_models.training.text.tokenizer import TextTokenizer


@pytest.fixture
def load(tokenizer_folder, tmp_path):
    def make(*names):
        return load_documents(
            names, TextTokenizer(tokenizer_folder), seq_len=64, vocab_size=320, cache=tmp_path / "cache"
        )

    return make


@pytest.fixture
def two_files(tmp_path, jsonl):
    """Files of short examples and of long texts, whose shares of tokens and of documents differ."""
    rng = random.Random(6)
    short = [{"prompt": "ab", "completion": "c " * rng.randint(1, 9)} for _ in range(120)]
    long = [{"text": "de fg " * rng.randint(20, 60)} for _ in range(40)]
    return jsonl(tmp_path / "short.jsonl", short), jsonl(tmp_path / "long.jsonl", long)


def pieces_of_parts(documents, rows):
    """Count how often each piece occurs, by part."""
    seen = [Counter() for _ in documents.parts]
    for piece in (piece for row in rows for piece in row):
        part = sum(piece.start >= base for base in documents.bases[1:-1])
        seen[part][piece.start] += 1
    return seen


def inputs_by_part(documents, rows):
    found = [0] * len(documents.parts)
    for piece in (piece for row in rows for piece in row):
        found[sum(piece.start >= base for base in documents.bases[1:-1])] += piece.stop - piece.start
    return found


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 9), (0.02, 0.98)])
def test_weights_are_shares_of_tokens(load, two_files, weights):
    documents = load(*(f"{weight}={name}" for weight, name in zip(weights, two_files, strict=True)))
    plain = load(*two_files)
    stream = Stream(documents, 64, seed=0)
    epochs = 6
    rows = [row for e in range(epochs) for row in stream.epoch(e)]
    found = inputs_by_part(documents, rows)
    share = weights[0] / sum(weights)
    # Units have up to 64 inputs, and some are read once more or less: two percent.
    assert found[0] / sum(found) == pytest.approx(share, abs=0.02)
    whole = sum(inputs_by_part(plain, Stream(plain, 64, 0).epoch(0)))
    assert sum(found) == pytest.approx(epochs * whole, rel=0.02)


def test_a_part_of_a_mixture_repeats_nothing_before_it_was_read_completely(load, two_files):
    documents = load(f"0.85={two_files[0]}", f"0.15={two_files[1]}")
    stream = Stream(documents, 64, seed=1)
    assert stream.draws[0] % 120  # the end of an epoch is not the end of a pass
    rows = []
    for epoch in range(3):
        rows += stream.epoch(epoch)
        short, long = (seen.values() for seen in pieces_of_parts(documents, rows))
        assert len(short) == 120  # whole examples: each unit is a piece
        assert max(short) - min(short) <= 1
        assert set(long) == {1}
    assert min(short) > 3 * 5


def test_a_mixture_continues_from_any_position_and_depends_on_its_seed(load, two_files):
    documents = load(f"2={two_files[0]}", f"1={two_files[1]}")
    stream = Stream(documents, 64, seed=3)
    first = stream.rows_of(0)
    rows, position = stream.take(first + 5), stream.position
    assert position.epoch == 1
    after = stream.take(7)
    assert Stream(documents, 64, 3, position).take(7) == after
    assert Stream(documents, 64, 3).take(first + 5) == rows
    assert Stream(documents, 64, 4).take(first + 5) != rows


def test_weights_are_distinguished_from_names():
    assert split_weights(["a.jsonl", "x=y.txt", "./0.5=a.txt"])[1] is None
    assert split_weights(["0.7=a=b.jsonl", "3e-1=hf:x/y:c:train"]) == (
        ["a=b.jsonl", "hf:x/y:c:train"],
        [0.7, 0.3],
    )
    with pytest.raises(DataError, match=r"b\.jsonl has no weight"):
        split_weights(["0.7=a.jsonl", "b.jsonl"])
    with pytest.raises(DataError, match="must be more than 0"):
        split_weights(["0=a.jsonl", "1=b.jsonl"])


def test_held_out_documents_of_a_mixture_come_from_every_part(load, two_files):
    train, held = split(load(f"1={two_files[0]}", f"1={two_files[1]}"), 0.25, seed=0)
    for part in held.parts:
        starts, places = part.corpus.starts, torch.arange(len(part))
        first, last, _ = part.bounds(places)
        assert 0.2 < int((last + 1 - first).sum()) / int(starts[-1]) <= 0.25
    assert [part.weight for part in train.parts] == [1, 1]
    assert [part.weight for part in held.parts] == [None, None]
    seen = [pieces_of_parts(documents, Stream(documents, 64, 0).epoch(0))[0] for documents in (train, held)]
    assert not seen[0].keys() & seen[1].keys()
    assert len(seen[0]) + len(seen[1]) == 120


def test_weights_of_held_out_data_are_refused(run, settings, data):
    with pytest.raises(DataError, match="eval_data has weights"):
        run(settings(eval_fraction=0.0, eval_data=(f"1={data}",)))


def test_counts_match_the_stream(load, two_files):
    for names in (two_files, two_files[1:], (f"1={two_files[0]}", f"3={two_files[1]}")):
        documents = load(*names)
        stream = Stream(documents, 64, seed=0)
        rows = list(stream.epoch(0))
        assert stream.rows_of(0) == len(rows)
        assert stream.efficiency() == sum(inputs_by_part(documents, rows)) / (64 * len(rows))


def test_a_run_reports_how_full_its_rows_are(run, settings, capsys):
    result = run(settings(eval_fraction=0.0, batch_size=2, gradient_accumulation=1, steps=4))
    before = 0
    for record in result.records:
        assert record["filled"] == (record["tokens"] - before) / (2 * 64)
        before = record["tokens"]
    assert 0.8 < before / (4 * 2 * 64) <= 1
    assert "of the tokens of a row are filled" in capsys.readouterr().err


def test_a_run_resumed_with_other_weights_is_refused(run, settings, two_files):
    def mixture(weight):
        return {
            "eval_fraction": 0.0,
            "save_every": 1,
            "data": (f"{weight}={two_files[0]}", f"1={two_files[1]}"),
        }

    run(settings(steps=1, **mixture(1)))
    with pytest.raises(DataError, match="was trained on other tokens than these: data="):
        run(settings(resume="auto", steps=2, **mixture(2)))


def test_a_changing_number_of_processes_reads_each_row_once(load, two_files):
    """Rows of the ranks in each step, with one process, then two, four and three."""
    documents = load(*two_files)
    expected = list(Stream(documents, 64, seed=0).epoch(0))
    position, seen = Stream(documents, 64, seed=0).position, []
    for size, steps in ((1, 3), (2, 4), (4, 2), (3, 5)):
        ranks = [Stream(documents, 64, 0, position) for _ in range(size)]
        for _ in range(steps):
            taken = [stream.take(size * 2) for stream in ranks]
            seen += [row for rank in range(size) for row in taken[rank][2 * rank : 2 * rank + 2]]
        position = ranks[0].position
        assert {stream.position for stream in ranks} == {position}
    assert seen == expected[: len(seen)]
    assert len(seen) == 2 * (3 + 8 + 8 + 15)


def test_a_run_resumed_with_other_steps_reads_the_rest_of_its_epoch(run, settings, monkeypatch, tmp_path):
    """As with another number of processes, a step reads a different number of the same rows."""
    make, read = Documents.batch, []

    def train(folder, stop=None, **changes):
        read.clear()

        def batch(self, rows):
            if len(read) == stop:
                raise KeyboardInterrupt
            read.extend(rows)
            return make(self, rows)

        options = {"steps": None, "epochs": 1, "eval_fraction": 0.0, "save_every": 1}
        monkeypatch.setattr(Documents, "batch", batch)
        return run(settings(output=str(tmp_path / folder), **options | changes))

    whole = train("whole", gradient_accumulation=1)
    expected = read[: whole.steps]  # at most one step is read ahead
    assert len(read) - 1 <= len(expected) == whole.steps > 12
    with pytest.raises(KeyboardInterrupt):
        train("run", stop=7, gradient_accumulation=2)  # three and a half steps
    done = read[:6]
    resumed = train("run", gradient_accumulation=3, resume="auto")
    assert resumed.steps == 3 + -(-(len(expected) - 6) // 3)
    assert (done + read)[: len(expected)] == expected
