"""Rows in ShareGPT's form are read as messages."""

from collections import Counter

import pytest

from liger_models.convert.errors import DataError
from liger_models.training.data.reading.records import parse_fields, parse_row
from liger_models.training.data.reading.schema import LABELLED, PAIRS, Schema

COUNT_NAME = "records of ShareGPT's form (conversations), read as messages"


def turn(name, value):
    return {"from": name, "value": value}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def messages_of(turns, **others):
    counts = Counter()
    record = parse_fields("a.jsonl, line 3", {"conversations": turns, **others}, counts)
    assert record.form == "messages"
    return record, counts


def test_turns_become_messages():
    call = '{"name": "look", "arguments": {"at": "x"}}'
    turns = [
        turn("system", "s"),
        turn("human", "q"),
        turn("function_call", call),
        turn("observation", "seen"),
        turn("gpt", "a"),
        turn("user", "q2"),
        turn("function_call", f"[{call}]"),
        turn("tool", "seen"),
        turn("assistant", "a2"),
    ]
    tools = '[{"name": "look"}]'
    record, counts = messages_of(turns, tools=tools, id=7)
    called = message(
        "assistant",
        "",
        tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}],
    )
    assert record.content.messages == [
        message("system", "s"),
        message("user", "q"),
        called,
        message("tool", "seen"),
        message("assistant", "a"),
        message("user", "q2"),
        called,
        message("tool", "seen"),
        message("assistant", "a2"),
    ]
    assert record.options["tools"] == [{"name": "look"}]
    assert counts == {"fields 'id' left aside": 1, COUNT_NAME: 1}


def test_a_separate_system_prompt_comes_first():
    record, counts = messages_of([turn("human", "q"), turn("gpt", "a")], system="s")
    assert record.content.messages[0] == message("system", "s")
    assert counts == {COUNT_NAME: 1}
    assert len(messages_of([turn("human", "q"), turn("gpt", "a")], system="")[0].content.messages) == 2


def test_conversations_may_have_messages_and_messages_may_have_turns():
    plain = [message("user", "q"), message("assistant", "a")]
    assert messages_of(plain)[0].content.messages == plain
    record = parse_row("a.parquet, row 1", {"messages": [turn("human", "q"), turn("gpt", "a")]}, Counter())
    assert record.content.messages == plain


def test_images_keep_their_places_in_turns():
    record, _ = messages_of([turn("human", "<image>what?"), turn("gpt", "a")], images=["a.png"])
    assert record.content.images == ["a.png"]


@pytest.mark.parametrize("prompt", ["prompt", "conversations"])
def test_answers_to_compare_or_judge_may_be_turns(prompt):
    asked = [turn("human", "q")]
    pair = {prompt: asked, "chosen": turn("gpt", "good"), "rejected": [turn("gpt", "bad")]}
    found = parse_fields("a", pair, Counter(), Schema((PAIRS,))).content
    assert [part.messages for part in found] == [
        [message("user", "q")],
        [message("assistant", "good")],
        [message("assistant", "bad")],
    ]
    judged = {prompt: asked, "completion": [turn("gpt", "good")], "label": True}
    assert parse_fields("a", judged, Counter(), Schema((LABELLED,))).content[1].messages == [
        message("assistant", "good")
    ]


OF_TURNS = "expected an object with 'from' and 'value'"
OF_CALLS = "expected an object with 'name' and 'arguments'"


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (turn("bot", "a"), "turn 1 of 'conversations' is from 'bot'; expected one of system, human"),
        (turn(None, "a"), "turn 1 of 'conversations' is from None"),
        (message("assistant", "a"), f"turn 1 of 'conversations' is .*{OF_TURNS}"),
        ({"from": "gpt"}, f"turn 1 .*{OF_TURNS}"),
        ({**turn("gpt", "a"), "role": "user"}, f"turn 1 .*{OF_TURNS}"),
        ("a", f"turn 1 .*{OF_TURNS}"),
        (turn("function_call", "look(x)"), "turn 1 .* is a function_call that is not JSON"),
        (turn("function_call", '{"x": 1}'), OF_CALLS),
        (turn("function_call", "[]"), OF_CALLS),
        (turn("human", "q"), "no message has the role 'assistant'"),
        (turn("gpt", 3), r"content of message 1 \(assistant\) is 3"),
    ],
)
def test_the_error_for_an_unusable_turn_names_file_line_and_turn(second, error):
    with pytest.raises(DataError, match=f"a.jsonl, line 3: .*{error}"):
        messages_of([turn("human", "q"), second])


def test_conversations_that_are_not_a_list_are_refused():
    with pytest.raises(DataError, match="'conversations' is 'hello'; expected a list of turns"):
        messages_of("hello")


def test_two_system_prompts_and_two_forms_are_refused():
    with pytest.raises(DataError, match="'system' field and a system turn"):
        messages_of([turn("system", "s"), turn("human", "q"), turn("gpt", "a")], system="t")
    with pytest.raises(DataError, match="found 'conversations', 'text'; expected exactly one of"):
        messages_of([turn("human", "q"), turn("gpt", "a")], text="t")
