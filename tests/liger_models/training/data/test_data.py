import itertools
import json
import random
import sys

import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.training.data import (
    IGNORE,
    START,
    Position,
    Stream,
    load_documents,
    split,
)
from liger_models.training.text.tokenizer import TextTokenizer


@pytest.fixture
def tokenizer(tokenizer_folder):
    return TextTokenizer(tokenizer_folder)


@pytest.fixture
def load(tokenizer, tmp_path, jsonl):
    """Function that writes records (or raw bytes) to data.jsonl and loads them as documents."""

    def make(records, *, seq_len=32, vocab_size=320, **options):
        path = tmp_path / "data.jsonl"
        if isinstance(records, bytes):
            path.write_bytes(records)
        else:
            jsonl(path, records)
        return load_documents([str(path)], tokenizer, seq_len=seq_len, vocab_size=vocab_size, **options)

    return make


@pytest.fixture
def mixed(load, data):
    """Texts and whole examples of random lengths."""
    with open(data, encoding="utf-8") as lines:
        return load([json.loads(line) for line in lines], seq_len=80)


def bounds(documents):
    """(first token, last token, whole) of each document, in the numbering of pieces."""
    found = []
    for base, part in zip(documents.bases, documents.parts, strict=False):
        a, b, whole = part.bounds(torch.arange(len(part)))
        found += zip((a + base).tolist(), (b + base).tolist(), whole.tolist(), strict=True)
    return found


def everything(documents):
    """Tokens and marks of a corpus, read document by document."""
    parts = [documents.parts[0].corpus.read(a, b + 1) for a, b, _ in bounds(documents)]
    return torch.cat([ids.long() for ids, _ in parts]), torch.cat([trained for _, trained in parts])


def pairs_of(documents, d):
    """Expected (input, label) pairs of a document."""
    start, stop, _ = bounds(documents)[d]
    ids, trained = (values.tolist() for values in documents.parts[0].corpus.read(start, stop + 1))
    return [(a, b if t else IGNORE) for a, b, t in zip(ids, ids[1:], trained[1:], strict=False)]


def pairs_in(batch):
    """(input, label) of each packed document in a batch."""
    inputs, labels = batch.input_ids[0].tolist(), batch.shift_labels[0].tolist()
    bounds = batch.cu_seqlens.tolist()
    return [list(zip(inputs[a:b], labels[a:b], strict=True)) for a, b in itertools.pairwise(bounds)]


def test_an_epoch_has_every_pair_of_input_and_label_once_in_order(mixed):
    pieces = [
        (row[i].start, pairs)
        for row in Stream(mixed, 80, seed=3).epoch(0)
        for i, pairs in enumerate(pairs_in(mixed.batch([row])))
    ]
    seen = [pair for _, pairs in sorted(pieces, key=lambda piece: piece[0]) for pair in pairs]
    assert seen == [pair for d in range(len(mixed)) for pair in pairs_of(mixed, d)]


def test_at_most_one_row_of_text_is_not_full(load, jsonl):
    rng = random.Random(5)
    documents = load([{"text": "x y z " * rng.randint(1, 60)} for _ in range(20)])
    lengths = [documents.batch([row]).input_ids.shape[1] for row in Stream(documents, 32, seed=0).epoch(0)]
    assert len([length for length in lengths if length != 32]) <= 1
    assert max(lengths) == 32


def test_a_whole_example_is_never_cut(mixed):
    pieces = [piece for row in Stream(mixed, 80, seed=0).epoch(1) for piece in row]
    examples = [(start, stop) for start, stop, whole in bounds(mixed) if whole]
    assert len(examples) == 20
    assert set(examples) <= set(pieces)


def test_the_order_depends_on_seed_and_epoch_only(mixed):
    def order(seed, epoch):
        torch.manual_seed(random.randrange(1000))
        return list(Stream(mixed, 64, seed).epoch(epoch))

    assert order(1, 0) == order(1, 0)
    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_the_rows_of_a_long_document_are_spread_over_the_epoch(load):
    documents = load([{"text": "x y " * 400}, {"text": "z " * 400}])
    starts = [row[0].start for row in Stream(documents, 8, seed=0).epoch(0)]
    neighbours = sum(b - a == 8 for a, b in itertools.pairwise(starts))
    assert neighbours < 0.2 * len(starts)


def test_a_stream_continues_from_any_position(mixed):
    stream = Stream(mixed, 64, seed=2)
    per_epoch = stream.count_rows(1)
    rows, positions = [], [START]
    for _ in range(2 * per_epoch + 3):
        rows += stream.take(1)
        positions.append(stream.position)
    for done in (0, 1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch):
        assert Stream(mixed, 64, 2, positions[done]).take(3) == rows[done : done + 3]


