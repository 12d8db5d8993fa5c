"""Chat templates that never end or fill memory are stopped by an error that names the tokenizer."""

import threading

import pytest

from liger_models.convert.errors import DataError
from liger_models.training.text import template_limits
from liger_models.training.text.chat_template import ChatTemplate

pytest.importorskip("jinja2")
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
MANY = "{% for a in range(99999) %}"
ENDLESS = {
    "loops": f"{MANY * 4}x{'{% endfor %}' * 4}",
    "loops without output": f"{MANY * 4}{'{% endfor %}' * 4}",
    "filtered loops": f"{MANY}{{% for b in range(99999) if false %}}{'{% endfor %}' * 2}",
    "recursive loops": (
        "{% for a in range(99) recursive %}{% if loop.depth < 30 %}{{ loop(range(99)) }}{% endif %}"
        "{% endfor %}"
    ),
    "macros": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"),
    "maps": f"{MANY}{{% if range(99999) | map('string') | list %}}{{% endif %}}{{% endfor %}}",
    "generation": f"{{% generation %}}{MANY * 4}{'{% endfor %}' * 4}{{% endgeneration %}}",
    "blocks": f"{{% set x %}}{MANY * 4}{'{% endfor %}' * 4}{{% endset %}}",
}
DOUBLING = "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = [DOUBLE] %}{% endfor %}"
LARGE = {
    "product": "{{ 'a' * 10 ** 9 }}",
    "product of lists": "{{ ([messages[0].content] * 10 ** 9) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squares": DOUBLING.replace("'ab'", "3").replace("[DOUBLE]", "ns.x * ns.x"),
    "sum": DOUBLING.replace("[DOUBLE]", "ns.x + ns.x"),
    "concatenation": DOUBLING.replace("[DOUBLE]", "ns.x ~ ns.x"),
    "joined": DOUBLING.replace("[DOUBLE]", "[ns.x, ns.x] | join"),
    "joined by a method": DOUBLING.replace("[DOUBLE]", "ns.x.join([ns.x, ns.x])"),
    "replaced": DOUBLING.replace("[DOUBLE]", "ns.x.replace('a', ns.x)"),
    "replaced by the filter": DOUBLING.replace("[DOUBLE]", "ns.x | replace('a', ns.x)"),
    "formatted": DOUBLING.replace("[DOUBLE]", "'%s%s' | format(ns.x, ns.x)"),
    "formatted by a method": DOUBLING.replace("[DOUBLE]", "'{0}{0}'.format(ns.x)"),
    "formatted by %": DOUBLING.replace("[DOUBLE]", "'%s%s' % (ns.x, ns.x)"),
    "nested lists": DOUBLING.replace("[DOUBLE]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nested dicts": DOUBLING.replace("[DOUBLE]", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "blocks": DOUBLING.replace("{% set ns.x = [DOUBLE] %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "width": "{{ '%1000000000d' % 1 }}",
    "width by an argument": "{{ '%*d' % (10 ** 9, 1) }}",
    "width by a method": "{{ '{:1000000000}'.format(1) }}",
    "justified": "{{ 'x'.ljust(10 ** 9) }}",
    "centered": "{{ 'x' | center(10 ** 9) }}",
    "indented": "{{ ('a\n' * 10 ** 5) | indent(10 ** 6) }}",
    "tabs": "{{ ('\t' * 10 ** 5).expandtabs(10 ** 6) }}",
    "indented JSON": "{{ [[[[1]]]] | tojson(indent=10 ** 6) }}",
    "filled batches": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "output": f"{MANY * 2}{'x' * 1000}{'{% endfor %}' * 2}",
}


def assert_refused(template):
    refusal = r"the chat template of there rejects the conversation \(LimitError: it "
    with pytest.raises(DataError, match=refusal):
        ChatTemplate(template, {}, "there").render(TALK, 0, {})


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_never_ends_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.1)
    assert_refused(template)


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_that_would_fill_memory_is_stopped_in_time(template, within_a_second):
    ChatTemplate("{{ messages | length }}", {}, "there").render(TALK[:1], 0, {})  # triggers lazy imports
    with within_a_second():
        assert_refused(template)


def test_the_limit_applies_in_every_thread_and_to_each_rendering(monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.1)
    found = []

    def run():
        try:
            assert_refused(ENDLESS["loops"])
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found
    loop = "{% for a in range(2000) %}{% endfor %}"
    template = ChatTemplate(f"{{% for m in messages %}}{loop}{{{{ m.content }}}}{{% endfor %}}", {}, "")
    for _ in range(30):  # longer in total than the limit of one rendering
        assert template.render(TALK, 0, {}).text == "hiho"


def test_long_conversations_are_within_the_limits():
    template = ChatTemplate(
        "{% for m in messages %}{% set before = messages[: loop.index0] + [m] %}"
        "[{{ before | length }}]{{ m.role ~ ': ' ~ m.content | trim | replace('a', 'b') }}\n{% endfor %}",
        {},
        "there",
    )
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": "a text of some length " * 20} for i in range(40)]
    text = template.render(talk, 0, {}).text
    assert text.count("b text of some length") == 800
