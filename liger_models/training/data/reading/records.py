"""Record formats of training examples, and their validation.

    {"text": ...}    {"prompt": ..., "completion": ...}    {"messages": [{"role": ..., "content": ...}, ...]}

Next to messages, `tools` and `chat_template_kwargs` are passed to the chat template. Messages may be in
ShareGPT's format (sharegpt.py), and records may be Alpaca's (alpaca.py).

Images are message parts {"type": "image", "image": ...}, or placeholders {"type": "image"} or "<image>" for
the entries of an "images" field next to "messages". liger_models/images/files.py defines how images are
named. A video is a part {"type": "video", "video": [frames], "fps": ...} with its frames and their rate.

For preferences and judged answers:

    {"prompt": ..., "chosen": ..., "rejected": ...}    {"prompt": ..., "completion": ..., "label": true}

Prompt and answers are both text or both messages. A pair of whole conversations needs no prompt: their common
beginning is the prompt. An "images" field belongs to the prompt.

JSON lines and table rows follow the same rules and raise the same errors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from liger_models.convert.errors import DataError, abbreviate
from liger_models.images.files import Video
from liger_models.training.data.reading.pairs import with_common_prompt
from liger_models.training.data.reading.schema import (
    IMAGES,
    LABELLED,
    OPTIONS,
    PAIRS,
    PROMPT,
    TOOLS,
    VIDEOS,
    Schema,
    kind_of,
)
from liger_models.training.data.reading.sharegpt import messages_from
from liger_models.training.text.answers import ASSISTANT
from liger_models.training.text.chat_template import NOTHING, OWN_NAMES

LONG = "long text"  # its content is an iterator of overlapping blocks
PLACE = "<image>"  # placeholder in text for an image of that field
TRAIN_ON = ("all", "last", "each")  # answers of a conversation


class Conversation(NamedTuple):
    """Messages with placeholders {"type": "image"} and {"type": "video"}, the image sources and `Video`s in
    order, and the number of leading messages whose assistant turns are not trained on.
    """

    messages: list[dict[str, Any]]
    images: list[Any]
    given: int = 0

    def examples(self, train_on: str) -> list[Conversation]:
        """Return this conversation with "all" answers or only the "last" one trained, or one conversation
        for "each" answer, ending with it.
        """
        answers = [n for n, message in enumerate(self.messages) if message["role"] == ASSISTANT]
        if train_on == "all":
            return [self]
        if train_on == "last":
            return [self._replace(given=answers[-1])]
        return [
            Conversation(self.messages[: n + 1], self.images[: _shown(self.messages[: n + 1])], n)
            for n in answers
        ]

    def followed_by(self, answer: Conversation) -> Conversation:
        """Append an answer; nothing before it is trained on."""
        given = len(self.messages)
        return Conversation(self.messages + answer.messages, self.images + answer.images, given)


class Record(NamedTuple):
    """One example and its location. `content` is a str, a (prompt, completion) pair of str, or a
    `Conversation`; for preferences (prompt, chosen, rejected) and for labelled answers (prompt, completion,
    label), with a str or a `Conversation` for each text. Relative paths start at `folder`; with None, files
    are not allowed. `options` are further inputs of the chat template. If a conversation makes several
    examples, `examples_left` follow this one.
    """

    where: str
    form: str
    content: Any
    folder: Path | None = Path()
    options: Mapping[str, Any] = NOTHING
    examples_left: int = 0

    @property
    def images(self) -> int:
        """Number of images, including video frames."""
        parts = self.content if self.form in (PAIRS, LABELLED) else (self.content,)
        shown = [one for part in parts if isinstance(part, Conversation) for one in part.images]
        return sum(len(one.frames) if isinstance(one, Video) else 1 for one in shown)


def _shown(messages: list[dict[str, Any]]) -> int:
    """Count the placeholders of images and videos in messages."""
    parts = (part for m in messages if isinstance(m.get("content"), list) for part in m["content"])
    return sum(isinstance(part, dict) and part.get("type") in ("image", "video") for part in parts)


ANY = Schema()


def parse_line(where: str, line: bytes, counts: Counter[str], schema: Schema = ANY) -> Record:
    """Parse a JSON line in one of these forms. Raises DataError, starting with `where`."""
    line = line.rstrip()  # an error at the end of the line is on it
    try:
        fields = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        several = line.strip() == b"{" or line.lstrip()[:1] == b"["
        hint = (
            "; JSON lines hold one object a line, and other JSON belongs in a .json file" if several else ""
        )
        raise DataError(f"{where}: not valid JSON at column {error.pos + 1}: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:  # also numbers or nesting beyond Python's limits
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(fields, dict):
        hint = "; an array of objects belongs in a .json file" if isinstance(fields, list) else ""
        raise DataError(f"{where}: found {kind_of(fields)}, expected a JSON object{hint}")
    return parse_fields(where, fields, counts, schema)


def parse_row(where: str, row: dict[str, Any], counts: Counter[str], schema: Schema = ANY) -> Record:
    """Parse a table row, where missing fields are null. Raises DataError as `parse_line`."""
    fields = {key: value for key, value in row.items() if value is not None}
    fields = {key: value if key == IMAGES else _without_nulls(value) for key, value in fields.items()}
    return parse_fields(where, fields, counts, schema)


def _without_nulls(value: Any) -> Any:
    """Remove the null fields that tables add to messages and nested values to make their schemas equal."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return kept | {"content": None} if "role" in value and value.get("content", ...) is None else kept


