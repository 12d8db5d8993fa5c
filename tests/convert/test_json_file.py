"""A key that a JSON file names twice is refused, since readers differ in the value that they take."""

import re

import pytest

from liger_models.convert.checkpoints.adapter import ADAPTER_CONFIG, LowRankAdapter
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.convert.json_file import parse_json

READERS = {
    "config.json": (HFConfig.load, ConfigError),
    ADAPTER_CONFIG: (LowRankAdapter.open, CheckpointError),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"model_type": "llama", "hidden_size": 4, "hidden_size": 8}', "hidden_size"),
        ('{"model_type": "llama", "model_type": "llama"}', "model_type"),  # equal values are no excuse
        ('{"model_type": "llama", "rope_scaling": {"factor": 2, "factor": 4}}', "factor"),
        (r'{"model_type": "llama", "hidden_size": 4, "hidden\u005fsize": 8}', "hidden_size"),
    ],
)
def test_a_duplicate_key_is_refused_with_its_file_and_name(tmp_path, name, text, key):
    (tmp_path / name).write_text(text)
    read, error = READERS[name]
    with pytest.raises(error, match=rf"{re.escape(str(tmp_path / name))}: names '{key}' twice"):
        read(tmp_path)


def test_equal_keys_of_different_objects_are_no_duplicates():
    text = b'{"model_type": "a", "b": {"model_type": "c"}, "d": [{"e": 1}, {"e": 1}]}'
    assert parse_json(text, "it")["b"] == {"model_type": "c"}