def test_the_number_of_rows_of_an_epoch_is_correct(mixed):
    stream = Stream(mixed, 64, seed=2)
    whole = stream.count_rows(2)
    stream.take(whole)
    assert stream.position.epoch == 1
    stream.take(1)
    assert stream.position == Position(2, 1)
    assert stream.count_rows(0.5) == round(stream.count_rows(1) / 2)


def test_the_number_of_labels_matches_the_batch(mixed):
    for row in Stream(mixed, 64, seed=0).epoch(0):
        assert mixed.count([row]).labels == (mixed.batch([row]).shift_labels != IGNORE).sum()


@pytest.mark.parametrize("completion", ["yes", " a b", "\n\n", "  x\n", "é", "</s>", "\t"])
def test_only_the_completion_and_its_end_are_trained(load, tokenizer, completion):
    prompt = "abc def:"
    tokens, marks = everything(load([{"prompt": prompt, "completion": completion}]))
    trained = tokens[marks].tolist()
    rest = tokens[~marks].tolist()
    text = tokenizer.backend.decode(trained, skip_special_tokens=False)
    assert text == (completion if completion == "</s>" else completion + "</s>")
    assert tokenizer.backend.decode(rest, skip_special_tokens=False) == "<s>" + prompt


def test_a_token_that_spans_prompt_and_completion_is_trained(load, tokenizer):
    whole = "\n\n"  # one token in this vocabulary
    assert len(tokenizer.backend.encode(whole, add_special_tokens=False).ids) == 1
    tokens, marks = everything(load([{"prompt": "\n", "completion": "\n"}]))
    assert tokenizer.backend.decode(tokens[marks][:1].tolist()) == whole


def test_every_token_of_a_text_is_trained_including_a_final_eos(load, tokenizer):
    tokens, marks = everything(load([{"text": "abc def"}]))
    assert tokens.tolist() == [*tokenizer.encode("abc def"), tokenizer.eos_id]
    assert marks.tolist() == [False] + [True] * (len(tokens) - 1)


def test_only_the_assistants_messages_are_trained(load, tokenizer):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a b?"},
        {"role": "assistant", "content": "cd\n"},
        {"role": "user", "content": "e?"},
        {"role": "assistant", "content": " fg"},
    ]
    tokens, marks = everything(load([{"messages": messages}], seq_len=100))
    text = tokenizer.backend.decode(tokens.tolist(), skip_special_tokens=False)
    trained = tokenizer.backend.decode(tokens[marks].tolist(), skip_special_tokens=False)
    assert text.startswith("<s><|system|>be brief</s>\n<|user|>a b?</s>\n<|assistant|>cd\n")
    assert trained == "cd\n</s>\n fg</s>\n"


def test_without_jinja2_the_error_names_the_package(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DataError, match="pip install jinja2"):
        load([{"messages": [{"role": "assistant", "content": "a"}]}])


def test_a_long_example_is_refused_and_cut_only_on_request(load):
    records = [{"prompt": "ab", "completion": "c"}, {"prompt": "a " * 4, "completion": "b " * 40}]
    with pytest.raises(DataError, match=r"line 2: .*seq_len is 32"):
        load(records)
    documents = load(records, truncate=True)
    assert documents.counts["truncated"] == 1
    start, stop, _ = bounds(documents)[1]
    assert stop - start == 32


def test_an_example_without_room_for_a_label_is_skipped_and_counted(load):
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "x " * 40, "completion": "b"}]
    documents = load(records, truncate=True)
    assert len(documents) == 1
    assert documents.counts["without anything to train, left out"] == 1


def test_ignored_fields_are_counted(load):
    raw = b'{"text": "ab", "url": "u"}\n\n{"text": ""}\n{"text": "cd", "url": "v"}\n'
    counts = load(raw).counts
    assert counts["fields 'url' left aside"] == 2
    assert counts["blank lines"] == 1
    assert counts["without anything to train, left out"] == 1
    assert counts["documents"] == 2


