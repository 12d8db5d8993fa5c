"""Corpora: sources, tokenizing once, memory mapping, and the cache."""

import gzip
import os
import random
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
from ranks import Fork

from liger_models.cli import main
from liger_models.convert.errors import DataError
from liger_models.training.data import Stream, build_corpus, encoding, load_documents
from liger_models.training.data.corpora.corpus import Corpus
from liger_models.training.data.corpora.writing import written_corpus
from liger_models.training.data.documents import Documents, Part
from liger_models.training.data.reading import lines, tables
from liger_models.training.text.tokenizer import TextTokenizer

RECORDS = [
    {"text": "ab cd"},
    {"prompt": "ab", "completion": "cd"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"text": "é ef " * 20},
]


@pytest.fixture
def tokenizer(tokenizer_folder):
    return TextTokenizer(tokenizer_folder)


@pytest.fixture
def load(tokenizer, tmp_path):
    def make(*names, **options):
        options = {"seq_len": 64, "vocab_size": 320, "cache": tmp_path / "cache"} | options
        return load_documents([str(name) for name in names], tokenizer, **options)

    return make


def contents(documents):
    """(ids, marks, whole) of every document."""
    found = []
    for part in documents.parts:
        starts, stops, whole = part.bounds(torch.arange(len(part)))
        for a, b, w in zip(starts.tolist(), stops.tolist(), whole.tolist(), strict=True):
            ids, trained = part.corpus.read(a, b + 1)
            found.append((ids.tolist(), trained.tolist(), w))
    return found


def built(corpus_or_documents):
    """Return the time at which a corpus was written, which shows whether it was built again."""
    return [(p.corpus.folder / "manifest.json").stat().st_mtime_ns for p in corpus_or_documents.parts]


# ------------------------------------------------------------------------------------------------- sources


