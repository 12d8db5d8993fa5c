"""Attention within chunks against the reference, with given positions or padded prompts. (Temperature tuning
of queries would differ there: the reference uses a token's place in its row as its position.)
"""

from __future__ import annotations

import pytest
import torch
from pairs import spec_of

from liger_models.architectures.common.model import CHUNKED, FULL
from liger_models.convert.errors import ConfigError
from liger_models.generating.generation import generate

NEW = 24  # spans three chunks of 7


@pytest.fixture(scope="module")
def steady(request):
    """Llama 4 without temperature tuning of queries."""
    make_pair = request.getfixturevalue("make_pair")
    return make_pair("llama4_text", {"attn_temperature_tuning": False})


@pytest.mark.parametrize("positions", [torch.arange(5, 24), 2 * torch.arange(19)], ids=["later", "jumping"])
def test_chunks_are_counted_from_the_first_token_whatever_its_position(positions, steady, failures):
    options = {"position_ids": positions.expand(2, 19), "attention_mask": torch.ones(2, 19, dtype=torch.long)}
    assert not failures(steady.distances(**steady.batch(), **options))


def test_chunks_of_padded_prompts_begin_after_the_padding(steady):
    ids = torch.randint(0, steady.vocab_size, (3, 9))
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [8]])).long()
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = steady.reference.generate(ids, attention_mask=mask, **options)
    assert torch.equal(generate(steady.ours, ids, NEW, attention_mask=mask), expected)


def test_temperature_tuning_is_a_flag_that_older_configs_give_as_a_number():
    assert spec_of("llama4_text", {"attn_temperature_tuning": 4}) == spec_of("llama4_text")
    off = spec_of("llama4_text", {"attn_temperature_tuning": 0})
    assert off == spec_of("llama4_text", {"attn_temperature_tuning": False}) != spec_of("llama4_text")
    with pytest.raises(ConfigError, match="attn_temperature_tuning must be true or false, found 'yes'"):
        spec_of("llama4_text", {"attn_temperature_tuning": "yes"})


def test_without_a_chunk_size_layers_attend_to_everything():
    """As in transformers 5.24; earlier ones fail."""
    assert spec_of("llama4_text", {"attention_chunk_size": None}) == spec_of(
        "llama4_text", {"layer_types": [FULL] * 3}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention_chunk_size": None, "layer_types": [CHUNKED] * 3},
            "type chunked_attention, but attention_chunk_size is missing",
        ),
        ({"moe_layers": [1, 3]}, r"moe_layers must be a list of numbers of the 3 layers, found \[1, 3\]"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers must have a 0 or a 1 for each of the 3 layers"),
    ],
)
def test_inconsistent_settings_of_layers_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_of("llama4_text", changes)
