"""The notebooks run from their first cell to their last, with small models on a CPU: `make notebooks`.

`make test` runs two of them. What each cell prints goes to build/notebooks, from where the site takes it.
"""

import contextlib
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from liger_models.cli import main

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALWAYS = {"quick_start", "reading_a_model"}
PRINTED = ROOT / "build/notebooks"


def cells(path, kind):
    found = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def run(code, names):
    """Run a cell: Python, and lines that begin with `!liger-models`, as IPython does, in this process."""
    names["_command"] = command
    lines = re.sub(r"\\\n\s*", "", code).split("\n")
    code = "\n".join(
        re.sub(r"^(\s*)!liger-models (.*)$", lambda m: f"{m[1]}_command(f{m[2]!r})", line) for line in lines
    )
    exec(compile(code, "<cell>", "exec"), names)


def command(text):
    assert not main(shlex.split(text, comments=True)), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(path, tmp_path, monkeypatch, pytestconfig):
    if path.stem not in ALWAYS and not pytestconfig.getoption("--notebooks"):
        pytest.skip("make notebooks runs it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    printed, names = [], {}
    for code in cells(path, "code"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run(code, names)
        printed.append(out.getvalue().replace(str(tmp_path), "."))
    sys.modules.pop("small", None)
    if pytestconfig.getoption("--notebooks"):
        PRINTED.mkdir(parents=True, exist_ok=True)
        (PRINTED / f"{path.stem}.json").write_text(json.dumps(printed))


def test_ten_notebooks_are_listed_without_outputs():
    assert len(NOTEBOOKS) == 10
    listed = re.findall(r"\]\((\w+)\.ipynb\)", (ROOT / "notebooks/README.md").read_text())
    assert sorted(listed) == [path.stem for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), path
        assert cells(path, "markdown")[0].startswith("# ")
