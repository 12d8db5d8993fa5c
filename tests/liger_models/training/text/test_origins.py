"""Strings keep the origins of their characters through all operations of templates, or report their loss."""

import pytest

from liger_models.convert.errors import DataError
from liger_models.training.text.chat_template import ChatTemplate
from liger_models.training.text.origins import LOST, Trace, Traced, join, percent

jinja2 = pytest.importorskip("jinja2")

TEXT = "  Ab\tc,d\n éß,x,, yz \r\nQ"


def formatted(like, template, values):
    return percent(like.trace, template, values) if isinstance(like, Traced) else template % values


CALLS = {
    "str": lambda s: [str(s)],
    "strip": lambda s: [s.strip(), s.lstrip(), s.rstrip(), s.strip(" Q\n"), s.strip("")],
    "affixes": lambda s: [s.removeprefix("  A"), s.removesuffix("Q"), s.removeprefix("no")],
    "split": lambda s: [s.split(), s.split(","), s.split(",", 1), s.split(None, 1), s.split("no")],
    "rsplit": lambda s: [s.rsplit(), s.rsplit(","), s.rsplit(",", 2), s.rsplit(None, 2)],
    "splitlines": lambda s: [s.splitlines(), s.splitlines(True)],
    "partition": lambda s: [s.partition(","), s.rpartition(","), s.partition("no"), s.rpartition("no")],
    "replace": lambda s: [s.replace(",", ""), s.replace(",", "<>", 2), s.replace("no", "yes")],
    "slices": lambda s: [s[3:7], s[-4:], s[:-1], s[::-1], s[1:9:2], s[5], s[-1], s[7:3]],
    "add": lambda s: [s + "x", "x" + s, s + s, s + ""],
    "times": lambda s: [s * 2, 2 * s, s * 0],
    "percent": lambda s: [
        formatted(s, "a%sb", s),
        formatted(s, "%d%% %s %5s|%r", (3, s, "x", s)),
        formatted(s, "%(k)s!", {"k": s}),
        formatted(s, s, ()),
    ],
    "join": lambda s: [s.join(["a", "b"]), s.join([]), s.join("x")],
    "iterate": lambda s: [list(s)],
}


@pytest.fixture
def traced():
    trace = Trace()
    text = trace.of(TEXT[:9], (0, "content")) + trace.of(TEXT[9:], (1, "content"))
    return text


def origin_of_each(text):
    return [tag[0] for length, tag in text.runs for _ in range(length)]


def flat(value):
    return [one for part in value for one in flat(part)] if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("name", CALLS)
def test_operations_match_str_and_each_character_keeps_its_origin(name, traced):
    """Distinct characters show where each one came from."""
    pairs = zip(TEXT, origin_of_each(traced), strict=True)
    distinct = {c: origin for c, origin in pairs if TEXT.count(c) == 1}
    plain, found = flat(CALLS[name](TEXT)), flat(CALLS[name](traced))
    assert [str.__str__(one) for one in found] == plain
    for one in found:
        assert len(origin_of_each(one)) == len(one)
        for character, origin in zip(str.__str__(one), origin_of_each(one), strict=True):
            if character in distinct and origin is not None and not origin[1].startswith(LOST):
                assert origin == distinct[character]
        known = [c for c in str.__str__(one) if c in "bcéßyzQ"]
        assert len([o for o in origin_of_each(one) if o]) >= len(known)  # each of these has an origin


@pytest.mark.parametrize("name", ["upper", "lower", "title", "capitalize", "casefold", "swapcase"])
def test_case_changes_keep_origins(name, traced):
    """ß becomes two letters, after which positions are uncertain: the origins are reported as mixed."""
    found = getattr(traced, name)()
    assert str.__str__(found) == getattr(TEXT, name)()
    assert (len(found) == len(TEXT)) == (name in ("lower", "title", "capitalize"))
    if len(found) == len(TEXT):
        assert found.runs == traced.runs
    else:
        assert found.runs[0][1][0] == (0, f"{LOST} {name}")
    one = Trace().of("straße", (0, "content"))
    assert {tag[0] for _, tag in getattr(one, name)().runs} == {(0, "content")}


def test_separators_and_joined_strings_keep_their_own_origins():
    trace = Trace()
    found = join(trace, ", ", [trace.of("a", (0, "x")), "b", trace.of("c", (1, "x"))])
    assert origin_of_each(found) == [(0, "x"), None, None, None, None, None, (1, "x")]
    with pytest.raises(TypeError, match="sequence item 1: expected str instance, int found"):
        join(trace, "", ["a", 3])


# -- templates

ASKED = "{% if add_generation_prompt %}<a>{% endif %}"
CHAT = [
    {"role": "user", "content": "user words"},
    {
        "role": "assistant",
        "content": " said & <said> ",
        "reasoning_content": "Thought",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": ["x", 1]}}}],
    },
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "last"},
]