def parse_fields(where: str, fields: dict[str, Any], counts: Counter[str], schema: Schema = ANY) -> Record:
    """Build a record from known fields; unknown ones are ignored and counted. Raises DataError."""
    found = ", ".join(map(repr, fields)) or "no fields"
    fields = schema.standard(where, fields, counts)
    fitting = [form for form in schema.forms if any(key in fields for key in form.split("/"))]
    if len(fitting) != 1:
        raise DataError(f"{where}: found {found}; expected {schema.expected(fields)}")
    form = fitting[0]
    keys = form.split("/")
    fields = {**fields, **{key: messages_from(where, fields[key], key) for key in keys if key in fields}}
    if form == PROMPT:
        return _prompt_alone(where, fields)
    _check_shown(where, form, fields)
    is_conversation = any(isinstance(fields.get(key), list) for key in keys)
    options = _options(where, fields) if is_conversation else NOTHING
    for key in fields.keys() - {*keys, IMAGES, VIDEOS, *((TOOLS, OPTIONS) if is_conversation else ())}:
        counts[f"fields {key!r} left aside"] += 1
    if form == PAIRS and isinstance(fields.get("prompt", ""), str):
        fields = with_common_prompt(fields)
    if missing := [key for key in keys if key not in fields]:
        advice = schema.advice(fields)
        raise DataError(f"{where}: {missing[0]!r} is missing; found {found}; expected {form}{advice}")
    if form == "messages":
        messages = _check_messages(where, fields["messages"])
        return Record(where, form, _take_images(where, messages, fields.get(IMAGES)), options=options)
    if form in (PAIRS, LABELLED):
        return Record(where, form, _judged(where, keys, fields, counts), options=options)
    for key in keys:
        if not isinstance(fields[key], str):
            raise DataError(f"{where}: {key!r} is {kind_of(fields[key])}, expected a string")
        check_text(where, fields[key])
    return Record(where, form, fields["text"] if form == "text" else (fields["prompt"], fields["completion"]))


def _prompt_alone(where: str, fields: dict[str, Any]) -> Record:
    """Build the record of a prompt without an answer; all other fields are its options."""
    others = {name: value for name, value in fields.items() if name != PROMPT}
    prompt = fields[PROMPT]
    if isinstance(prompt, list):
        return Record(
            where, PROMPT, Conversation(_check_messages(where, prompt, PROMPT, False), []), options=others
        )
    if not isinstance(prompt, str):
        raise DataError(
            f"{where}: {PROMPT!r} is {abbreviate(prompt)}; expected a string or a list of messages"
        )
    check_text(where, prompt)
    return Record(where, PROMPT, prompt, options=others)


