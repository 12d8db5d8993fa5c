"""Build the sdist and the wheel, and use the wheel in a clean environment: `make package`.

    python tests/package.py dist --pins                            # as `make package` does
    python tests/package.py dist --url https://example.org/a/name  # for an index, with links to there

An index shows the README without the files next to it, so its links and pictures must be absolute. Their
address is known only where the repository is published: the release's workflow passes it. The tree is copied,
and in the copy the README's links are made absolute and `[project.urls]` is added. Without an address, links
become plain text.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__", "*-output")
# A training run in an environment that has only what the package itself asks for.
USE = """
import pathlib, sys
import tokenizers
import liger_models
from liger_models.cli import main

assert "site-packages" in liger_models.__file__, liger_models.__file__
letters = {letter: n for n, letter in enumerate(["</s>", *"abcdefgh ."])}
tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
pathlib.Path("tokenizer").mkdir()
tokenizer.save("tokenizer/tokenizer.json")
pathlib.Path("tokenizer/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
pathlib.Path("pairs.jsonl").write_text('{"prompt": "abc", "chosen": "d", "rejected": "e"}\\n' * 4)
pathlib.Path("texts.txt").write_text("abc def gh. " * 200)
for command in (
    "list",
    "plan llama-3.1-8b --gpu H100 --seq-len 4096",
    "init llama-demo fresh --tokenizer tokenizer --dtype float32",
    "verify fresh --no-transformers",
    "train fresh --data texts.txt --output run --steps 2 --seq-len 32 --batch-size 1",
    "train run --objective dpo --data pairs.jsonl --output dpo --steps 1 --seq-len 32 --batch-size 1",
    "generate run --raw --prompt abc --max-new-tokens 4",
):
    print("$ liger-models", command, flush=True)
    code = main(command.split())
    assert not code, code
assert not {"transformers", "peft", "PIL", "pyarrow"} & sys.modules.keys()
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="FOLDER", help="for the sdist and the wheel")
    parser.add_argument("--url", default="", help="address of the repository (default: none)")
    parser.add_argument("--pins", action="store_true", help="install the versions of constraints.txt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        prepare(tree, args.url.rstrip("/"))
        print("Building the sdist and the wheel", flush=True)
        run(sys.executable, "-m", "build", "--outdir", args.out.resolve(), cwd=tree, quiet=True)
        built = [*args.out.glob("*.tar.gz"), *args.out.glob("*.whl")]
        run(sys.executable, "-m", "twine", "check", "--strict", *built)
        run(sys.executable, "-m", "venv", Path(folder) / "clean")
        python = Path(folder) / "clean/bin/python"
        pins = ("-c", ROOT / "constraints.txt") if args.pins else ()
        print("Installing the wheel into a clean environment (minutes)", flush=True)
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pins, built[-1])
        (Path(folder) / "elsewhere").mkdir()
        run(python, "-c", USE, cwd=Path(folder) / "elsewhere")
        print(f"{built[-1].name} was installed in a clean environment, and used there")
    return 0


def prepare(tree: Path, url: str) -> None:
    """Write the README and pyproject.toml of a tree as an index needs them."""
    version = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
    readme, project = tree / "README.md", tree / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(), url, f"v{version}"))
    if url:
        project.write_text(with_urls(project.read_text(), url))


def absolute_links(text: str, url: str, tag: str) -> str:
    """The text with relative links leading to the files of a tag; without a URL, only their text."""

    def replace(match: re.Match) -> str:
        picture, words, target = match.groups()
        if re.match(r"\w+:", target):
            return match[0]
        if not url:
            return "" if picture else words
        return f"{picture}[{words}]({url}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


def with_urls(project: str, url: str) -> str:
    """The text of pyproject.toml with `[project.urls]`."""
    names = {"Source": "", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
    table = "".join(f'{name} = "{url}{path}"\n' for name, path in names.items())
    return project.replace("[project.scripts]", f"[project.urls]\n{table}\n[project.scripts]", 1)


def run(*command, cwd=None, quiet=False) -> None:
    """Run a command; if it is to be `quiet`, it prints only when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if quiet else {}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, **output)
    if done.returncode:
        print(done.stdout or "", file=sys.stderr)
        done.check_returncode()


if __name__ == "__main__":
    raise SystemExit(main())
