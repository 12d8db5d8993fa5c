"""Makes the pages of the site that the repository does not hold, for `mkdocs build` (mkdocs.yml lists it).

The home page and the guide for contributors are the README and CONTRIBUTING.md; the command line's reference
comes from its parser, the Python API's from `__all__` and the docstrings. Notebooks become pages, with what
they printed when `make notebooks` ran. Nothing here imports torch.
"""

import ast
import html
import json
import os
import posixpath
import re
import shutil
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PARTS = ("kernels", "convert", "layers", "architectures")
# Pages made of files that are outside docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "notebooks/README.md": "notebooks/index.md",
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OF_NOTEBOOKS = {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS}
API = {
    "liger_models": "The names of the package itself",
    "liger_models.optim": "Optimizers",
    "liger_models.losses": "Post-training losses",
    "liger_models.layers": "Parts for your own model",
    "liger_models.kernels": "Operations",
    "liger_models.hf": "transformers",
}


def on_startup(command, dirty):
    """Lay the package out as it installs, before mkdocstrings looks for it."""
    tree = ROOT / "build/docs/liger_models"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT / "liger_models", tree)  # griffe, which reads them, follows no links
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part)


def on_files(files, config):
    pages = {page: (ROOT / name).read_text() for name, page in OUTSIDE.items()}
    pages |= {"reference/command_line.md": command_line()}
    pages |= {f"reference/{module}.md": api(module, title) for module, title in API.items()}
    pages |= {f"notebooks/{path.stem}.md": notebook(path) for path in NOTEBOOKS}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links between files of the repository lead to the pages made of them."""
    markdown = re.sub(r"\A<!--.*?-->\n", "", markdown)  # it would hide the title
    made = OUTSIDE | OF_NOTEBOOKS
    sources = {target: name for name, target in made.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replace(match):
        image, text, target, anchor = match.groups("")
        if re.match(r"\w+:", target) or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = made.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if name:
            here = posixpath.dirname(page.file.src_uri) or "."
            return f"{image}[{text}]({posixpath.relpath(name, here)}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        return text  # code, whose public address is not known

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", replace, markdown)


def notebook(path):
    """A notebook as a page: its text, its code, and what each cell printed if `make notebooks` has run."""
    printed = ROOT / "build/notebooks" / f"{path.stem}.json"
    outputs = iter(json.loads(printed.read_text()) if printed.exists() else ())
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if output := next(outputs, "").strip("\n"):
            parts.append(f"```text\n{output}\n```")
    return "\n\n".join(parts) + "\n"


def command_line():
    """Describe every command and its options."""
    sys.path.insert(0, str(ROOT))
    os.environ["COLUMNS"] = "78"  # the width of the usage
    from liger_models.cli import build_parser

    parser = build_parser()
    lines = [
        "# Command line",
        "",
        f"{parser.description} Made from the parser: `liger-models COMMAND --help`.",
        "",
    ]
    (commands,) = [action for action in parser._actions if action.dest == "command"]
    for name, command in commands.choices.items():
        lines += [f"## {name}", "", *_described(command)]
        for group in command._action_groups:
            lines += _options(command, group)
    return "\n".join(lines)


def _described(command):
    text = command.description or ""
    usage = command.format_usage().removeprefix("usage: ").rstrip()
    block = [f"    {line}" for line in usage.splitlines()]
    return [*block, "", *(["```text", text.strip(), "```", ""] if "\n" in text else [html.escape(text), ""])]


def _options(command, group):
    formatter = command._get_formatter()
    rows = []
    for action in group._group_actions:
        if action.help == "==SUPPRESS==" or "--help" in action.option_strings:
            continue
        text = html.escape(formatter._expand_help(action) if action.help else "", quote=False)
        text = re.sub(r"([|*_\\`\[\]])", r"\\\1", " ".join(text.split()))
        shown = formatter._format_action_invocation(action).replace("|", "\\|")
        rows.append(f"| `{shown}` | {text} |")
    if not rows:
        return []
    return [f"**{group.title or 'options'}**", "", "| name | meaning |", "| --- | --- |", *rows, ""]


def api(module, title):
    """List what a package offers, with signatures and docstrings."""
    path = ROOT / "build/docs" / module.replace(".", "/") / "__init__.py"
    code = ast.parse(path.read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in code.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    lines = [f"# {module}", "", f"{title}: what `{module}` offers.", ""]
    for name in names:
        lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)