GOOD = b'{"text": "abc"}\n'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GOOD + GOOD + b'{"text": "abc"\n', r"data\.jsonl, line 3: not valid JSON at column 15: "),
        (GOOD + b'{\n"text": "abc"}\n', r"line 2: not valid JSON at column 2: .* belongs in a \.json file"),
        (GOOD + b'{"text": "\xff"}\n', "line 2: not UTF-8"),
        (GOOD + b'["abc"]\n', r"line 2: found a list, .* belongs in a \.json file"),
        (b'{"dialog": []}\n', r"found 'dialog'; .*--columns messages=dialog"),
        (b'{"question": "a", "chosen": "b", "rejected": "c"}\n', "pairs are for --objective dpo"),
        (GOOD + b'{"body": "abc"}\n', "line 2: found 'body'; expected exactly one of text"),
        (GOOD + b"{}\n", "line 2: found no fields"),
        (b'{"text": "a", "prompt": "b", "completion": "c"}\n', "line 1: found 'text', 'prompt'"),
        (b'{"prompt": "b"}\n', "line 1: .*'completion' is missing"),
        (b'{"prompt": "b", "chosen": "c", "rejected": "d"}\n', "is missing.* for --objective dpo"),
        (b'{"prompt": "b", "response": "c"}\n', "--columns prompt=prompt,completion=response"),
        (b'{"text": 3}\n', "'text' is a number, expected a string"),
        (b'{"text": null}\n', "'text' is null"),
        (b'{"text": "\\ud800"}\n', "line 1: character 0 is half of a surrogate pair"),
        (b'{"messages": []}\n', "line 1: no message has the role 'assistant'"),
        (b'{"messages": "hi"}\n', "line 1: 'messages' must be a list"),
        (b'{"messages": [{"role": "assistant"}]}\n', "line 1: a message has neither 'content'"),
        (GOOD + b'{"text": ' + b"[" * 100_000 + b"\n", "line 2: JSON that cannot be read"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n", "line 1: JSON that cannot be read"),
        (b"", "data.jsonl is empty"),
        (b"\n\n", "data.jsonl is empty"),
        (b'{"text": ""}\n', "nothing to train on"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(load, raw, message):
    with pytest.raises(DataError, match=message):
        load(raw)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.txt", b" \n ", r"a\.txt is empty"),
        ("a.md", b"ab\xff", "not UTF-8 at byte 2"),
        ("a.xls", b"a,b", "suffix '.xls'; expected .txt, .md, .json, .jsonl"),
        ("a.py", b"x = 1", r"'\.py'; .*for other texts, such as source code, write a \.jsonl file"),
        (
            "a.csv",
            b"question;answer\na;b\n",
            "header is one column, 'question;answer'; fields are separated by",
        ),
        ("a.txt", None, "does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tokenizer, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_documents([str(path)], tokenizer, seq_len=8, vocab_size=320)


def test_a_token_outside_the_vocabulary_is_named_with_its_line(load):
    with pytest.raises(DataError, match=r"line 1: token '.*' has id \d+ and .* has 3 entries"):
        load([{"text": "abc"}], vocab_size=3)


def test_a_byte_order_mark_is_not_text(tokenizer, tmp_path):
    (tmp_path / "marked.txt").write_bytes("abé".encode("utf-8-sig"))
    (tmp_path / "plain.txt").write_bytes("abé".encode())
    marked, plain = (
        load_documents([str(tmp_path / name)], tokenizer, seq_len=8, vocab_size=320)
        for name in ("marked.txt", "plain.txt")
    )
    assert torch.equal(everything(marked)[0], everything(plain)[0])


def test_a_text_file_is_one_document(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("ab\n\ncd")
    (tmp_path / "b.md").write_text("ef")
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.md")]
    documents = load_documents(files, tokenizer, seq_len=8, vocab_size=320)
    start, stop, _ = bounds(documents)[0]
    assert tokenizer.decode(everything(documents)[0][start : stop + 1].tolist()) == "ab\n\ncd"
    assert len(documents) == 2


def test_held_out_documents_are_whole_and_never_trained_on(mixed):
    train, held = split(mixed, 0.2, seed=4)
    texts = lambda docs: sorted(pairs_of(docs, d) for d in range(len(docs)))  # noqa: E731
    tokens = [sum(len(pairs_of(docs, d)) + 1 for d in range(len(docs))) for docs in (held, mixed)]
    assert 0.1 < tokens[0] / tokens[1] <= 0.2
    assert sorted(texts(train) + texts(held)) == texts(mixed)
    assert texts(split(mixed, 0.2, seed=4)[1]) == texts(held)
    assert texts(split(mixed, 0.2, seed=5)[1]) != texts(held)


def test_one_document_cannot_be_split(load):
    with pytest.raises(DataError, match="pass a held-out file"):
        split(load([{"text": "abc"}]), 0.5, seed=0)


def test_the_fingerprint_detects_any_change_of_tokens_or_marks(load):
    base = load([{"prompt": "ab", "completion": "cd"}]).fingerprint()
    assert load([{"prompt": "ab", "completion": "cd"}]).fingerprint() == base
    others = [{"prompt": "ab", "completion": "ce"}, {"prompt": "a", "completion": "bcd"}, {"text": "abcd"}]
    assert len({base, *(load([other]).fingerprint() for other in others)}) == 4


def test_a_tokenizer_without_an_end_of_sequence_is_refused(tokenizer_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(DataError, match='set "eos_token"'):
        load_documents([str(tmp_path / "a.txt")], TextTokenizer(tmp_path), seq_len=8, vocab_size=320)


def test_eos_comes_from_the_model_config_if_the_tokenizer_names_none(tokenizer_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert TextTokenizer(tmp_path).eos_id == 7


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no tokenizer\.json"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        TextTokenizer(tmp_path)
