"""Data written by other tools: JSON arrays, CSV, Alpaca and other columns, and slices of splits."""

import csv
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from liger_models.convert.errors import ConfigError, DataError
from liger_models.training.data.reading import arrays, lines, tables
from liger_models.training.data.reading.records import ANY, parse_fields
from liger_models.training.data.reading.schema import LABELLED, Schema, parse_columns
from liger_models.training.data.reading.sources import Source, find_sources, with_split

PAIR = (("prompt", "question"), ("completion", "answer"))


def read(path, schema=ANY):
    return list(Source(str(path), path).records(Counter(), lambda _: None, schema))


def texts(path):
    return [record.content for record in read(path)]


def test_arrays_hold_the_same_records_as_lines_wherever_blocks_end(tmp_path, monkeypatch):
    rng = random.Random(0)
    pieces = ['"', "\\", "[", "]{", "},", "é", "\n", "日", ":", "\\u0041", "x"]
    wanted = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(40)]
    records = [{"text": text, "about": [{"a": [text]}, []]} for text in wanted]
    path = tmp_path / "a.json"
    for content in (
        json.dumps(records),
        "\n " + json.dumps(records, indent=1, ensure_ascii=False) + "\n",
        "\ufeff" + json.dumps(records),
        "\n".join(map(json.dumps, records)),
    ):
        path.write_text(content, encoding="utf-8")
        for size in (1, 7, 1 << 20):
            monkeypatch.setattr(arrays, "BLOCK", size)
            assert texts(path) == wanted
    assert read(path)[1].where == f"{path}, line 2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"},\n {"text": 3}]', r"a\.json, record 2 \(line 2\): 'text' is a number"),
        ('[{"text": "a"},\n {"text": "b}]', r"ends within its array, in record 2 \(line 1\)"),
        ('[{"text": "a"}] x', "text after the end of the array"),
        ('[{"text": "a"},\n, {"text": "b"}]', "line 2: a comma without a record"),
        ('[{"text": "a"},\n]', "line 2: a comma without a record"),
        ('["a"]', r"record 1 \(line 1\): found a string, expected a JSON object"),
        ('[{"text": "' + "a" * 300 + '"}]', r"record 1 \(line 1\): longer than 200 bytes"),
    ],
)
def test_a_damaged_array_is_named(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(lines, "LONGEST_LINE", 200)
    monkeypatch.setattr(arrays, "BLOCK", 16)
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_csv_written_by_the_standard_library_is_read(tmp_path, name, separator):
    rng = random.Random(1)
    pieces = ['"', ",", "\t", "\n", "\r\n", "é", "x", " ", '""', ";"]
    rows = [["".join(rng.choices(pieces, k=rng.randint(0, 6))) for _ in range(2)] for _ in range(60)]
    rows = [["q" + question, answer] for question, answer in rows]
    with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=separator).writerows([["question", "answer"], *rows])
    records = read(tmp_path / name, Schema(columns=PAIR))
    assert [list(record.content) for record in records] == rows


