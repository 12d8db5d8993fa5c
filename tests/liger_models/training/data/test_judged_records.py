"""Records of preferences: pairs of answers, and answers with labels."""

from collections import Counter

import pytest
import torch

from liger_models.cli import main
from liger_models.convert.errors import DataError
from liger_models.training.data import load_documents
from liger_models.training.data.reading.records import parse_fields
from liger_models.training.data.reading.schema import PAIRS, Schema
from liger_models.training.text.tokenizer import TextTokenizer

GOOD = {"prompt": "a b", "chosen": "c", "rejected": "d"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "a", "chosen": "c"}, "'rejected' is missing"),
        ({"text": "a"}, "found 'text'; expected prompt/chosen/rejected"),
        (GOOD | {"chosen": ""}, "'chosen' is empty"),
        (
            GOOD | {"rejected": [{"role": "assistant", "content": "x"}]},
            "'rejected' is a list; expected a string",
        ),
        (GOOD | {"prompt": 3, "chosen": 3, "rejected": 3}, "'prompt' is a number"),
        (
            {
                "prompt": [{"role": "user", "content": "x"}],
                "chosen": [{"role": "user", "content": "x"}],
                "rejected": [{"role": "assistant", "content": "y"}],
            },
            "no message of 'chosen' has the role 'assistant'",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}],
                "chosen": [{"role": "assistant", "content": "x"}],
                "rejected": [{"role": "assistant", "content": "y"}],
            },
            "the conversation has images, which this model does not accept",
        ),
        (
            GOOD | {"images": ["a.png"]},
            "'images' next to prompt/chosen/rejected of text; images are supported only in messages",
        ),
        (GOOD | {"chosen": "word " * 60}, "its two answers with their prompts, and seq_len is 96"),
        (
            {
                "prompt": [{"role": "user", "content": "x"}],
                "chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
                "rejected": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "z"}],
            },
            "'prompt' is repeated in 'chosen', and would be read twice",
        ),
    ],
)
def test_an_unusable_pair_is_refused_with_its_line(start, jsonl, tmp_path, record, says):
    file = jsonl(tmp_path / "pairs.jsonl", [GOOD, record])
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 2") as error:
        start(objective="orpo", seq_len=96, data=(file,))
    assert says in str(error.value)


def test_a_prompt_repeated_by_texts_is_reported(start, jsonl, tmp_path):
    twice = {"prompt": "a b", "chosen": "a b c", "rejected": "a b d"}
    run = start(
        objective="orpo",
        seq_len=96,
        data=(jsonl(tmp_path / "pairs.jsonl", [GOOD, twice, GOOD | {"prompt": ""}]),),
    )
    assert run.documents.counts["whose prompt is repeated in the answers"] == 1


def test_pairs_can_be_tokenized_in_advance_for_pairs_only(start, judged, checkpoint, tmp_path):
    corpus = tmp_path / "corpus"
    words = ["tokenize", str(checkpoint), "--data", judged["pairs"], "--objective", "dpo"]
    assert main([*words, "--output", str(corpus)]) in (0, None)
    found, expected = (start(objective="orpo", seq_len=96, data=(d,)) for d in (str(corpus), judged["pairs"]))
    assert found.documents.fingerprint() == expected.documents.fingerprint()
    with pytest.raises(
        DataError, match="was made of records with prompt/chosen/rejected, and this objective"
    ):
        start(objective="kto", seq_len=96, data=(str(corpus),))


def test_labelled_records_need_a_label_and_other_records(start, jsonl, tmp_path):
    record = {"prompt": "a", "completion": "b", "label": "yes"}
    with pytest.raises(DataError, match="line 1: 'label' is 'yes', expected true"):
        start(objective="kto", seq_len=96, data=(jsonl(tmp_path / "a.jsonl", [record]),))
    with pytest.raises(DataError, match="line 1: a single record"):
        start(objective="kto", seq_len=96, data=(jsonl(tmp_path / "b.jsonl", [record | {"label": True}]),))


def test_examples_that_are_too_long_are_cut_on_request(start, jsonl, tmp_path):
    file = jsonl(
        tmp_path / "pairs.jsonl", [GOOD, GOOD | {"chosen": "word " * 60}, GOOD | {"prompt": "x " * 99}]
    )
    run = start(objective="orpo", seq_len=96, data=(file,), truncate=True)
    counts = run.documents.counts
    assert counts["truncated"] == 2
    assert counts["without anything to train, left out"] == 1  # its prompt leaves no room
    assert counts["documents"] == 2
    assert run.documents.longest_piece(96) == 48


def test_conversations_are_distinguished_from_their_beginnings(tokenizer_folder, jsonl, tmp_path, cache):
    asked, answers = {"role": "user", "content": "a"}, [{"role": "assistant", "content": c} for c in "bc"]
    whole = {"chosen": [asked, answers[0]], "rejected": [asked, answers[1]]}
    apart = {"prompt": [asked], "chosen": [answers[0]], "rejected": [answers[1]]}
    tokenizer, found = TextTokenizer(tokenizer_folder), []
    for number, record in enumerate((whole, apart)):
        file = jsonl(tmp_path / f"{number}.jsonl", [record])
        limits = {"seq_len": 96, "vocab_size": 320, "form": "prompt/chosen/rejected"}
        (part,) = load_documents([file], tokenizer, **limits).parts
        found.append([*part.corpus.read(0, int(part.corpus.starts[-1])), part.corpus.groups])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    ids, trained, cut = found[0]
    text = tokenizer.backend.decode(
        ids[: cut[0, 0]][trained[: cut[0, 0]]].tolist(), skip_special_tokens=False
    )
    assert text.startswith("b</s>")


def test_the_mismatched_answer_of_kto_is_that_of_the_previous_record(start, judged):
    run = start(objective="kto", seq_len=96, data=(judged["labelled"],))
    corpus = run.documents.parts[0].corpus
    answers = []
    for number in range(len(corpus)):
        start_, stop = corpus.starts[number : number + 2].tolist()
        cut = start_ + int(corpus.groups[number, 0])
        pair = [corpus.read(start_, cut), corpus.read(cut, stop)]
        answers.append([ids[trained].tolist() for ids, trained in pair])
    for before, now in zip([answers[-1], *answers[:-1]], answers, strict=True):
        # A token may span the end of the prompt and the beginning of the answer.
        same = min(len(before[0]), len(now[1])) - 1
        assert same > 1
        assert before[0][-same:] == now[1][-same:]


def test_whole_conversations_may_repeat_their_prompt_as_text():
    question, chosen, rejected = ({"role": role, "content": text} for role, text in SAID)
    pair = {"chosen": [question, chosen], "rejected": [question, rejected]}
    schema, counts = Schema((PAIRS,)), Counter()
    for more in ({}, {"prompt": "Tea?"}):
        content = parse_fields("a", pair | more, counts, schema).content
        assert [part.messages for part in content] == [[question], [chosen], [rejected]]
    with pytest.raises(
        DataError, match=r"'prompt' is a string, 'chosen' is a list.*\[\{\"role\": \"assistant"
    ):
        parse_fields("a", pair | {"prompt": "Soup?"}, counts, schema)


SAID = (("user", "Tea?"), ("assistant", "Yes."), ("assistant", "No."))
