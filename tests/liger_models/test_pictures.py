"""Pictures of plans: bars with the parts of the peak."""

import re
from xml.etree import ElementTree

import pytest

from liger_models.cli import main
from liger_models.pictures.svg import bars

PLAN = ["plan", "llama-3.2-1b", "--gpu", "80GiB", "--seq-len", "2048"]


def test_a_plan_is_drawn_with_a_bar_for_each_level(tmp_path, capsys):
    assert main([*PLAN, "--picture", str(tmp_path / "plan.svg")]) == 0
    words = [found.text for found in ElementTree.parse(tmp_path / "plan.svg").getroot().findall(".//{*}text")]
    assert {"this plan", "all", "lean", "checkpoint", "offload", "weights", "available"} <= set(words)
    peak = re.search(r"([\d.]+) GiB$", capsys.readouterr().out.split("\nIf all layers")[0].strip())[1]
    shown = words[words.index("this plan") + 1]
    assert float(shown.removesuffix(" GiB")) == pytest.approx(float(peak), abs=0.06)


@pytest.mark.parametrize(
    ("name", "message"),
    [("plan.png", "expected a file name that ends in .svg"), ("no/plan.svg", "cannot be written")],
)
def test_a_picture_that_cannot_be_written_is_an_error(name, message, tmp_path, capsys):
    assert main([*PLAN, "--picture", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_lengths_of_bars_are_to_scale():
    drawn = ElementTree.fromstring(bars("a <title>", {"x": {"a": 1.0, "b": 3.0}, "y": {"a": 2.0}}, "GiB"))
    widths = {box[0].text: float(box.get("width")) for box in drawn.findall(".//{*}rect") if len(box)}
    assert widths["b: 3 GiB"] == 3 * widths["a: 1 GiB"]
    assert widths["a: 2 GiB"] == 2 * widths["a: 1 GiB"]
    assert drawn.find("{*}title").text == "a <title>"
