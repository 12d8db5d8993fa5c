"""Files that describe the package to the outside agree with one another."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import package
import pytest
import torch
import yaml

import liger_models
from liger_models.cli import COMMANDS
from liger_models.convert import errors

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STABILITY = (ROOT / "docs/stability.md").read_text()
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_the_version_is_the_same_everywhere():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert PYPROJECT["project"]["version"] == liger_models.__version__ == cited


def test_the_changelog_has_the_version():
    versions = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", PYPROJECT["project"]["version"]]


def test_workflows_test_every_python_that_is_claimed():
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PYPROJECT["project"]["classifiers"]))
    assert len(claimed) >= 3
    tested = re.findall(r"^ +python: \[(.+)\]$", WORKFLOWS["tests"], re.MULTILINE)
    assert [re.findall(r"[\d.]+", versions) for versions in tested] == [claimed, claimed]


def test_the_image_holds_every_code_folder_and_what_its_installation_reads():
    folders = set(PYPROJECT["tool"]["setuptools"]["package-dir"].values())
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", dockerfile, re.MULTILINE))
    files = set(re.search(r"^COPY (.+) \./$", dockerfile, re.MULTILINE)[1].split())
    sent = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert copied == folders
    assert sent == folders | files
    assert files >= {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_images_name_a_release_of_debian():
    """A tag such as python:3.12-slim moves to the next release by itself."""
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    image = re.search(r"^FROM (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1]
    for name in (image, container["image"]):
        assert re.search(r":3\.\d+-(slim-)?(bookworm|trixie)$", name), name


def test_the_image_installs_extras_that_exist():
    wanted = re.search(r"^ARG EXTRAS=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1]
    assert set(wanted.split(",")) <= PYPROJECT["project"]["optional-dependencies"].keys()


def test_workflows_test_the_oldest_versions_that_are_claimed():
    """Both ends of the versions in docs/stability.md, whose oldest are the bounds of pyproject.toml."""
    project = PYPROJECT["project"]
    bounds = dict(
        re.match(r"(\w+)>=([\d.]+)", text).groups()
        for text in [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    )
    names = ("torch", "triton", "transformers")
    oldest, newest = re.findall(r"^ +packages: (.+)$", WORKFLOWS["tests"], re.MULTILINE)
    assert oldest.split() == [f"{name}=={bounds[name]}.*" for name in names]
    assert newest.split() == list(names)
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", STABILITY, re.MULTILINE))
    assert rows == {name: bounds[name.lower()] for name in rows if name != "Python"} | {"Python": "3.11"}


def jobs():
    """(workflow, its jobs, name, job) of every job."""
    for name, text in WORKFLOWS.items():
        found = yaml.safe_load(text)["jobs"]
        for job in found:
            yield name, found, job, found[job]


def test_steps_of_workflows_run_what_exists():
    """Targets of make, programs, folders of caches, variables of matrices, and jobs that are waited for."""
    targets = re.findall(r"^([\w.-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = 0
    for workflow, others, name, job in jobs():
        where, matrix = f"{workflow}.{name}", dict(job.get("strategy", {}).get("matrix", {}))
        variables = matrix.keys() | {key for row in matrix.get("include", ()) for key in row}
        assert set(re.findall(r"matrix\.(\w+)", yaml.safe_dump(job))) <= variables, where
        assert set([job["needs"]] if "needs" in job else []) <= others.keys(), where
        assert job.get("timeout-minutes") or "needs" in job, where
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (where, step)
            if "uses" in step:  # of a version, never of whatever is newest
                version = r"@(v\d+|release/v\d+|[0-9a-f]{40})"
                assert re.fullmatch(r"[\w-]+(/[\w-]+){1,2}" + version, step["uses"]), where
            path = step.get("with", {}).get("cache-dependency-path")
            assert path is None or (ROOT / path).is_file(), (where, path)
            for line in step.get("run", "").splitlines():
                lines += 1
                program, *words = re.sub(r"\$\{\{.*?\}\}", "", line).split()
                if program == "make":
                    assert {word for word in words if "=" not in word} <= set(targets), line
                elif program == "python" and words[0].endswith(".py"):
                    assert (ROOT / words[0]).is_file(), line
    assert lines > 8


def test_the_devcontainer_is_set_up_by_a_target_of_make():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    _, target, folder = container["postCreateCommand"].split()
    folder = folder.removeprefix("VENV=")
    assert target.replace(folder, "$(VENV)") + ":" in (ROOT / "Makefile").read_text()
    interpreter = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter == f"{folder}/bin/python"


def test_links_of_the_readme_are_absolute_on_an_index():
    text = "![a b](docs/x.png) [c](docs/y.md#z) [d](https://arxiv.org)"
    made = package.absolute_links(text, "https://e.org/a/b", "v1")
    assert made == (
        "![a b](https://e.org/a/b/raw/v1/docs/x.png) [c](https://e.org/a/b/blob/v1/docs/y.md#z) "
        "[d](https://arxiv.org)"
    )
    assert package.absolute_links(text, "", "v1") == " c [d](https://arxiv.org)"
    readme = package.absolute_links((ROOT / "README.md").read_text(), "https://e.org/a/b", "v1")
    assert re.findall(r"\]\((?!https:)[^)]*\)", readme) == []


def test_the_address_of_a_repository_becomes_the_projects_urls():
    project = package.with_urls((ROOT / "pyproject.toml").read_text(), "https://e.org/a/b")
    project = tomllib.loads(project)["project"]
    assert project["urls"]["Issues"] == "https://e.org/a/b/issues"
    assert project | {"urls": None} == PYPROJECT["project"] | {"urls": None}


PACKAGES = (
    "liger_models",
    "liger_models.optim",
    "liger_models.losses",
    "liger_models.layers",
    "liger_models.hf",
)
EXPERIMENTAL = set(re.findall(r"`(\w+)`", STABILITY.partition("## Experimental")[2].partition("\n## ")[0]))


def stable(row):
    """Names in a row of the table of docs/stability.md."""
    (cell,) = re.findall(rf"^\| `?{re.escape(row)}`? \| (.+) \|$", STABILITY, re.MULTILINE)
    return re.findall(r"`(\w+)`", cell)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_is_either_stable_or_experimental(package):
    """A name cannot be added, renamed or taken away without a change of the page."""
    if package == "liger_models.hf":
        pytest.importorskip("transformers")
    names = stable(package) + (stable("its errors") if package == "liger_models" else [])
    experimental = EXPERIMENTAL & set(offered := importlib.import_module(package).__all__)
    assert sorted([*names, *experimental]) == sorted(offered)


def test_every_error_is_offered():
    assert sorted(stable("its errors")) == sorted(name for name in vars(errors) if name.endswith("Error"))


def test_every_command_is_either_stable_or_experimental():
    names = stable("command line")
    assert sorted([*names, *EXPERIMENTAL & set(COMMANDS)]) == sorted(COMMANDS)


def test_every_method_of_a_model_that_pages_use_is_stable_or_experimental():
    own = {name for base in liger_models.LigerCausalLM.__mro__[:-1] for name in vars(base)}
    own -= vars(torch.nn.Module).keys() - {"forward"}
    listed = stable("a model")
    assert set(listed) <= own
    pages = " ".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    used = own & set(re.findall(r"\bmodel\.([a-z]\w*)\(", pages))
    assert {"score", "freeze", "distill"} <= used <= {*listed, *EXPERIMENTAL}


def test_changes_are_in_the_form_of_keep_a_changelog():
    """Newest version first, each with a date, and its changes under the form's headings, in its order."""
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    _, unreleased, *versions = re.split(r"^## ", text, flags=re.MULTILINE)
    assert unreleased.startswith("[Unreleased]\n")
    dates = [re.match(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)\n", version)[1] for version in versions]
    assert dates == sorted(dates, reverse=True)
    for version in (unreleased, *versions):
        headings = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert headings == sorted(set(headings), key=kinds.index)
        sections = re.split(r"^### .+$", version, flags=re.MULTILINE)[1:]
        assert all(section.strip().startswith("- ") for section in sections), version[:40]


def test_templates_of_issues_are_forms():
    """Of GitHub's schema: without it a template is silently not offered."""
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem == "config":
            assert set(form) <= {"blank_issues_enabled", "contact_links"}
            continue
        assert set(form) == {"name", "description", "labels", "body"}, path.name
        assert all(
            part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"]
        )
        names = [part["id"] for part in form["body"]]
        assert len(names) == len(set(names)), path.name
