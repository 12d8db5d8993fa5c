"""What tells strangers about the package says the same everywhere."""

import json
import re
import tomllib
from pathlib import Path

import package
import yaml

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STABILITY = (ROOT / "docs/stability.md").read_text()
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_the_version_is_the_same_everywhere():
    import liger_models

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


def test_the_images_hold_every_code_folder():
    folders = set(PYPROJECT["tool"]["setuptools"]["package-dir"].values())
    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    sent = set(re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)) - {"LICENSE"}
    assert copied == sent == folders


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
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step["uses"]), where
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


def test_what_is_stable_is_what_the_package_offers():
    import liger_models

    assert set(re.findall(r"`(\w+)`", STABILITY)) >= {
        name for name in liger_models.__all__ if not name.endswith("Error")
    }
