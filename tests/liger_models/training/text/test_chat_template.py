"""Conversations are rendered as by transformers, and only the assistant's text is trained on."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers

from liger_models.convert.errors import DataError
from liger_models.training.data import load_documents
from liger_models.training.data.encoding import SHARED_TOKEN
from liger_models.training.text.chat_template import ChatTemplate
from liger_models.training.text.tokenizer import TextTokenizer

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a b?"},
    {"role": "assistant", "content": " cd\n"},
    {"role": "user", "content": "e?"},
    {"role": "assistant", "content": "fg"},
]

# Drops reasoning of earlier turns, as many templates do: rendered prefixes of the conversation are not
# prefixes of its text.
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{%- if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
)


def template_folder(tokenizer_folder, tmp_path, template):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    return TextTokenizer(tmp_path)


def marked(template, messages, **options):
    text, spans, _ = ChatTemplate(template, {"bos_token": "<s>"}, "here").render(messages, 0, options)
    return [text[begin:end] for begin, end in spans]


def test_generation_tags_of_a_template_are_used():
    assert marked(MARKED, CHAT) == [" cd\n</s>", "()fg</s>"]
    assert marked(MARKED.replace("{% generation %}", "{%- generation -%}"), CHAT) == [" cd\n</s>", "()fg</s>"]


def test_a_question_needs_no_origins(monkeypatch):
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}>", {}, "here")

    def lost(*_, **__):
        raise DataError("origins cannot be traced")

    monkeypatch.setattr(template, "_trace", lost)
    assert template.question(CHAT[1:2], {}) == "[a b?]>"
    with pytest.raises(DataError):
        template.render(CHAT, 0, {})


def test_the_marks_match_transformers():
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    texts, spans = rendering.render_jinja_template(
        [CHAT], chat_template=MARKED, bos_token="<s>", return_assistant_tokens_mask=True
    )
    assert [texts[0][begin:end] for begin, end in spans[0]] == marked(MARKED, CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for %}", "not valid"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_a_template_that_fails_or_is_unsafe_is_an_error(tokenizer_folder, tmp_path, template, message):
    with pytest.raises(DataError, match=message):
        template_folder(tokenizer_folder, tmp_path, template).render(CHAT)


def test_a_template_may_break_out_of_a_loop(tokenizer_folder, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% if loop.first %}{% break %}{% endif %}{% endfor %}"
    assert template_folder(tokenizer_folder, tmp_path, template).render(CHAT[1:2])[0] == "a b?"


def test_a_template_that_writes_the_date_gives_the_same_text_every_day(tokenizer_folder, tmp_path):
    tokenizer = template_folder(
        tokenizer_folder, tmp_path, "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    )
    assert tokenizer.render(CHAT[1:2])[0] == "26 Jul 2024a b?"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_is_rendered_under_any_name(name, read):
    template = f"{{% for m in messages %}}[{{{{ m.{read} }}}}]{{{{ m.content }}}}{{% endfor %}}"
    messages = [{"role": "assistant", "content": "b", name: "hm"}]
    assert marked(template, messages) == ["[hm]b"]


def test_a_template_gets_the_variables_of_transformers(tokenizer_folder, tmp_path):
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    template = (
        "{{ [tools is defined, tools is none, documents is none, bos_token, pad_token, image_token] }}"
        "{{ messages[0].content }}"
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<|image|>"}
    [[expected], _] = rendering.render_jinja_template([CHAT[:1]], chat_template=template, **named)
    tokenizer = template_folder(tokenizer_folder, tmp_path, template)
    config = {"bos_token": "<x>", "extra_special_tokens": {"image_token": "<|image|>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"content": "<pad>"}})
    )
    before, tokenizer = tokenizer.digest(), TextTokenizer(tmp_path)
    assert tokenizer.render(CHAT[:1])[0] == expected
    assert tokenizer.eos_id == tokenizer.backend.token_to_id("</s>")
    assert tokenizer.digest() != before


TEXT_ALONE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
PASSES_OVER_LISTS = (
    "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% endif %}>{% endfor %}"
)
READS_LISTS = (
    "{% for m in messages %}<{% for p in m.content %}{{ p.text }}|{% endfor %}>{% endfor %}"  # as some do
)


@pytest.mark.parametrize(
    ("template", "written"),
    [(TEXT_ALONE, "<a b><cd>"), (PASSES_OVER_LISTS, "<a b><cd>"), (READS_LISTS, "<a |b|><cd|>")],
)
def test_text_parts_are_rendered_as_text(template, written):
    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    messages = [
        {"role": "user", "content": parts("a ", "b")},
        {"role": "assistant", "content": parts("cd")},
    ]
    assert ChatTemplate(template, {}, "here").render(messages, 0, {})[0] == written


# -- fields next to messages

TOOLS = [{"type": "function", "function": {"name": "look"}}]
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}"
    "{% for m in messages %}<|{{ m.role }}|>{% generation %}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}"
    "{% endgeneration %}</s>{% endfor %}"
)


@pytest.fixture
def written(tokenizer_folder, tmp_path):
    """Function that returns the text of records, the part of it that is trained on, and the counts."""
    tokenizer = template_folder(tokenizer_folder, tmp_path, WITH_TOOLS)

    def load(path, **options):
        documents = load_documents([str(path)], tokenizer, seq_len=200, vocab_size=320, **options)
        corpus = documents.parts[0].corpus
        ids, trained = corpus.read(0, int(corpus.starts[-1]))

        def text(some):
            return tokenizer.backend.decode(some.tolist(), skip_special_tokens=False)

        return text(ids), text(ids[trained]), corpus.counts

    return load


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_tools_and_other_variables_reach_the_template(written, jsonl, tmp_path, tools):
    record = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": tools,
        "chat_template_kwargs": {"mood": "good"},
    }
    jsonl(tmp_path / "data.jsonl", [record])
    text, _, counts = written(tmp_path / "data.jsonl")
    assert text.startswith(json.dumps(TOOLS) + "good<|user|>a</s>")
    assert not [name for name in counts if "left aside" in name]


@pytest.mark.parametrize("form", ["list", "folder"])
def test_the_tool_template_is_used_if_there_are_tools(tokenizer_folder, tmp_path, form):
    tokenizer = template_folder(tokenizer_folder, tmp_path, "one {{ messages[0].content }}")
    other = "two {{ messages[0].content }}"
    before = tokenizer.digest()
    if form == "folder":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(other)
    else:
        (tmp_path / "chat_template.jinja").unlink()
        named = {"default": "one {{ messages[0].content }}", "tool_use": other}
        templates = [{"name": name, "template": template} for name, template in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.render(CHAT[:1])[0] == "one be brief"
    assert tokenizer.render(CHAT[:1], options={"tools": TOOLS})[0] == "two be brief"
    assert tokenizer.digest() != before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": "["}, "'tools' is text but not JSON"),
        ({"tools": ["look"]}, "expected a list of objects"),
        ({"chat_template_kwargs": ["x"]}, "expected an object without messages"),
        ({"chat_template_kwargs": {"messages": []}}, "expected an object without messages"),
    ],
)
def test_fields_that_conflict_with_messages_are_refused(written, jsonl, tmp_path, fields, message):
    messages = [{"role": "assistant", "content": "b"}]
    jsonl(tmp_path / "data.jsonl", [{"messages": messages, **fields}])
    with pytest.raises(DataError, match=message):
        written(tmp_path / "data.jsonl")


def test_nulls_that_a_table_adds_within_messages_are_removed(written, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [{"name": "look", "arguments": {"at": "x"}}, {"name": "go", "arguments": {"to": "y"}}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "tool_calls": [call]},
            ]
        }
        for call in calls
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    text, _, _ = written(tmp_path / "data.parquet")
    assert "null" not in text
    assert all(json.dumps(call) in text for call in calls)


def test_only_the_answers_of_a_pair_are_trained_even_if_the_prompt_is_marked_too(written, jsonl, tmp_path):
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    record = {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": "good"}],
        "rejected": [{"role": "assistant", "content": "bad"}],
    }
    jsonl(tmp_path / "data.jsonl", [record])
    _, trained, _ = written(tmp_path / "data.jsonl", form="prompt/chosen/rejected")
    assert trained == "goodbad"


def test_an_end_of_turn_that_includes_the_next_line_break_is_trained(tokenizer_folder, tmp_path):
    """Phi-3's end token includes the line break: it begins inside the marked span and ends after it.

    transformers trains on it too, but finds no token of an answer that begins with a space, so these are
    stripped.
    """
    tokenizer = template_folder(tokenizer_folder, tmp_path, MARKED)
    tokenizer.backend.add_special_tokens([AddedToken("</s>", rstrip=True)])
    chat = [{**message, "content": message["content"].strip()} for message in CHAT]
    text, spans, _ = tokenizer.render(chat)
    [(ids, trained)] = tokenizer.encode_spans([text], [spans], add_special_tokens=False)
    learned = [index for index, mark in zip(ids, trained, strict=True) if mark]
    assert tokenizer.backend.decode(learned, skip_special_tokens=False) == "cd</s>()fg</s>"
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, bos_token="<s>")
    made = theirs.apply_chat_template(
        chat, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
    )
    assert (made["input_ids"], made["assistant_masks"]) == (ids, [int(mark) for mark in trained])


# -- accepted with a count


NO_ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "unended"),
    [(NO_ENDS + ASKED, 2), (NO_ENDS.replace("{% endfor", "</s>\n\n{% endfor") + ASKED, 0)],
)
def test_answers_without_an_end_token_are_counted(tokenizer_folder, tmp_path, jsonl, template, unended):
    """Some templates begin turns without ending them: a model trained on these never stops."""
    tokenizer = template_folder(tokenizer_folder, tmp_path, template)
    jsonl(tmp_path / "data.jsonl", [{"messages": [*CHAT, {"role": "user", "content": "h"}]}])
    documents = load_documents([str(tmp_path / "data.jsonl")], tokenizer, seq_len=200, vocab_size=320)
    assert documents.counts["answers without a token that ends them"] == unended


@pytest.mark.parametrize(
    ("prompt", "completion", "shared"), [("a ", "bc", 1), ("a", " bc", 0), ("a b", "c", 1), ("a b", " c", 0)]
)
def test_answers_that_begin_within_a_token_are_counted(tmp_path, jsonl, prompt, completion, shared):
    """Such as a space at the end of a prompt, which belongs to the answer's first word."""
    backend = Tokenizer(models.BPE(unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(
        ["a bc"] * 9,
        trainers.BpeTrainer(special_tokens=["<s>"], initial_alphabet=list("abc"), show_progress=False),
    )
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # which hides the space
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    tokenizer = TextTokenizer(tmp_path)
    jsonl(tmp_path / "data.jsonl", [{"prompt": prompt, "completion": completion}])
    documents = load_documents([str(tmp_path / "data.jsonl")], tokenizer, seq_len=200, vocab_size=320)
    assert documents.counts[SHARED_TOKEN] == shared
    assert len(tokenizer.encode("a bc")) < len(tokenizer.encode("a ")) + len(tokenizer.encode("bc"))


@pytest.mark.parametrize(
    "record", [{"text": "<s>abc"}, {"prompt": "<s>abc", "completion": "d"}, {"text": "abc"}]
)
def test_a_duplicate_bos_token_is_counted(written, tmp_path, jsonl, record):
    jsonl(tmp_path / "data.jsonl", [record])
    _, _, counts = written(tmp_path / "data.jsonl")
    counted = counts["that begin with the token of a beginning twice"]
    assert counted == (0 if record == {"text": "abc"} else 1)
