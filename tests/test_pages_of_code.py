"""Every block of Python in README.md and docs/ runs as printed, in the order of its page, with a tiny model.

Models of the hub become a folder with a tiny LLaMA, GPUs a CPU, and sizes smaller (SMALLER); nothing else is
changed. A block that a CPU without a network cannot run says so in its first line, `# Needs a GPU.`: its
syntax, names and keyword arguments are checked.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
BLOCKS = {
    name: blocks
    for name, text in PAGES.items()
    if (blocks := re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
}
ELSEWHERE = {"python", "post_training"}  # test_callbacks.py and losses/test_page.py run these in detail
HUB = r'"(?:meta-llama|Qwen)/[\w.-]+"'
# What a CPU and two layers need otherwise.
SMALLER = {
    'device="cuda"': 'device="cpu"',
    "2**18, 2**10": "2**4, 2**4",
    "range(128256, 128258)": "range(64, 66)",
    '"layers.3?.*"': '"layers.1.*"',
    "packing=True": "packing=True, bf16=False",
    'lightning.Trainer(precision="bf16-true")': "lightning.Trainer(max_epochs=1, logger=False)",
}


def needs(block):
    """The requirement that a block states, or None."""
    found = re.match(r"(?:#.*\n)*?# Needs (.+)\.\n", block)
    return found and found[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a tiny LLaMA with a tokenizer, and data files next to it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("shelf") / "llama"
    config = find_architecture("llama").tiny | {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    liger_models.from_config(config | {"pad_token_id": 0}).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(["</s>", *"abcdefgh Ġ"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


@pytest.fixture
def names(tiny, tmp_path, monkeypatch):
    """Names that the pages take for granted, in a folder with data."""
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": "ab", "completion": " cd"}] * 4
    Path("data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ids = torch.randint(1, 60, (4, 8))
    batches = {
        "README": [ids, ids],
        "optimizer": [ids, ids],
        "frameworks": torch.utils.data.DataLoader(
            [{"input_ids": row, "labels": row} for row in ids], batch_size=2
        ),
    }
    model = liger_models.from_hub(str(tiny))
    yield {
        "torch": torch,
        "liger_models": liger_models,
        "model": model,
        "input_ids": ids,
        "labels": ids,
        "mask": torch.ones_like(ids),
        "rows": [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids],
        "batches": batches,
        "tokenizer": range(70),
    }
    if "liger_models.hf" in sys.modules:
        liger_models.hf.unregister()


@pytest.mark.parametrize("page", sorted(BLOCKS.keys() - ELSEWHERE))
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_python_runs(page, names, tiny):
    names["batches"] = names["batches"].get(page)
    for block in BLOCKS[page]:
        if needs(block):
            continue
        code = re.sub(HUB, repr(str(tiny)), block)
        for printed, used in SMALLER.items():
            code = code.replace(printed, used)
        if page == "model" and "labels=3" in code:
            names["labels"] = torch.tensor([0, 1, 2, 0])
        exec(compile(code, f"{page}.md", "exec"), names)


def blocks_that_need_more():
    return [(page, block) for page, blocks in BLOCKS.items() for block in blocks if needs(block)]


@pytest.mark.parametrize(("page", "block"), blocks_that_need_more())
def test_blocks_that_need_more_name_what_exists(page, block):
    tree, known = ast.parse(block), {"liger_models": liger_models, "torch": torch}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= imported(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (found := resolve(node.func, known)) not in (
            None,
            functools.partial,
        ):
            parameters = inspect.signature(found).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                assert {word.arg for word in node.keywords} <= parameters.keys(), ast.unparse(node)


def imported(node):
    """The names that an import brings, of packages that are installed; an error if one does not exist."""
    if isinstance(node, ast.Import):
        installed = [alias for alias in node.names if importlib.util.find_spec(alias.name.split(".")[0])]
        modules = {alias.name: importlib.import_module(alias.name) for alias in installed}
        return {name.split(".")[0]: importlib.import_module(name.split(".")[0]) for name in modules}
    if importlib.util.find_spec(node.module.split(".")[0]) is None:
        return {}
    module = importlib.import_module(node.module)
    return {alias.asname or alias.name: member(module, alias.name) for alias in node.names}


def member(module, name):
    """A name of a module, or one of its modules; None if that needs a package that is not installed."""
    if not hasattr(module, name) and importlib.util.find_spec(f"{module.__name__}.{name}") is not None:
        try:
            return importlib.import_module(f"{module.__name__}.{name}")
        except ModuleNotFoundError:
            return None
    return getattr(module, name)


def resolve(node, known):
    """The object that a dotted name of `known` refers to, or None for the rest; an error if it is missing."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolve(node.value, known)) is not None:
        return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_script_target_and_extra_exists(page):
    text = PAGES[page]
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
        words = line.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        if words[0] == "python" and words[1].endswith(".py") and not words[1].startswith("llama.cpp"):
            assert (ROOT / words[1]).exists(), line
    for named in re.findall(r"(?:liger_models|\.)\[([\w,]+)\]'", text):
        assert set(named.split(",")) <= extras.keys(), named


def test_records_that_pages_show_are_json():
    shown = [
        (page, line)
        for page, text in PAGES.items()
        for line in re.findall(r'^    (\{".*\})$', text, re.MULTILINE)
    ]
    assert len(shown) > 5
    for page, line in shown:
        whole = re.sub(r", \.\.\.(?=\})", "", line).replace("[...]", "[]")
        assert isinstance(json.loads(whole), dict), page


def test_the_template_that_a_page_shows_is_jinja():
    jinja2 = pytest.importorskip("jinja2")
    (shown,) = re.findall(r"\n\n((?:    \{%.*\n|    \{\{.*\n)+)", PAGES["data"])
    messages = [{"role": "user", "content": "a"}]
    template = jinja2.Template(shown.replace("    {", "{"))
    made = template.render(messages=messages, add_generation_prompt=True, eos_token="</s>")
    assert made.startswith("user:")
    assert made.endswith("assistant:")


def test_blocks_are_checked_at_all():
    """A block with a wrong keyword, name or module is found."""
    for wrong, error in (
        ("liger_models.from_hub('a', colour=1)", AssertionError),
        ("liger_models.from_the_hub('a')", AttributeError),
        ("from liger_models.hf import nothing", AttributeError),
    ):
        with pytest.raises(error):
            test_blocks_that_need_more_name_what_exists("page", wrong)