def test_lists_and_labels_in_spreadsheets_are_parsed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\na,b,True\nc,d,0\n")
    assert [record.content[2] for record in read(path, Schema((LABELLED,)))] == [True, False]
    path.write_text('messages\n"[{""role"": ""assistant"", ""content"": ""a""}]"\n')
    assert read(path)[0].content.messages == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text\nab\n\nc,d\n", r"a\.csv, row 2 \(line 4\): 2 fields, and the header has 1 columns"),
        ('text\n"a\nb', r"line 2: a quote in this row is not closed"),
        ('text\n"a"b\n', r"line 2: found 'b\\n' after a quoted field"),
        ("text,text\n", "has the column 'text' twice"),
        ("question,answer\na,b\n", r"row 1 .*or --columns prompt=question,completion=answer"),
    ],
)
def test_a_damaged_spreadsheet_is_named(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_alpaca_becomes_messages_or_a_prompt_and_is_counted():
    counts = Counter()
    fields = {"instruction": "Add.", "input": "1 1", "output": "2", "text": "all", "history": [["q", "a"]]}
    record = parse_fields("a", {**fields, "system": "s"}, counts)
    assert [(m["role"], m["content"]) for m in record.content.messages] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "Add.\n\n1 1"),
        ("assistant", "2"),
    ]
    assert counts["records of Alpaca's form (instruction, input, output), read as messages"] == 1
    plain = Schema(chat=False)
    with pytest.raises(DataError, match="needs a chat template"):
        parse_fields("a", fields, counts, plain)
    prompt, completion = parse_fields(
        "a", {"instruction": "Hi", "input": "", "output": "x"}, counts, plain
    ).content
    assert prompt.endswith("request.\n\n### Instruction:\nHi\n\n### Response:\n")
    assert completion == "x"
    with pytest.raises(DataError, match="'output' is 3; expected a string"):
        parse_fields("a", {"instruction": "Hi", "output": 3}, counts)


def test_columns_are_renamed_to_fields():
    schema = Schema(columns=parse_columns("prompt=question,completion=answer"))
    counts = Counter()
    assert parse_fields("a", {"question": "q", "answer": "a", "text": "t"}, counts, schema).content == (
        "q",
        "a",
    )
    assert counts == {"fields 'text' left aside": 1}
    assert {"question", "answer"} <= schema.fields()
    assert "prompt" not in schema.fields()
    with pytest.raises(DataError, match="there is no column 'question' for 'prompt'; found 'q'"):
        parse_fields("a", {"q": "q"}, counts, schema)
    for wrong in ("prompt", "prompt=a,prompt=b", "prompt=a,completion=a"):
        with pytest.raises(ConfigError, match="columns is"):
            parse_columns(wrong)
    with pytest.raises(ConfigError, match="columns names prompt, text"):
        Schema(columns=parse_columns("prompt=a,text=b"))


def test_slices_of_splits_match_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {name: [{"text": f"{name} {n}"} for n in range(11)] for name in ("train", "test")}
    sizes = {name: datasets.SplitInfo(name, num_examples=len(found)) for name, found in rows.items()}

    def load_dataset(repository, config, *, split, revision, streaming):
        return datasets.Dataset.from_list(rows[split]).to_iterable_dataset()

    def load_dataset_builder(repository, config, revision):
        return type("Builder", (), {"info": datasets.DatasetInfo(splits=datasets.SplitDict(sizes))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(tables, "commit_of", lambda name: "one")
    (name,) = with_split(["hf:owner/name"], "train[:90%]+test[-2:]")
    (source,) = find_sources(name, Counter())
    found = [record.content for record in source.records(Counter(), lambda _: None)]
    everything = datasets.DatasetDict({name: datasets.Dataset.from_list(r) for name, r in rows.items()})
    assert found == [*everything["train"]["text"][:10], "test 9", "test 10"]
    assert with_split(["hf:a/b:c", "hf:a/b::test", "x"], "t[:1]") == ["hf:a/b:c:t[:1]", "hf:a/b::test", "x"]
    with pytest.raises(DataError, match="no data set of the hub"):
        with_split(["a.jsonl"], "train")


def test_a_missing_file_named_as_a_data_set_says_how_to_name_it():
    with pytest.raises(DataError, match="does not exist; for the data set of the hub write hf:owner/name"):
        find_sources("owner/name", Counter())


def test_a_run_trains_on_columns_of_a_spreadsheet(settings_for, tmp_path):
    from liger_models.training import train

    (tmp_path / "a.csv").write_text("question,answer\n" + "ab cd,efg h\n" * 8)
    config = settings_for(tmp_path / "run", data=(str(tmp_path / "a.csv"),), steps=1)
    with pytest.raises(DataError, match="--columns prompt=question,completion=answer"):
        train(config)
    assert train(replace(config, columns="prompt=question,completion=answer")).steps == 1
