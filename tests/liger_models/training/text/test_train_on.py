"""Answers of a conversation to learn: all, only the last, or each one as rendered at inference."""

import json

import pytest
import torch

from liger_models.convert.errors import ConfigError, DataError
from liger_models.training.data import PAIRS, build_corpus, load_documents
from liger_models.training.data.reading.records import Conversation
from liger_models.training.text.tokenizer import TextTokenizer

ASKED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and SHOWN %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}</s>{% endfor %}"
)
KEEPS = TURNS.replace("SHOWN", "true") + ASKED
DROPS = TURNS.replace("SHOWN", "loop.last") + ASKED  # drops earlier reasoning, as many templates do


def assistant(text, thought=None):
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {})}


def user(text):
    return {"role": "user", "content": text}


CHAT = [user("a"), assistant("b", "h"), user("c"), assistant("d", "i")]


@pytest.fixture
def tokenizer_with(tokenizer_folder, tmp_path):
    def make(template):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        return TextTokenizer(tmp_path)

    return make


@pytest.fixture
def documents_of(tokenizer_with, tmp_path, jsonl):
    """Function that returns the text and learned part of each document of conversations, and the counts."""

    def make(template, *chats, **options):
        path = jsonl(tmp_path / "data.jsonl", [{"messages": chat} for chat in chats])
        tokenizer = tokenizer_with(template)
        documents = load_documents([path], tokenizer, seq_len=64, vocab_size=320, **options)
        (part,) = documents.parts
        found = []
        for start, last, _ in zip(*part.bounds(torch.arange(len(part))), strict=True):
            ids, trained = part.corpus.read(int(start), int(last) + 1)
            text = tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)
            found.append((text, tokenizer.backend.decode(ids[trained].tolist(), skip_special_tokens=False)))
        return found, documents.counts

    return make


WHOLE = "<|user|>a</s><|assistant|>b</s><|user|>c</s><|assistant|>(i)d</s>"
LEFT_OUT = "answers whose reasoning the chat template leaves out"


def test_all_answers_of_the_rendering_are_learned_by_default(documents_of):
    found, counts = documents_of(DROPS, CHAT)
    assert found == [(WHOLE, "b</s>(i)d</s>")]
    assert counts[LEFT_OUT] == 1


def test_only_the_last_answer_is_learned_with_everything_before_it_as_prompt(documents_of):
    found, counts = documents_of(DROPS, CHAT, train_on="last")
    assert found == [(WHOLE, "(i)d</s>")]
    assert LEFT_OUT not in counts


def test_each_answer_is_learned_with_its_reasoning_as_at_inference(documents_of):
    found, counts = documents_of(DROPS, CHAT, [*CHAT, user("e")], train_on="each")
    assert found == [("<|user|>a</s><|assistant|>(h)b</s>", "(h)b</s>"), (WHOLE, "(i)d</s>")] * 2
    assert LEFT_OUT not in counts


def test_examples_that_are_prefixes_of_one_another_are_merged(documents_of):
    """If the template rewrites nothing, nothing is computed twice: "each" equals "all"."""
    each, _ = documents_of(KEEPS, CHAT, train_on="each")
    assert each == documents_of(KEEPS, CHAT)[0]
    assert each == [
        ("<|user|>a</s><|assistant|>(h)b</s><|user|>c</s><|assistant|>(i)d</s>", "(h)b</s>(i)d</s>")
    ]


@pytest.mark.parametrize("template", [DROPS, KEEPS])
def test_answers_in_the_prompt_of_a_comparison_are_not_learned(template, tokenizer_with, tmp_path, jsonl):
    """This also holds if the template rewrites them."""
    record = {"prompt": CHAT[:3], "chosen": [assistant("good", "i")], "rejected": [assistant("bad")]}
    path, tokenizer = jsonl(tmp_path / "data.jsonl", [record]), tokenizer_with(template)
    documents = load_documents([path], tokenizer, seq_len=128, vocab_size=320, form=PAIRS)
    corpus = documents.parts[0].corpus
    ids, trained = corpus.read(0, int(corpus.starts[-1]))
    learned = tokenizer.backend.decode(ids[trained].tolist(), skip_special_tokens=False)
    assert learned == "(i)good</s>bad</s>"
    assert LEFT_OUT not in documents.counts


def test_each_example_has_the_images_before_its_answer():
    image = {"type": "image"}
    messages = [
        {"role": "user", "content": [image, image, {"type": "text", "text": "a"}]},
        assistant("b"),
        {"role": "user", "content": [{"type": "video"}]},
        assistant("d"),
    ]
    found = Conversation(messages, [1, 2, 3]).examples("each")
    assert [(len(one.messages), one.images, one.given) for one in found] == [
        (2, [1, 2], 1),
        (4, [1, 2, 3], 3),
    ]


def test_a_corpus_with_other_answers_than_requested_is_refused(tokenizer_with, tmp_path, jsonl):
    path = jsonl(tmp_path / "data.jsonl", [{"messages": CHAT}])
    tokenizer, corpus = tokenizer_with(DROPS), tmp_path / "corpus"
    build_corpus(corpus, [path], tokenizer, seq_len=64, vocab_size=320, train_on="last")
    with pytest.raises(DataError, match="made with --train-on last and this run asks for all"):
        load_documents([str(corpus)], tokenizer, seq_len=64, vocab_size=320)
    kept = load_documents([str(corpus)], tokenizer, seq_len=64, vocab_size=320, train_on="last")
    assert json.loads((corpus / "manifest.json").read_text())["options"]["train_on"] == "last"
    assert kept.counts["labels"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_on": "first"}, "one of all, last, each"),
        ({"train_on": "last", "objective": "dpo"}, "compares or judges"),
    ],
)
def test_impossible_requests_are_refused_before_loading(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)
