"""What the README shows can be typed as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models.cli import build_parser

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_every_command_is_understood():
    commands = re.findall(r"^    liger-models (.+)$", README, re.MULTILINE)
    parser = build_parser()
    shown = {parser.parse_args(shlex.split(command, comments=True)).command for command in commands}
    assert shown == {"list", "init", "inspect", "verify", "train", "export", "generate"}


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_every_piece_of_python_runs(block, monkeypatch, tmp_path):
    def tiny(name, dtype, device):
        return liger_models.from_config(liger_models.architectures.find_architecture("llama").tiny)

    monkeypatch.setattr(liger_models, "from_hub", tiny)  # no hub and no GPU here
    monkeypatch.chdir(tmp_path)
    exec(block, {"batches": [torch.randint(131, (2, 8)) for _ in range(2)]})


def test_every_family_is_listed():
    listed = set(re.findall(r"\| `(\w+)` \|$", README, re.MULTILINE))
    assert listed == set(liger_models.list_architectures())


def test_the_memory_table_is_what_inspect_shows(capsys):
    from liger_models.cli import main

    main(["inspect", "llama-3.1-8b"])
    shown = dict(re.findall(r"^  (\w+)\s+([\d.]+ kB)  ", capsys.readouterr().out, re.MULTILINE))
    table = dict(re.findall(r"^\| `(\w+)`.*? \| ([\d.]+ kB) \|", README, re.MULTILINE))
    assert table == shown
    assert len(table) == 4
