"""Commands of the README and the docs are understood, and the files that they and the code name exist."""

import functools
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import liger_models.layers
from liger_models.cli import COMMANDS, build_parser
from liger_models.layers.recompute.activation_memory import LEVELS

ROOT = Path(__file__).parents[1]
PARTS = ("liger_models", "kernels", "convert", "layers", "architectures")
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_every_link_to_a_file_leads_to_one():
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#]+)", page.read_text())
        files = [target for target in targets if not target.startswith("http")]
        assert [target for target in files if not (page.parent / target).exists()] == [], page


def test_every_link_to_a_heading_leads_to_one():
    for page in PAGES:
        links = re.findall(r"\]\(((?!http)[^)#\s]*)#([^)]+)\)", page.read_text())
        assert [
            link for link in links if link[1] not in headings(page.parent / link[0] if link[0] else page)
        ] == [], page


def test_every_file_that_the_code_names_exists():
    """Comments and docstrings name a file by its folders, or by the last of them."""
    folders = (*PARTS, "tests", "benchmarks", "examples")
    files = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    ends = {"/".join(file.parts[i:]) for file in files for i in range(len(file.parts))}
    for file in files:
        if file.parts[0] in PARTS:
            named = re.findall(r"(?<![\w./-])(?:[a-z_\d]+/)+\w+\.py\b", (ROOT / file).read_text())
            assert [name for name in named if name not in ends] == [], file


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


@functools.cache
def headings(page):
    """Return heading anchors: lower case, no punctuation, hyphens for spaces."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_readme_is_two_screens():
    assert README.count("\n") <= 120


def test_every_command_is_shown():
    commands = re.findall(r"^    liger-models (\w+)", page("commands"), re.MULTILINE)
    assert set(commands) == set(COMMANDS)


def test_every_command_is_understood(monkeypatch, tmp_path):
    """Those that can run on a CPU do: tests/liger_models/training/test_commands_of_pages.py."""
    monkeypatch.chdir(tmp_path)
    parser, command = build_parser(), r"^    (?:liger-models|torchrun .*liger_models\.cli) (.+)$"
    for path in PAGES:
        text = re.sub(r" \\\n +", " ", path.read_text())  # one line each
        if shown := re.search(r"^`run.yaml`.*?\n((?:    [^\n]+\n)+)", text, re.MULTILINE | re.DOTALL):
            Path("run.yaml").write_text(textwrap.dedent(shown[1]))
        for given in re.findall(command, text, re.MULTILINE):
            words = shlex.split(given.partition(" < ")[0], comments=True)
            if words[0] != "bench":  # whose options are those of python -m benchmarks
                parser.parse_args(words)


def test_every_extra_is_named():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", page("install"))) == set(extras) - {"dev", "docs"}


def test_every_piece_of_python_compiles():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            compile(block, str(page), "exec")


def test_the_errors_of_the_faq_are_raised_somewhere():
    code = " ".join(path.read_text() for part in PARTS for path in (ROOT / part).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that go on in the next line
    of_others = {"Failed to find C compiler"}
    for quoted in re.findall(r'^\*\*"(.+?)"\*\*', page("errors"), re.MULTILINE):
        for words in quoted.split("..."):
            assert words.strip() in code or quoted in of_others, quoted


def test_options_that_other_tools_are_mapped_to_exist():
    train = build_parser()._subparsers._group_actions[0].choices["train"]
    for row in re.findall(r"^\|.+\|(.+)\|$", page("coming_from"), re.MULTILINE):
        for option in re.findall(r"(--[a-z][\w-]*)", row):
            assert option in train._option_string_actions, option


def test_every_page_is_in_the_sites_navigation():
    shown = re.findall(r"^ +- .+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(shown)


def test_every_part_is_listed():
    listed = set(re.findall(r"`(Liger\w+|liger_rotary\w+)`", page("parts")))
    assert listed == set(liger_models.layers.__all__)


def test_the_memory_table_is_what_inspect_shows(capsys):
    from liger_models.cli import main

    main(["inspect", "llama-3.1-8b"])
    shown = dict(re.findall(r"^  (\w+)\s+([\d.]+ k?B)  ", capsys.readouterr().out, re.MULTILINE))
    table = dict(re.findall(r"^\| `(\w+)`.*? \| ([\d.]+ k?B) \|", page("memory"), re.MULTILINE))
    assert table == shown
    assert list(table) == list(LEVELS)
