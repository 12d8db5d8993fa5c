"""`liger-models look` marks exactly the tokens on which a run trains."""

import itertools
import json
import re

import pytest
import torch

from liger_models.cli import main
from liger_models.training.data import load_documents, preview_records, preview_rows
from liger_models.training.text.tokenizer import TextTokenizer

CHAT = [
    {"role": "user", "content": "ab\x1b[2J"},
    {"role": "assistant", "content": "cdé"},
    {"role": "user", "content": "e f"},
    {"role": "assistant", "content": "日本 gh"},
]


def look(capsys, *arguments):
    assert main(["look", *map(str, arguments)]) == 0
    return capsys.readouterr().out


ASKED, ANSWER, AGAIN = r"<s><|user|>ab\x1b[2J</s>", "<|assistant|>⟦cdé</s>", "⟧<|user|>e f</s>"
LAST = ["<|assistant|>⟦日本 gh</s>", "⟧"]


@pytest.mark.parametrize(
    ("train_on", "wanted"),
    [
        ("all", [ASKED, ANSWER, AGAIN, *LAST]),
        ("last", [ASKED, ANSWER.replace("⟦", ""), AGAIN.replace("⟧", ""), *LAST]),
    ],
)
def test_answers_are_marked_in_conversations(
    capsys, tokenizer_folder, jsonl, tmp_path, train_on, wanted, monkeypatch
):
    data = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 5)
    out = look(capsys, data, "--model", tokenizer_folder, "--train-on", train_on, "--examples", 2)
    title, *text = out.split("\n")
    assert text[: len(wanted)] == wanted
    assert out.count("--- ") == 2
    tokens, trained, masked = map(
        int, re.search(r"(\d+) tokens, (\d+) trained, (\d+) masked", title).groups()
    )
    assert tokens == trained + masked
    assert f"2 sequences: {2 * tokens} tokens, {2 * trained} trained" in out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = look(capsys, data, "--model", tokenizer_folder, "--train-on", train_on, "--examples", 1)
    assert "1 sequence: " in coloured
    green = "".join(re.findall(r"\x1b\[(?:32|92)m(.*?)\x1b\[0m", coloured, re.DOTALL))
    assert green == "".join(re.findall("⟦(.*?)⟧", "\n".join(wanted), re.DOTALL)).replace("\n", "↵\n")


def test_each_form_is_marked_as_in_the_corpus(capsys, tokenizer_folder, jsonl, tmp_path, judged):
    tokenizer = TextTokenizer(tokenizer_folder)
    records = [{"text": "ab cd"}, {"prompt": "ab ", "completion": "é"}, {"messages": CHAT}]
    for data, form in (
        (jsonl(tmp_path / "a.jsonl", records), None),
        (judged["pairs"], "prompt/chosen/rejected"),
    ):
        documents = load_documents(
            [data], tokenizer, seq_len=256, vocab_size=320, form=form, cache=tmp_path / "cache"
        )
        (corpus,) = (part.corpus for part in documents.parts)
        held = [corpus.read(*pair) for pair in itertools.pairwise(corpus.starts.tolist())]
        ids, trained = (torch.cat(parts).tolist() for parts in zip(*held, strict=True))
        shown = list(preview_records([data], tokenizer, 99, documents.counts.copy(), form=form))
        assert [token for one in shown for token in one.ids] == ids
        assert [mark for one in shown for mark in one.trained] == trained
        pieces = [piece for row in preview_rows(documents, 256, 0, 1) for piece in row]
        assert {tuple(p.ids) for p in pieces} <= {tuple(i.tolist()) for i, _ in held}
    out = look(capsys, judged["pairs"], "--model", tokenizer_folder, "--objective", "dpo", "--examples", 1)
    assert 0 < out.index(", chosen: ") < out.index(", rejected: ")


def test_rows_show_their_documents_and_long_sequences_are_truncated(
    capsys, tokenizer_folder, jsonl, tmp_path
):
    data = jsonl(tmp_path / "a.jsonl", [{"text": "ab cd " * 9}] * 4)
    arguments = (data, "--model", tokenizer_folder, "--rows", 1, "--seq-len", 64, "--tokens", 3)
    out = look(capsys, *arguments, "--data-cache", tmp_path / "cache")
    assert "--- row 1, positions 0 to " in out
    assert re.search(r"\.\.\. and \d+ more tokens, \d+ of them trained", out)
    assert "4 documents" in out


def test_alpaca_is_recognised_in_the_preview(capsys, tokenizer_folder, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "ab", "input": "", "output": "cd"}]))
    out = look(capsys, tmp_path / "a.json", "--model", tokenizer_folder)
    assert "<|user|>ab</s>\n<|assistant|>⟦cd</s>\n⟧" in out
    assert "1 records of Alpaca's form" in out


def test_data_without_records_are_an_error(capsys, tokenizer_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert main(["look", str(tmp_path / "a.jsonl"), "--model", str(tokenizer_folder)]) == 2
    assert "a.jsonl: there are no records; expected text or records" in capsys.readouterr().err
