"""Small files that expand to gigabytes, and long lines: bounded memory, and an error with file and line."""

import gzip
import io
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from liger_models.convert.errors import DataError
from liger_models.training.data import encoding, load_documents
from liger_models.training.data.reading import lines
from liger_models.training.data.reading.records import ANY
from liger_models.training.data.reading.sources import find_sources
from liger_models.training.text.tokenizer import TextTokenizer


def read(path, schema=ANY):
    (source,) = find_sources(str(path), Counter())
    return source.records(Counter(), lambda _: None, schema)


def exhaust(records):
    for _ in records:
        pass


def packed(count, piece):
    """Zstandard frame of a repeated piece."""
    zstandard = pytest.importorskip("zstandard")
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        for _ in range(count):
            writer.write(piece)
    return out.getvalue()


@pytest.fixture(scope="module")
def newlines():
    """Zstandard frame of 10^9 newlines."""
    return packed(1000, b"\n" * 10**6)


def test_a_billion_newlines_in_a_small_file_are_an_error_at_once(newlines, tmp_path, within_a_second):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(newlines)
    assert path.stat().st_size < 100_000
    with (
        pytest.raises(DataError, match=r"a\.jsonl\.zst, line 65537: more than 65,536 blank lines in a row"),
        within_a_second(),
    ):
        exhaust(read(path))


@pytest.mark.parametrize("pack", [packed, lambda count, line: gzip.compress(line * count)], ids=["zst", "gz"])
def test_lines_beyond_plausible_compression_are_an_error(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "FREE_EXPANSION", 1 << 20)
    monkeypatch.setattr(lines, "EXPANSION", 100)
    path = tmp_path / f"a.jsonl.{'zst' if pack is packed else 'gz'}"
    path.write_bytes(pack(40, json.dumps({"text": "a" * 10**5}).encode() + b"\n"))
    with pytest.raises(
        DataError, match=r"a\.jsonl\.(zst|gz), line 11: a file of [\d,]+ bytes has become 1,100,"
    ):
        list(read(path))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst", "jsonl.gz"])
def test_a_line_that_is_too_long_is_an_error_before_it_is_read(
    suffix, tmp_path, monkeypatch, within_a_second
):
    monkeypatch.setattr(lines, "LONGEST_LINE", 1 << 24)
    path, line = tmp_path / f"a.{suffix}", b'{"text": "a"}\n'
    if suffix == "jsonl":
        path.write_bytes(line)
        os.truncate(path, 4 << 30)  # sparse zeros, which take no space
    else:
        path.write_bytes(packed(1, line) + packed(400, bytes(10**6)) if "zst" in suffix else b"")
    if suffix == "jsonl.gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(line + bytes(1 << 26))
    with (
        pytest.raises(DataError, match=rf"a\.{re.escape(suffix)}, line 2: longer than 16,777,216 bytes"),
        within_a_second(),
    ):
        exhaust(read(path))


def test_a_long_line_in_a_zst_file_is_read_in_linear_time(tmp_path, within_a_second):
    """Reading once took quadratic time: 5 s for 40 MB, more than 50 s for 80 MB."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(
        packed(1, b'{"text": "') + packed(40, os.urandom(500).hex().encode() * 1000) + packed(1, b'"}')
    )
    with within_a_second():
        (record,) = read(path)
    assert len(record.content) == 40 * 10**6


def parquet_of(path, text, rows, **options):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), arrow.array([text]))
    parquet.write_table(arrow.table({"text": texts}), path, store_schema=False, **options)


def test_a_table_with_one_text_many_times_is_an_error_in_bounded_memory(tmp_path, within_a_second):
    path = tmp_path / "a.parquet"
    parquet_of(path, "a" * (1 << 20), 2000, compression="zstd")
    assert path.stat().st_size < 10_000
    with (
        pytest.raises(DataError, match=r"a\.parquet, row 257: a file of [\d,]+ bytes has become 269,484,032"),
        within_a_second(),
    ):
        exhaust(read(path))


@pytest.mark.parametrize("encoding_of_texts", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", None])
def test_tables_are_read_in_every_encoding(tmp_path, encoding_of_texts):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    talks = [
        [{"role": "user", "content": f"a {i % 7}"}, {"role": "assistant", "content": "b" * (i % 50)}]
        for i in range(3000)
    ]
    options = {
        "use_dictionary": False,
        "column_encoding": {"messages.list.element.content": encoding_of_texts},
    }
    parquet.write_table(
        arrow.table({"messages": talks, "other": list(range(3000))}),
        tmp_path / "a.parquet",
        row_group_size=1100,
        **(options if encoding_of_texts else {}),
    )
    records = list(read(tmp_path / "a.parquet"))
    assert [record.content.messages for record in records] == talks
    assert records[-1].where.endswith("row 3000")


def test_a_long_text_in_a_record_is_tokenized_in_blocks_with_the_same_ids(
    tokenizer_folder, tmp_path, jsonl, monkeypatch
):
    file = jsonl(
        tmp_path / "a.jsonl", [{"text": "short"}, {"text": "ab cd efgh. " * 3000}, {"text": "after"}]
    )
    tokenizer = TextTokenizer(tokenizer_folder)

    def ids(cache):
        documents = load_documents([file], tokenizer, seq_len=64, vocab_size=320, cache=tmp_path / cache)
        corpus = documents.parts[0].corpus
        return [
            corpus.read(*bounds)[0].tolist() for bounds in zip(corpus.starts, corpus.starts[1:], strict=False)
        ]

    whole = ids("whole")
    for name, value in {"LONG_TEXT": 10_000, "BLOCK": 4000, "OVERLAP": 500}.items():
        monkeypatch.setattr(encoding, name, value)
    assert ids("blocks") == whole
    assert len(whole) == 3


def test_an_example_that_cannot_be_tokenized_as_a_whole_is_an_error(
    tokenizer_folder, tmp_path, jsonl, monkeypatch
):
    monkeypatch.setattr(encoding, "LONG_TEXT", 10_000)
    talk = [{"role": "user", "content": "a" * 9_000}, {"role": "assistant", "content": "b" * 9_000}]
    file = jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"messages": talk}])
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 2: the example has 18,013 characters, .* at most 10,000"
    ):
        load_documents(
            [file], TextTokenizer(tokenizer_folder), seq_len=64, vocab_size=320, cache=Path(tmp_path)
        )
