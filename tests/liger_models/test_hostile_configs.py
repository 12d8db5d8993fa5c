"""A config.json that cannot match its weights is refused before any model is built."""

import json

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import CheckpointError, ConfigError, LigerModelsError

SHAPE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    liger_models.from_config(SHAPE, dtype=torch.float32, device="cpu").save_pretrained(folder)
    return folder


@pytest.fixture
def load_with(checkpoint, tmp_path):
    """Factory that loads the checkpoint with changed config keys, given as JSON text to allow any number."""

    def load(**changes):
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        for file in checkpoint.iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).symlink_to(file)
        texts = {key: json.dumps(value) for key, value in SHAPE.items()} | changes
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(
            "{" + ",".join(f'"{key}":{text}' for key, text in texts.items()) + "}"
        )
        return liger_models.from_hub(folder)

    return load


def test_the_unchanged_config_loads(load_with):
    assert load_with().num_parameters() > 0


@pytest.mark.parametrize("layers", [10**5, 10**9, 10**400], ids=["1e5", "1e9", "1e400"])
def test_more_layers_than_tensors_are_refused_within_a_second(within_a_second, load_with, layers):
    load_with()  # triggers lazy imports
    with within_a_second(), pytest.raises(ConfigError, match="num_hidden_layers must be at most 21") as error:
        load_with(num_hidden_layers=str(layers))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("layers", [10**5, 10**9])
def test_an_impossible_depth_is_refused_without_weights_too(layers):
    with pytest.raises(ConfigError, match="num_hidden_layers must be"):
        liger_models.from_config(SHAPE | {"num_hidden_layers": layers}, device="meta")


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1" + "0" * 5000, str(2**62), str(2**63), str(2**31)])
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "initializer_range",
    ],
)
def test_huge_numbers_raise_clear_errors(load_with, key, value):
    small = len(value) < 100
    if small and key in ("rms_norm_eps", "rope_theta", "initializer_range"):
        return  # ordinary numbers
    with pytest.raises(LigerModelsError) as error:
        load_with(**{key: value})
    assert len(str(error.value)) < 1000
    assert small or key in str(error.value) or "not valid JSON" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("rms_norm_eps", "1" + "0" * 30, "rms_norm_eps must be a finite number of 0 or more, below 2"),
        ("rms_norm_eps", "1e300", "rms_norm_eps must be a finite number of 0 or more, below 2"),
        ("rope_theta", "1e308", "rope_theta of .* must be a number"),
        ("rope_scaling", '{"type": "linear", "factor": 1' + "0" * 30 + "}", "factor of rope_scaling must be"),
        ("partial_rotary_factor", "1e308", "must be a number"),
        ("partial_rotary_factor", "1.5", "partial_rotary_factor of .* must be at most 1, found 1.5"),
    ],
)
def test_impossible_numbers_are_refused(load_with, key, value, error):
    with pytest.raises(ConfigError, match=error):
        load_with(**{key: value})


def test_a_partial_rotary_factor_above_one_is_refused():
    tiny = find_architecture("glm").tiny
    for share in (1.5, 1e308):
        rope = tiny["rope_parameters"] | {"partial_rotary_factor": share}
        with pytest.raises(ConfigError, match="partial_rotary_factor of rope_parameters must be"):
            liger_models.from_config(tiny | {"rope_parameters": rope}, device="meta")


def test_a_duplicate_key_is_refused(checkpoint, tmp_path):
    """Python keeps the last value, other readers the first."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(
            (checkpoint / name).read_bytes() if (checkpoint / name).exists() else b"{}"
        )
    liger_models.from_hub(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "eos_token_id": 2}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: names 'eos_token_id' twice"):
        liger_models.from_hub(tmp_path).special_id("eos_token_id")
    text = json.dumps(SHAPE | {"rope_theta": 1e4})
    (tmp_path / "config.json").write_text(text[:-1] + ', "rope_theta": 5e5}')
    with pytest.raises(ConfigError, match=r"config\.json: names 'rope_theta' twice"):
        liger_models.from_hub(tmp_path)
    (tmp_path / "config.json").write_text(text[:-1] + ', "rope_parameters": {"factor": 1, "factor": 2}}')
    with pytest.raises(ConfigError, match=r"config\.json: names 'factor' twice"):
        liger_models.from_hub(tmp_path)


def test_sizes_whose_product_overflows_raise_clear_errors(load_with):
    most = str(2**31 - 1)
    with pytest.raises((ConfigError, CheckpointError), match=r"other shapes|cannot be laid out"):
        load_with(vocab_size=most, hidden_size=str(2**31 - 16), intermediate_size=most)


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"\udfff": 1}', r'["x\ud800"]'])
def test_text_that_cannot_be_printed_is_refused(load_with, text):
    with pytest.raises(ConfigError, match="holds half of a surrogate pair") as error:
        load_with(architectures=text)
    str(error.value).encode()
