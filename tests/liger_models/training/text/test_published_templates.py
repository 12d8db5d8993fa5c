"""Answers are found in the renderings of every published chat template in TRL's wheel.

Every conversation that transformers renders can be trained on, and the learned text is exactly the text that
the model has to write itself.
"""

import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest
from conversations import CONVERSATIONS, OnePinnedDay, assistant, call, parts, user
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from liger_models.convert.errors import DataError
from liger_models.images.spans import tokens_within
from liger_models.training.text.chat_template import ChatTemplate

chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
FOLDER = Path(getattr(importlib.util.find_spec("trl"), "origin", None) or "none").parent / "chat_templates"
PUBLISHED = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
if not PUBLISHED:
    pytest.skip("TRL, which has the published templates, is not installed", allow_module_level=True)
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.fixture(autouse=True)
def that_day(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", OnePinnedDay)


@functools.cache
def source_of(name):
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def theirs(name, messages, options, **more):
    [text], spans = chat_template_utils.render_jinja_template(
        [messages], chat_template=source_of(name), **TOKENS, **options, **more
    )
    return (text, spans[0]) if spans else text


def in_form(messages, form):
    return [
        {**m, "content": form(m["content"]) if isinstance(m["content"], str | list) else None}
        for m in messages
    ]


def as_text(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def as_parts(content):
    return parts(content) if isinstance(content, str) else content


def with_calls(messages, content, change):
    """Return the messages with other content next to calls, and with other arguments."""
    found = []
    for message in messages:
        if message.get("tool_calls"):
            arguments = change(message["tool_calls"][0]["function"]["arguments"])
            message = {**message, "content": message["content"] or content, "tool_calls": call(arguments)}
        found.append(message)
    return found


def text_of(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def readable(name, messages, options):
    """Return the conversation in the form that transformers renders most completely, and its rendering."""
    expected = [as_text(m["content"]).strip() for m in messages if m["role"] == "user"]
    expected += ["kiwi" for message in messages if message.get("tool_calls")]
    found = []
    for change in (lambda arguments: arguments, text_of):
        for content in ("", None):
            for form in (lambda content: content, as_text, as_parts):
                chosen = in_form(with_calls(messages, content, change), form)
                try:
                    text = theirs(name, chosen, options)
                except Exception:  # the template refuses it
                    continue
                if "{'type'" not in text:
                    found.append((sum(one in text for one in expected), chosen, text))
    return max(found, key=lambda one: one[0])[1:] if found else (None, None)


@functools.cache
def template_of(name):
    return ChatTemplate(source_of(name), TOKENS, name)


@pytest.fixture(scope="module", params=PUBLISHED)
def renderings(request):
    """Renderings of a template, by conversation that transformers can render.

    Each is (name, messages in the form that the template reads, options, transformers' text, our rendering).
    """
    name, found = request.param, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", OnePinnedDay)
        for conversation, (messages, options) in CONVERSATIONS.items():
            chosen, text = readable(name, messages, options)
            if chosen is None:
                with pytest.raises(DataError, match="rejects the conversation"):
                    template_of(name).render(messages, 0, options)
            else:
                ours = template_of(name).render(messages, 0, options)
                found[conversation] = name, chosen, options, text, ours
        yield found


def test_renderings_match_transformers_and_can_be_trained_on(renderings):
    assert len(renderings) >= len(CONVERSATIONS) / 2
    for conversation, (_, _, _, text, ours) in renderings.items():
        assert ours.text == text, conversation
        assert ours.spans or "tool calls" in ours.dropped, conversation


def all_left_out(message, ours):
    """Return whether the template drops all content of an answer; its end alone is not learned."""
    return (
        "tool calls" in ours.dropped and message.get("tool_calls") and not as_text(message["content"] or "")
    )


HEADER_AFTER_A_RESULT = {"diffusion_gemma"}  # renders a header there, but none in a prompt


def test_answers_match_prefixes_of_the_conversation(renderings):
    """An answer is the text from the end of the prompt to the end of the turn in transformers' rendering."""
    for conversation, (name, messages, options, text, ours) in renderings.items():
        learned = {place for start, stop in ours.spans for place in range(start, stop)}
        expected = set()
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number in answers:
            try:
                before = theirs(name, messages[:number], options, add_generation_prompt=True)
                through = theirs(name, messages[: number + 1], options)
            except Exception:  # the template refuses an incomplete conversation
                break
            if not (text.startswith(through) and through.startswith(before)):
                break
            turn = set(range(len(before), len(through)))
            if name in HEADER_AFTER_A_RESULT and messages[number - 1]["role"] == "tool":
                turn -= set(range(len(before), len(before) + len("<|turn>model\n")))
            if all_left_out(messages[number], ours):
                turn = set()
            expected |= turn
            assert turn <= learned, (conversation, number)
        else:
            assert learned == expected, conversation


LEARNED_BEYOND_MARKS = {
    "diffusion_gemma": "<|tool_response>",  # ends a call if nothing follows: the model writes it
    "llava_next": " ",  # after the end of a turn: part of it, like a line break elsewhere
}


def runs(text, places):
    """Return the runs of text at these positions."""
    found = []
    for place in sorted(places):
        if place - 1 not in places:
            found.append("")
        found[-1] += text[place]
    return found


def test_labels_match_trls_marks_apart_from_the_generation_prompt(renderings):
    """TRL also marks headers of some families, and reasoning tags that are part of the generation prompt."""
    name = next(iter(renderings.values()))[0]
    path = FOLDER / f"{name}_training.jinja"
    if not path.exists():
        assert name.startswith(("gemma4", "lfm2_2_5", "llama3_1", "llama3_2"))  # TRL has no version of these
        return
    compared = 0
    for conversation, (name, messages, options, text, ours) in renderings.items():
        try:
            [marked_text], [spans] = chat_template_utils.render_jinja_template(
                [messages],
                chat_template=path.read_text(encoding="utf-8"),
                return_assistant_tokens_mask=True,
                **TOKENS,
                **options,
            )
        except Exception:  # TRL's version refuses some input of the original
            continue
        if marked_text != text:  # TRL's version writes reasoning that the original drops
            continue
        compared += 1
        marked = {place for start, stop in spans for place in range(start, stop)}
        learned = {place for start, stop in ours.spans for place in range(start, stop)}
        assert {*runs(text, learned - marked)} <= {LEARNED_BEYOND_MARKS.get(name)}, conversation
        given = ""
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                question = messages[:number] or [user("x")]
                given += theirs(name, question, options, add_generation_prompt=True)[-40:]
                if all_left_out(message, ours):
                    given += text
        for missing in runs(text, marked - learned):
            is_next = name == "glm4moe" and missing == "<|user|>"  # GLM ends turns with the next header
            assert missing in given or is_next, (conversation, missing)
    assert compared >= (1 if name == "glm4moe" else 5)  # TRL's version ends answers with the next header


LEARNED_WORDS = ("banana", "damson", "quince", "grape", "hazel", "kiwi", "lime", "cherry", "pear")
OTHER_WORDS = ("apple?", "cherry?", "damson?", "elder", "figs", "mango", "melon")


def test_all_assistant_text_and_nothing_else_is_learned(renderings):
    for conversation, (_, messages, _, text, ours) in renderings.items():
        if conversation in ("the same text", "tools and text"):
            continue
        learned = "".join(text[start:stop] for start, stop in ours.spans)
        assert not [word for word in OTHER_WORDS if word in learned], conversation
        own = str([message for message in messages if message["role"] == "assistant"])
        others = str([message for message in messages if message["role"] != "assistant"])
        for word in LEARNED_WORDS:
            if word in own and word not in others:
                assert learned.count(word) == text.count(word), (conversation, word)


@pytest.mark.parametrize("name", PUBLISHED)
def test_questions_are_rendered_as_by_transformers_for_any_content_form(name):
    ours = template_of(name).question([user("apple?")], {})
    assert "apple?" in ours
    expected = theirs(name, [user("apple?")], {}, add_generation_prompt=True)
    if "apple?" not in expected:
        expected = theirs(name, [user(parts("apple?"))], {}, add_generation_prompt=True)
    assert ours == expected


def test_reasoning_dropped_by_a_template_is_reported():
    messages, options = CONVERSATIONS["reasoning"]
    assert template_of("qwen3").render(messages, 0, options).dropped == ["reasoning"]
    assert template_of("qwen3_8").render(messages, 0, options).dropped == []
    in_text, _ = CONVERSATIONS["reasoning in the text"]
    assert template_of("qwen3").render(in_text, 0, {}).dropped == ["reasoning"]
    messages, options = CONVERSATIONS["tools"]
    assert template_of("llama3").render(messages, 0, options).dropped == ["tool calls"]


def test_the_empty_reasoning_of_qwen3_is_learned_if_the_model_has_to_write_it():
    messages = [user("apple?"), assistant("banana"), user("cherry?"), assistant("damson")]
    for options, last in [({}, "<think>\n\n</think>\n\ndamson"), ({"enable_thinking": False}, "damson")]:
        ours = template_of("qwen3").render(messages, 0, options)
        assert "<think>\n\n</think>\n\ndamson" in ours.text
        learned = [ours.text[start:stop] for start, stop in ours.spans]
        assert learned == ["banana<|im_end|>\n", f"{last}<|im_end|>\n"]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level tokenizer with the special tokens of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    named = {
        one
        for name in PUBLISHED
        for one in re.findall(r"<[|\uff5c]?[\w\u2581/]+[|\uff5c]?>", source_of(name))
    }
    made.add_special_tokens(sorted({*named, *TOKENS.values()}))
    return made


def test_learned_tokens_match_learned_characters(renderings, tokenizer):
    for conversation, (_, _, _, text, ours) in renderings.items():
        encoding = tokenizer.encode(text, add_special_tokens=False)
        marks = tokens_within(encoding.offsets, ours.spans)
        learned = [index for index, mark in zip(encoding.ids, marks, strict=True) if mark]
        expected = "".join(text[start:stop] for start, stop in ours.spans)
        assert tokenizer.decode(learned, skip_special_tokens=False) == expected, conversation


OF_IMAGES = (
    *("gemma3", "gemma4_v5", "idefics3", "lfm2_2_5_vl", "llava_next", "muse_glimmer", "qwen2_5_vl"),
    *("qwen3_5_think", "qwen3_vl", "smolvlm"),
)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_conversations_with_images_are_rendered_as_by_transformers_and_their_answers_found(name):
    """Plain text next to an image is passed as a part if the template reads only parts."""
    shown = user([{"type": "image"}, {"type": "text", "text": "apple?"}])
    messages = [shown, assistant("banana"), user("cherry?"), assistant("damson")]
    ours = template_of(name).render(messages, 0, {})
    assert ours.text in [theirs(name, in_form(messages, as_parts), {})] + (
        [] if name in ("idefics3", "smolvlm", "llava_next") else [theirs(name, messages, {})]
    )
    learned = "".join(ours.text[start:stop] for start, stop in ours.spans)
    assert all(ours.text.count(word) == 1 for word in ("apple?", "banana", "cherry?", "damson"))
    assert [word in learned for word in ("apple?", "banana", "cherry?", "damson")] == [
        False,
        True,
        False,
        True,
    ]