def test_all_kinds_of_sources_give_the_same_data(load, tmp_path, jsonl, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for name in ("plain", "packed", "table", "folder/.hidden"):
        (tmp_path / name).mkdir(parents=True)
    lines = jsonl(tmp_path / "plain" / "a.jsonl", RECORDS)
    expected = contents(load(lines))
    assert len(expected) == len(RECORDS)
    raw = (tmp_path / "plain" / "a.jsonl").read_bytes()
    (tmp_path / "packed" / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    keys = ("text", "prompt", "completion", "messages")
    rows = [{key: record.get(key) for key in keys} for record in RECORDS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table" / "a.parquet")
    jsonl(tmp_path / "folder" / "1.jsonl", RECORDS[:1])
    jsonl(tmp_path / "folder" / "2.jsonl", RECORDS[1:])
    jsonl(tmp_path / "folder" / ".hidden" / "3.jsonl", RECORDS)
    (tmp_path / "folder" / "picture.png").write_bytes(b"")
    assert contents(load(tmp_path / "packed" / "a.jsonl.gz")) == expected
    assert contents(load(tmp_path / "table" / "a.parquet")) == expected
    in_folder = load(tmp_path / "folder")
    assert contents(in_folder) == expected
    assert in_folder.counts["files of other kinds left aside"] == 1
    assert contents(load(tmp_path / "folder" / "*.jsonl")) == expected
    assert contents(load(tmp_path / "folder" / "1.jsonl", tmp_path / "folder" / "2.jsonl")) == expected
    with open(lines, "rb") as file:
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=file))
        assert contents(load("-")) == expected


def test_a_data_set_of_the_hub_is_streamed_and_pinned_to_a_commit(load, monkeypatch, tmp_path, jsonl):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return iter({**record, "id": None} for record in RECORDS)

    commit = ["one"]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(tables, "commit_of", lambda name: commit[0])
    documents = load("hf:owner/name:de:test")
    assert contents(documents) == contents(load(jsonl(tmp_path / "a.jsonl", RECORDS)))
    assert asked == [(("owner/name", "de"), {"split": "test", "revision": "one", "streaming": True})]
    load("hf:owner/name:de:test")
    assert len(asked) == 1
    commit[0] = "two"
    load("hf:owner/name:de:test")
    assert len(asked) == 2
    assert asked[1][1]["revision"] == "two"


def test_datasets_accepts_our_streaming_call(load, monkeypatch, tmp_path, jsonl):
    datasets = pytest.importorskip("datasets")
    jsonl(tmp_path / "train.jsonl", RECORDS[1:2] * 3)
    real = datasets.load_dataset

    def local(repository, config, *, revision, **options):
        return real("json", data_files=str(tmp_path / "train.jsonl"), cache_dir=str(tmp_path), **options)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr(tables, "commit_of", lambda name: "one")
    assert contents(load("hf:owner/name")) == contents(load(tmp_path / "train.jsonl"))


def test_data_sets_keep_json_values_and_need_no_features(monkeypatch):
    datasets = pytest.importorskip("datasets")
    tools = [{"type": "function", "function": {"name": "f"}}]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": talk, "tools": tools, "about": [{"a": 1}]}
    text, json_of = datasets.Value("string"), datasets.Json()
    features = datasets.Features({"messages": [{"role": text, "content": text}], "tools": json_of})
    features["about"] = datasets.List(datasets.Json())
    typed = datasets.Dataset.from_list([row], features).to_iterable_dataset()
    untyped = datasets.IterableDataset.from_generator(lambda: iter([row]))
    assert untyped.features is None
    for data in (typed, untyped):
        (found,) = tables._undecoded(data)
        assert found == row


def test_zstandard_frames_give_the_same_data_and_a_truncated_file_is_refused(
    load, tmp_path, jsonl, monkeypatch
):
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setattr(lines, "PACKED", 37)  # so that neither lines nor frames end at a block
    raw = Path(jsonl(tmp_path / "a.jsonl", RECORDS)).read_bytes()
    pack = zstandard.ZstdCompressor().compress
    packed = tmp_path / "a.jsonl.zst"
    packed.write_bytes(pack(raw[:100]) + pack(raw[100:]))
    assert contents(load(packed)) == contents(load(tmp_path / "a.jsonl"))
    packed.write_bytes(pack(raw)[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be unpacked \(it ends within a frame\)"):
        load(packed)
    packed.write_bytes(b"no Zstandard")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be unpacked .* not Zstandard"):
        load(packed)


def test_the_error_for_a_missing_reader_names_the_package(load, tmp_path, monkeypatch):
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        monkeypatch.setitem(sys.modules, package, None)
        (tmp_path / name).write_bytes(b"0")
        with pytest.raises(DataError, match=f"{name} needs {package}: pip install 'liger_models"):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz cannot be unpacked"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "ab"}\n{"text": 3}\n'),
            r"a\.jsonl\.gz, line 2: 'text' is a number",
        ),
        ("a.jsonl.gz", gzip.compress(random.Random(0).randbytes(999))[:500], "cannot be unpacked|line 1"),
        ("a.parquet", b"PAR1 but no more", r"a\.parquet cannot be read as Parquet"),
    ],
    ids=["not gzip", "bad line", "cut", "no Parquet"],  # gzip includes the time, so its output is no id
)
def test_a_damaged_file_is_named(load, tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_row_of_a_table_that_cannot_be_used_is_named(load, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.Table.from_pylist([{"text": "ab"}, {"text": None}])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: found no fields; expected exactly one of text"):
        load(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"body": "ab"}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has the columns body; expected exactly one of text"):
        load(tmp_path / "b.parquet")


def test_the_error_names_missing_data(load, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no file of a known kind"):
        load(tmp_path / "empty")
    with pytest.raises(DataError, match="no file matches"):
        load(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match="expected hf:OWNER/NAME"):
        load("hf:../secret")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(tables, "commit_of", lambda name: "one")
    with pytest.raises(DataError, match=r"pip install 'liger_models\[data\]'"):
        load("hf:owner/name")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DataError, match="standard input can be read once"):
        load("-")


def test_a_long_text_is_tokenized_in_blocks_to_the_same_tokens(load, tmp_path, monkeypatch):
    rng = random.Random(2)
    words = ["ab", "cdé", "e\n", "\n\n", "  ", "日本", "fghij" * 3, "😀", "x.", "\t"]
    text = "".join(rng.choice(words) + rng.choice(["", " "]) for _ in range(6000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    whole = contents(load(tmp_path / "a.txt"))
    for name, size in {"LONG_TEXT": 1000, "BLOCK": 3000, "OVERLAP": 400}.items():
        monkeypatch.setattr(lines, name, size)
    monkeypatch.setattr(encoding, "OVERLAP", 400)
    assert contents(load(tmp_path / "a.txt", cache=tmp_path / "other")) == whole


def test_a_text_that_cannot_be_split_is_refused(load, tmp_path, monkeypatch, tokenizer):
    with pytest.raises(DataError, match="cannot tokenize a long text in parts"):
        list(tokenizer.encode_blocks(["abc " * 100, "xyz" * 100], overlap=50))


# ------------------------------------------------------------------------------------------------- the cache


def test_the_same_data_are_tokenized_once(load, tmp_path, jsonl, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    first = load(path)
    assert built(load(path)) == built(first)
    assert built(load(path, seq_len=50)) == built(first)
    os.utime(path, ns=(1, 1))  # such as by copying: another time, the same bytes
    assert built(load(path)) == built(first)
    assert load(path).fingerprint() == first.fingerprint()
    monkeypatch.chdir(tmp_path)
    assert built(load("a.jsonl")) == built(first)
    twice = load(path, path)
    assert built(load(path, path)) == built(twice) != built(first)


def test_data_that_change_while_they_are_read_are_refused(load, tmp_path, jsonl, monkeypatch, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    encode = TextTokenizer.encode_batch

    def changed(self, texts):
        jsonl(tmp_path / "a.jsonl", RECORDS[::-1])
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode_batch", changed)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        load(path)


@pytest.mark.parametrize("change", ["content", "tokenizer", "truncate", "damage", "manifest"])
def test_changed_data_tokenizers_options_and_damage_rebuild_the_corpus(
    load, tmp_path, jsonl, change, tokenizer, tokenizer_folder
):
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    first = load(path)
    before, options = built(first), {}
    folder = first.parts[0].corpus.folder
    if change == "content":
        jsonl(tmp_path / "a.jsonl", [*RECORDS[:-1], {"text": "é eg " * 20}])  # of the same size
    elif change == "tokenizer":
        tokenizer.eos_id = 3
    elif change == "truncate":
        options["truncate"] = True
    elif change == "damage":
        (folder / "tokens-00000.bin").write_bytes(b"0")
    else:
        (folder / "manifest.json").write_text('{"format": 1}')
    again = load(path, **options)
    assert built(again) != before
    assert (again.fingerprint() == first.fingerprint()) == (change in ("truncate", "damage", "manifest"))


def test_a_changed_byte_is_found_on_request_and_in_files_newer_than_the_manifest(
    load, tmp_path, jsonl, tokenizer
):
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    corpus = tmp_path / "corpus"
    build_corpus(corpus, [path], tokenizer, seq_len=64, vocab_size=320)
    expected = contents(load(corpus, verify=True))
    for name in ("tokens-00000.bin", "trained-00000.bin", "starts.bin", "whole.bin"):
        content = (corpus / name).read_bytes()
        (corpus / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(DataError, match="has changed since it was written"):
            load(corpus)
        os.utime(corpus / name, (0, 0))  # as a failing disk does, silently
        load(corpus)
        with pytest.raises(DataError, match="has changed since it was written"):
            load(corpus, verify=True)
        (corpus / name).write_bytes(content)  # a copy is newer than its manifest, and valid
        assert contents(load(corpus)) == expected
    cached = load(path)
    place = cached.parts[0].corpus.folder / "tokens-00000.bin"
    place.write_bytes(place.read_bytes()[::-1])
    assert contents(load(path)) == expected


def test_limits_hold_for_existing_corpora(load, tmp_path, jsonl):
    path = jsonl(tmp_path / "a.jsonl", [RECORDS[0], RECORDS[1]])
    load(path)
    with pytest.raises(DataError, match=r"line 2: the example has \d+ positions and seq_len is 2"):
        load(path, seq_len=2)
    with pytest.raises(DataError, match=r"line \d: token '.*' has id \d+ and .* has 5 entries"):
        load(path, vocab_size=5)


KILLED = """
import os, signal, sys, time
from liger_models.training.data import load_documents
from liger_models.training.data.corpora import writing
from liger_models.training.text.tokenizer import TextTokenizer
end, ended = writing.CorpusWriter.end, []
def killed(self, *given):
    end(self, *given)
    ended.append(1)
    time.sleep(0.01)
    if len(ended) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
writing.CorpusWriter.end = killed
load_documents([sys.argv[1]], TextTokenizer(sys.argv[2]), seq_len=64, vocab_size=320, cache=sys.argv[3])
"""


@pytest.mark.parametrize("before", [False, True], ids=["new", "again"])
def test_a_kill_leaves_the_previous_corpus_or_none(load, tmp_path, jsonl, tokenizer_folder, before):
    def found():
        return [p for p in (tmp_path / "cache").iterdir() if p.is_dir() and not p.name.startswith(".")]

    path = tmp_path / "a.jsonl"
    old = contents(load(jsonl(path, RECORDS[::-1]))) if before else []
    jsonl(path, RECORDS)
    given = [str(path), str(tokenizer_folder), str(tmp_path / "cache")]
    assert Fork("code", KILLED, *given, output=tmp_path / "said").wait() == -signal.SIGKILL
    assert [contents(Documents([Part(Corpus(folder))])) for folder in found()] == [old] * before
    assert len(load(path)) == len(RECORDS)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == found()  # without leftovers


def test_one_of_two_processes_builds_and_the_other_maps_the_same_corpus(
    load, tmp_path, jsonl, tokenizer_folder
):
    path = jsonl(tmp_path / "a.jsonl", RECORDS * 50)
    code = "import os\nchild = os.fork()\n" + KILLED.replace("== 3", "== 10**9")
    code += "os.write(1, b'%d\\n' % len(ended))\nif child: sys.exit(os.waitpid(child, 0)[1])"
    process = Fork(
        "code", code, path, str(tokenizer_folder), str(tmp_path / "cache"), output=tmp_path / "said"
    )
    assert process.wait() == 0, process.output.read_text()
    assert sorted(map(int, process.output.read_text().split())) == [0, 200]


def test_shards_and_wide_tokens_are_read_as_one_corpus(tmp_path):
    documents = [([i, 70_000 + i, 2], b"\0\1\1") for i in range(20)]
    with written_corpus(tmp_path / "c", 80_000, shard_tokens=10) as writer:
        for ids, trained in documents:
            writer.extend(ids, trained)
            writer.end(whole=True)
        writer.about = {"tokenizer": "", "sources": []}
    corpus = Corpus(tmp_path / "c")
    assert corpus.manifest["dtype"] == "int32"
    assert corpus.manifest["shards"] == [9] * 6 + [6]
    for d, (ids, _) in enumerate(documents):
        assert corpus.read(3 * d, 3 * d + 3)[0].tolist() == ids


def test_a_corpus_folder_can_be_used_as_data_with_the_same_tokenizer(load, tmp_path, jsonl, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    build_corpus(tmp_path / "corpus", [path], tokenizer, seq_len=64, vocab_size=320)
    assert contents(load(tmp_path / "corpus")) == contents(load(path))
    both = load(tmp_path / "corpus", path)
    assert len(both) == 2 * len(RECORDS)
    row = next(Stream(both, 64, 0).epoch(0))
    assert len(both.inputs(row[0])) == row[0].stop - row[0].start
    tokenizer.eos_id = 3
    with pytest.raises(DataError, match="was made with a different tokenizer"):
        load(tmp_path / "corpus")
    with pytest.raises(DataError, match="holds something other than a corpus"):
        build_corpus(tmp_path, [path], tokenizer, seq_len=64, vocab_size=320)


def test_the_command_reports_contents_and_packing(tmp_path, jsonl, tokenizer_folder, capsys):
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    command = ["tokenize", str(tokenizer_folder), "--seq-len", "64", "--data"]
    assert main([*command, path, "--output", str(tmp_path / "corpus")]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "corpus") in said
    assert "4 documents" in said
    assert "rows of 64 tokens" in said
    assert main([*command, str(tmp_path / "corpus")]) == 0
    assert capsys.readouterr().out == said


# ------------------------------------------------------------------------------------------------- memory

MEASURED = """
import sys
from pathlib import Path
from liger_models.training.data import Stream, building, encoding, load_documents
from liger_models.training.text.tokenizer import TextTokenizer

def held():  # bytes that are ours alone: RssAnon counts no page of a mapped file
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) << 10

def peak(name):
    values = []
    building.CorpusBuilder.add = lambda self, records: (add(self, records), values.append(held()))
    documents = load_documents([name], tokenizer, seq_len=512, vocab_size=320, cache=sys.argv[5])
    stream = Stream(documents, 512, 0)
    for _ in range(stream.count_rows(1) // 10):
        documents.batch(stream.take(10))
    return max([*values, held()]), documents.counts["tokens"]

add = building.CorpusBuilder.add
encoding.BATCH_CHARACTERS = 1 << 18
tokenizer = TextTokenizer(sys.argv[1])
_, small, large = (peak(name) for name in sys.argv[2:5])  # the first: pages shared with the fork's parent
print(large[0] - small[0], large[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_data(tmp_path, tokenizer_folder, jsonl):
    """Reading, tokenizing and iterating over rows needs the same memory for six times the data."""
    rng = random.Random(0)
    records = [{"text": "ab cd ef gh " * rng.randint(1, 100)} for _ in range(1000)]
    parts = records[::-1], records, records * 6
    files = [jsonl(tmp_path / f"{k}.jsonl", part) for k, part in enumerate(parts)]
    given = [str(tokenizer_folder), *files, str(tmp_path / "cache")]
    process = Fork("code", MEASURED, *given, output=tmp_path / "said")
    assert process.wait() == 0, process.output.read_text()
    *_, last = process.output.read_text().splitlines()  # after the progress that a slow machine reports
    more, tokens = map(int, last.split())
    assert tokens > 2_000_000
    # Less than a copy of the tokens at four bytes each; a list would take eight.
    assert more < 4 * tokens
