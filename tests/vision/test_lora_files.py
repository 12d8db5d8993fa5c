"""Adapters that `--lora` trains on each part of a vision-language model are PEFT's on transformers' own."""

from __future__ import annotations

import pytest
from adapter_files import compare_with_peft
from scenes import DOCUMENTS

peft = pytest.importorskip("peft")


@pytest.mark.of_layers
def test_adapters_of_all_linear_layers_are_those_of_peft(pair, tmp_path):
    compare_with_peft(pair, pair.scene(*DOCUMENTS.values()), tmp_path)