def _options(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the chat template's inputs other than messages. Raises DataError."""
    options, tools = fields.get(OPTIONS) or {}, fields.get(TOOLS)
    if not isinstance(options, dict) or any(key in options for key in (*OWN_NAMES, TOOLS)):
        raise DataError(
            f"{where}: {OPTIONS!r} is {abbreviate(options)}; expected an object without "
            f"{', '.join((*OWN_NAMES, TOOLS))}"
        )
    if isinstance(tools, str):  # tables store values with varying schemas as JSON
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {TOOLS!r} is text but not JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: {TOOLS!r} is {abbreviate(tools)}; expected a list of objects")
    return {**options, TOOLS: tools} if tools else options


def _check_shown(where: str, form: str, fields: dict[str, Any]) -> None:
    """Raise DataError for images or videos that this form cannot have."""
    if fields.get(VIDEOS):
        raise DataError(f"{where}: there are {VIDEOS!r}, {_INSTEAD_OF_VIDEOS}")
    judged = form in (PAIRS, LABELLED) and isinstance(fields.get("prompt", []), list)
    if fields.get(IMAGES) and form != "messages" and not judged:
        raise DataError(
            f"{where}: there are {IMAGES!r} next to {form} of text; images are supported only in messages"
        )


_INSTEAD_OF_SOUNDS = (
    "and only images and videos are read from data; call a model that takes sounds with its processor's "
    "outputs, in a loop of your own (docs/audio.md)"
)
_INSTEAD_OF_VIDEOS = (
    'and a video is its frames here: give a part {"type": "video", "video": [frames], "fps": ...} where it '
    "stands, or some of its frames as images"
)


def _judged(where: str, keys: list[str], fields: dict[str, Any], counts: Counter[str]) -> tuple[Any, ...]:
    """Return the values of these keys: a prompt, non-empty answers, or a label."""
    if "label" in keys and not isinstance(fields["label"], bool):
        raise DataError(f"{where}: 'label' is {abbreviate(fields['label'])}, expected true (good) or false")
    texts = [key for key in keys if key != "label"]
    kinds = {key: kind_of(fields[key]) for key in texts}
    if len(set(kinds.values())) > 1 or not isinstance(fields["prompt"], str | list):
        found = ", ".join(f"{key!r} is {kind}" for key, kind in kinds.items())
        raise DataError(
            f"{where}: {found}; expected a string each, or a list of messages each, such as "
            '[{"role": "assistant", "content": ...}] for an answer'
        )
    found_in = dict(fields)
    for key in texts:
        value, is_answer = fields[key], key != "prompt"
        if isinstance(value, str):
            check_text(where, value)
        else:
            messages = _check_messages(where, value, key, answered=is_answer) if value or is_answer else []
            found_in[key] = _take_images(where, messages, None if is_answer else fields.get(IMAGES))
        said = value if isinstance(value, str) else [m.get("content") or m.get("tool_calls") for m in value]
        if is_answer and not (said and said[-1]):
            raise DataError(f"{where}: {key!r} is empty: there is no answer to learn from")
    prompt, answers = fields["prompt"], [fields[key] for key in texts if key != "prompt"]
    if prompt and all(answer[: len(prompt)] == prompt for answer in answers):
        if not isinstance(prompt, str):  # a text prompt may repeat at the answer's start
            raise DataError(
                f"{where}: 'prompt' is repeated in {texts[1]!r}, and would be read twice; leave it out "
                "of the answers"
            )
        counts["whose prompt is repeated in the answers"] += 1
    return tuple(found_in[key] for key in keys)


def check_text(where: str, text: str) -> None:
    """Raise DataError for a str that no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is half of a surrogate pair, which no text holds"
        ) from error


def _check_messages(
    where: str, messages: Any, name: str = "messages", answered: bool = True
) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise DataError(f"{where}: {name!r} must be a list of objects with 'role' and 'content'")
    if any("content" not in m and "tool_calls" not in m for m in messages):
        raise DataError(f"{where}: a message has neither 'content' nor 'tool_calls'")
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if not isinstance(role, str):
            raise DataError(f"{where}: the role of message {number} is {abbreviate(role)}, expected a name")
        # Templates would write the word "None", and the model would be trained on it.
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f"{where}: the content of message {number} ({role}) is {abbreviate(content)}; expected text, "
                "or tool_calls next to it"
            )
    if answered and not any(m["role"] == "assistant" for m in messages):
        which = "" if name == "messages" else f" of {name!r}"
        raise DataError(
            f"{where}: no message{which} has the role 'assistant', so there is nothing to train on"
        )
    return messages


def _take_images(where: str, messages: list[dict[str, Any]], listed: Any) -> Conversation:
    """Return the messages; those with images have {"type": "text"} parts between them."""
    if listed is not None and not isinstance(listed, list):
        raise DataError(f"{where}: {IMAGES!r} is {abbreviate(listed)}; expected a list")
    column = listed or []
    kinds = {
        str(part.get("type"))
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    }
    if other := sorted(kinds & {"audio", "video_url", "input_audio"}):
        raise DataError(
            f"{where}: a message has a part of type {other[0]!r}, "
            + (_INSTEAD_OF_VIDEOS if "video" in other[0] else _INSTEAD_OF_SOUNDS)
        )
    if not column and not kinds & {"image", "image_url", "video"}:
        return Conversation(messages, [])
    messages, images = [dict(message) for message in messages], []
    waiting = iter(column)
    for number, message in enumerate(messages):
        content, parts = message.get("content"), []
        if isinstance(content, str) and column and PLACE in content:
            first, *others = content.split(PLACE)
            content = [{"type": "text", "text": first}]
            for text in others:
                content += [{"type": "image"}, {"type": "text", "text": text}]
            content = [part for part in content if part.get("text") != ""]
        if not isinstance(content, list):
            continue
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in ("text", "image", "image_url", "video"):
                raise DataError(
                    f"{where}: message {number} has the part {abbreviate(part)}; expected an object of type "
                    "'text', 'image' or 'video'"
                )
            if part["type"] == "text":
                if not isinstance(part.get("text"), str):
                    raise DataError(f"{where}: message {number} has a part of text without 'text'")
                parts.append({"type": "text", "text": part["text"]})
                continue
            if message["role"] == "assistant":
                raise DataError(
                    f"{where}: message {number} of the assistant has an image, which a model that writes "
                    "text cannot learn to produce; put it in the prompt"
                )
            is_video = part["type"] == "video"
            images.append(
                _video_of(where, number, part) if is_video else _image_of(where, number, part, waiting)
            )
            parts.append({"type": "video" if is_video else "image"})
        message["content"] = parts
    if left := len(list(waiting)):
        raise DataError(
            f"{where}: {IMAGES!r} has {len(column)} images, and {left} of them have no place in the "
            f'messages: each needs {PLACE!r} in a text, or a part {{"type": "image"}}'
        )
    return Conversation(messages, images)


def _video_of(where: str, number: int, part: dict[str, Any]) -> Video:
    frames, fps = part.get("video"), part.get("fps", part.get("sample_fps"))
    if not isinstance(frames, list) or not frames:
        raise DataError(f"{where}: message {number} has the video {abbreviate(frames)}, {_INSTEAD_OF_VIDEOS}")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise DataError(
            f"{where}: message {number} has a video whose 'fps' is {abbreviate(fps)}; expected how many of "
            "its frames there are a second, by which models tell when something happens"
        )
    return Video(frames, float(fps))


def _image_of(where: str, number: int, part: dict[str, Any], waiting: Any) -> Any:
    for key in ("image", "path", "url", "base64", "image_url"):
        if part.get(key) is not None:
            found = part[key]
            return (
                found["url"] if key == "image_url" and isinstance(found, dict) and "url" in found else found
            )
    found = next(waiting, None)
    if found is None:
        raise DataError(
            f"{where}: message {number} has an image that is nowhere: name it in the part ('image': a path "
            f"or bytes), or give as many {IMAGES!r} next to 'messages' as have a place in them"
        )
    return found