def learned(template, messages=CHAT, given=0):
    rendering = ChatTemplate(template, {"bos_token": "<s>"}, "here").render(messages, given, {})
    return [rendering.text[start:stop] for start, stop in rendering.spans]


def turns(written, header="'<a>'"):
    """Template that writes assistant messages in this way."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ " + header + " }}"
        f"{written}{{{{ '</a>' }}}}"
        "{% else %}{{ '<u>' + m.content + '</u>' }}{% endif %}{% endfor %}" + ASKED
    )


WAYS = {
    "{{ m.content }}": " said & <said> ",
    "{{ m.content | trim }}": "said & <said>",
    "{{ m['content'] | upper }}": " SAID & <SAID> ",
    "{{ m.content | title }}": " Said & <Said> ",
    "{{ m.content | replace('said', 'heard') }}": " heard & <heard> ",
    "{{ 'x & y' | replace('x', m.content) }}": " said & <said>  & y",
    "{{ m.content | e }}": " said &amp; &lt;said&gt; ",
    "{{ m.content | tojson }}": '" said & <said> "',
    "{{ m.content | tojson | safe }}": '" said & <said> "',
    "{{ m.content | string | default('none', true) }}": " said & <said> ",
    "{{ m.content | indent(2, true) }}": "   said & <said> ",
    "{{ m.content | list | join }}": " said & <said> ",
    "{{ m.content | list | join('-') }}": " -s-a-i-d- -&- -<-s-a-i-d->- ",
    "{{ '<%s>' | format(m.content) }}": "< said & <said> >",
    "{{ '<%s|%s>' % (m.content, m.role) }}": "< said & <said> |assistant>",
    "{{ '<{}|{x[0]}>'.format(m.content, x=[m.role]) }}": "< said & <said> |assistant>",
    "{{ '<{x}>'.format_map({'x': m.content}) }}": "< said & <said> >",
    "{{ '/'.join(m.content.split(' ')) }}": "/said/&/<said>/",
    "{{ ['(', m.content, ')'] | join }}": "( said & <said> )",
    "{{ '(' ~ m.content ~ ')' ~ 3 }}": "( said & <said> )3",
    "{{ m.content.split('&')[0] ~ m.content.partition('&')[2] }}": " said  <said> ",
    "{{ m.content[1:5] }}{{ m.content[6] }}{{ m.content[::-1] | trim }}": "said&>dias< & dias",
    "{% set x %}[{{ m.content }}]{% endset %}{{ x }}": "[ said & <said> ]",
    "{% set x = m.content %}{{ x }}{{ x | reverse }}": " said & <said>  >dias< & dias ",
    "{% filter upper %}[{{ m.content }}]{% endfilter %}": "[ SAID & <SAID> ]",
    "{% macro w(t) %}({{ t }}){% endmacro %}{{ w(m.content) }}": "( said & <said> )",
    "{% macro w() %}({{ caller() }}){% endmacro %}{% call w() %}{{ m.content }}{% endcall %}": (
        "( said & <said> )"
    ),
    "{% set ns = namespace(t='') %}{% set ns.t = ns.t + m.content %}{{ ns.t }}": " said & <said> ",
    "{% for c in m.content %}{{ c }}{% endfor %}": " said & <said> ",
    "{% for c in m.content.split() %}{{ c }}{{ '_' if not loop.last }}{% endfor %}": "said_&_<said>",
    "{% with t = m.content %}{{ t }}{% endwith %}": " said & <said> ",
    "{{ m.content | wordwrap(6) }}": "said &\n<said>",
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_learned_however_the_template_writes_them(way):
    messages = [CHAT[0], {"role": "assistant", "content": CHAT[1]["content"]}, CHAT[2]]
    template = turns(way)
    if "wordwrap" in way:
        messages[1]["content"] = "said & <said>"
    assert learned(template, messages) == [f"{WAYS[way]}</a>"]


CALLED = {
    "{{ m.tool_calls | map(attribute='function') | list | tojson }}": (
        '[{"name": "look", "arguments": {"at": ["x", 1]}}]'
    ),
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}": (
        'look({"at": ["x", 1]})'
    ),
    "{% for k, v in m.tool_calls[0].function.arguments | items %}{{ k }}={{ v }};{% endfor %}": (
        "at=['x', 1];"
    ),
    "{% for k, v in m.tool_calls[0].function.arguments | dictsort %}{{ k ~ v[0] }}{% endfor %}": "atx",
    "{{ m.tool_calls | map(attribute='function.name') | join(',') }}": "look",
    "{{ m.tool_calls | selectattr('type', 'equalto', 'function') | list | length }}"
    "{{ m.reasoning_content }}": "1Thought",
    "{{ m.reasoning_content | lower }}{{ m.get('tool_calls')[0]['function']['name'] | upper }}": (
        "thoughtLOOK"
    ),
}


@pytest.mark.parametrize("way", CALLED)
def test_calls_and_reasoning_are_learned_however_the_template_writes_them(way):
    assert learned(turns(way), CHAT[:3]) == [f"{CALLED[way]}</a>"]


def test_a_header_in_one_expression_with_the_answer_is_not_learned():
    for way in ("'<a>' + m.content", "'<a>' ~ m.content", "'<a>%s' % m.content", "['<a>', m.content] | join"):
        template = turns("", header=way)
        assert learned(template, [CHAT[0], CHAT[3]]) == ["last</a>"]


LOOPS = {
    "by number": "{% for i in range(messages | length) %}{% set m = messages[i] %}BODY{% endfor %}",
    "by number alone": "{% for i in range(messages | length) %}{{ '<' + messages[i].role[0] + '>' + "
    "messages[i].content + '</' + messages[i].role[0] + '>' }}{% endfor %}",
    "of some": "{% for m in messages[1:] if m.content %}BODY{% endfor %}",
    "kept for the end": "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + '<' "
    "+ m.role[0] + '>' + m.content + '</' + m.role[0] + '>' %}{% endfor %}{{ ns.t }}",
    "in a macro": "{% macro all(ms) %}{% for m in ms %}BODY{% endfor %}{% endmacro %}{{ all(messages) }}",
    "in a block": "{% set t %}{% for m in messages %}BODY{% endfor %}{% endset %}{{ t }}",
    "with others ahead": "{% for m in messages %}{% for o in messages[loop.index:] %}"
    "{% if o.content == 'x' %}{% break %}{% endif %}{% endfor %}"
    "{% if loop.nextitem %}{% endif %}BODY{% endfor %}",
    "of copies": "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + "
    "[{'role': m.role, 'content': m.content}] %}{% endfor %}{% for m in ns.l %}BODY{% endfor %}",
    "recursive": "{% for m in messages recursive %}BODY{% endfor %}",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_answers_are_found_in_any_loop_over_the_messages(loop):
    body = "{{ '<' + m.role[0] + '>' + m.content + '</' + m.role[0] + '>' }}"
    messages = [CHAT[0], {**CHAT[3], "content": "first"}, CHAT[2], CHAT[3]]
    assert learned(LOOPS[loop].replace("BODY", body) + ASKED, messages) == ["first</a>", "last</a>"]
    assert learned(LOOPS[loop].replace("BODY", body) + ASKED, messages, given=2) == ["last</a>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages | tojson }}", "mixes message 1, of the assistant, .* 'tojson'"),
        (turns("{{ (m.content ~ messages[0].content) | e }}"), "mixes message 1, .* other text in 'e'"),
        (turns("{{ '%*s' % (99, m.content) }}"), "mixes message 1, of the assistant, with other text in '%'"),
        ("{{ messages[0].content }}<a>{{ messages[1].content }}", "outside of its iteration in a loop"),
        (turns("{{ m.content }}{{ messages[0].content }}"), "writes the content of message 0 within"),
    ],
)
def test_origins_that_cannot_be_traced_are_an_error(template, message):
    with pytest.raises(DataError, match=message):
        learned(template, CHAT[:2])


def test_a_template_that_escapes_unsafe_text_is_refused():
    """After `safe`, + escapes its other operand, which strings with origins do not do."""
    with pytest.raises(DataError, match="different text when origins"):
        learned(turns("{{ '<b>' + (m.content | safe) }}"), [CHAT[0], CHAT[3]])


def test_the_end_of_an_answer_dropped_by_the_template_is_not_learned():
    template = turns("{{ m.content }}").replace("m.content }}{{ '</a>'", "'' }}{{ '</a>'")
    rendering = ChatTemplate(template, {}, "here").render([CHAT[0], CHAT[3]], 0, {})
    assert rendering.text == "<u>user words</u><a></a>"
    assert (rendering.spans, rendering.dropped) == ([], ["text"])


def test_the_template_defines_generation_prompt_and_end_of_answers():
    guard = turns("{{ m.content }}") + "Is it safe?"  # also after questions, so it is not part of an answer
    assert learned(guard, [CHAT[0], CHAT[3]]) == ["last</a>"]
    end = "{% if add_generation_prompt %}<a>{% else %}<e>{% endif %}"
    ends = turns("{{ m.content }}").removesuffix(ASKED) + end
    assert learned(ends, [CHAT[0], CHAT[3]]) == ["last</a><e>"]
    assert learned(ends, CHAT[:1] + CHAT[3:] + CHAT[2:3]) == ["last</a>"]


def test_environments_are_independent_and_jinja_is_not_modified():
    before = {name: getattr(jinja2.runtime, name) for name in ("str_join", "markup_join")}
    learned(turns("{{ m.content ~ '' }}"), [CHAT[0], CHAT[3]])
    assert all(getattr(jinja2.runtime, name) is value for name, value in before.items())
    assert jinja2.Environment.concat is jinja2.environment.Environment.concat
    assert jinja2.Environment().from_string("{{ 'a' ~ 1 }}").render() == "a1"
