"""The table of docs/frameworks.md agrees with the marked tests and is written from their outcomes."""

from __future__ import annotations

import pytest
import support_table


def test_the_table_lists_the_marked_cases():
    listed = {tool: row.cases for tool, row in support_table.read_table().items()}
    message = "make the table anew: pytest tests/hf tests/frameworks tests/vision --write-support-table"
    assert listed == support_table.marked_cases(), message


@pytest.fixture
def page(tmp_path, monkeypatch):
    path = tmp_path / "frameworks.md"
    path.write_text(f"before\n{support_table.BEGIN}\n{support_table.HEADING}{support_table.END}\nafter\n")
    monkeypatch.setattr(support_table, "PAGE", path)
    monkeypatch.setattr(support_table, "marked_cases", lambda: {"TRL": ("DPO", "KTO"), "torchao": ("int8",)})
    versions = {"trl": "1.16.0", "peft": "0.21.2", "transformers": "5.23.0", "torchao": "0.15.0+cpu"}
    monkeypatch.setattr(support_table.importlib.metadata, "version", versions.__getitem__)
    return path, versions


def test_a_tool_gets_the_versions_with_which_all_its_cases_passed(page):
    path, versions = page
    passed = [("TRL", "DPO", "passed"), ("TRL", "KTO", "passed"), ("TRL", "KTO", "skipped")]
    assert support_table.write_table(passed) == []
    assert support_table.read_table()["TRL"].versions["transformers"] == ("5.23",)
    versions["transformers"] = "5.9.1"
    support_table.write_table(passed)
    row = support_table.read_table()["TRL"]
    assert row.cases == ("DPO", "KTO")
    assert row.versions == {"trl": ("1.16",), "peft": ("0.21",), "transformers": ("5.9", "5.23")}
    assert support_table.read_table()["torchao"] == support_table.Row(("int8",), {}, (), "")  # not run yet
    assert path.read_text().startswith("before\n")
    assert path.read_text().endswith("\nafter\n")


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_case_that_did_not_pass_leaves_the_versions_as_they_were(outcome, page):
    _, versions = page
    support_table.write_table([("TRL", "DPO", "passed"), ("TRL", "KTO", "passed")])
    versions["transformers"] = "5.24.0"
    complaints = support_table.write_table([("TRL", "DPO", "passed"), ("TRL", "KTO", outcome)])
    assert complaints == ["TRL is as before: not passed in this run: KTO"]
    assert support_table.read_table()["TRL"].versions["transformers"] == ("5.23",)


def test_versions_of_other_cases_are_forgotten(page, monkeypatch):
    support_table.write_table([("TRL", "DPO", "passed"), ("TRL", "KTO", "passed")])
    monkeypatch.setattr(support_table, "marked_cases", lambda: {"TRL": ("DPO", "KTO", "GRPO")})
    support_table.write_table([])
    row = support_table.read_table()["TRL"]
    assert row == support_table.Row(("DPO", "KTO", "GRPO"), {}, (), "")


@pytest.mark.parametrize(
    "marker", ["('TRL', case)", "('TRL')", "()", "('Kubernetes', 'DPO')", "('TRL', 'a | b')"]
)
def test_a_marker_that_the_table_cannot_have_is_an_error(marker, tmp_path, monkeypatch):
    monkeypatch.setattr(support_table, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(
        f"import pytest\npytestmark = pytest.mark.supports{marker}\n"
    )
    with pytest.raises(ValueError, match=r"test_one\.py:2"):
        support_table.marked_cases()
