"""What tells strangers about the package says the same everywhere."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_the_version_is_the_same_everywhere():
    import liger_models

    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert PYPROJECT["project"]["version"] == liger_models.__version__ == cited


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
