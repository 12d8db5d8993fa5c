"""Descriptions of families come from their docstrings, and their files are short."""

import inspect

import pytest

from liger_models.architectures import find_architecture, list_architectures
from liger_models.families import About, list_families, parse_about


def test_the_sources_describe_exactly_the_registered_families():
    registered = [
        find_architecture(name)
        for name in (*list_architectures(), *list_architectures(vision=True, audio=True))
    ]
    found = {f.model_type: (f.reference, f.vision, f.audio) for f in list_families()}
    assert found == {one.model_type: (one.reference, one.vision, one.audio) for one in registered}
    assert all(all((one.about.name, one.about.source, one.about.traits)) for one in list_families())


MOST_LINES = 80
LONGER = {
    "gemma4_text": "values that are keys, shared keys, inputs by layer, experts: each may be missing",
    "llama4_text": "chunks, layers without positions, scaled queries, experts: each with its own keys",
    "minimax_m3_vl_text": "indexers, clamped MLPs, experts: each with its own keys, and older names of them",
    "nemotron_h": "layers of four kinds, each with its own keys",
}


@pytest.mark.parametrize("family", [*list_architectures(), *list_architectures(vision=True, audio=True)])
def test_a_family_is_one_short_file(family):
    """Lines that only tests need, below the model, are not counted."""
    source = inspect.getsource(inspect.getmodule(find_architecture(family).build))
    model, mark, _ = source.partition("\n# -- tests\n")
    assert mark
    lines = model.count("\n")
    assert (lines > MOST_LINES) == (family in LONGER), f"{lines} lines"


@pytest.mark.parametrize("family", [*list_architectures(), *list_architectures(vision=True, audio=True)])
def test_a_family_has_a_tiny_config_and_states_whether_it_has_encoders(family):
    architecture = find_architecture(family)
    assert architecture.tiny["model_type"] == family
    encoded = ("text_config", "vision_config", "audio_config")
    assert architecture.multimodal == any(part in architecture.tiny for part in encoded)


def test_the_first_sentence_is_parsed():
    found = parse_about(
        """Ox 2 and 2.5 (Bo et al., 2024, arXiv:2401.12345; 2502.01234), text: with
    3.5 heads (three, or so). More of it.""",
        "ox.py",
    )
    source = "Bo et al., 2024, arXiv:2401.12345; 2502.01234"
    papers = ("2401.12345", "2502.01234")
    assert found == About("Ox 2 and 2.5, text", source, papers, "with 3.5 heads (three, or so)")


@pytest.mark.parametrize("text", ["Ox 2: an ox.", "Ox 2 (Bo, 2024)."])
def test_a_docstring_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"begins with 'Ox 2.*expected 'NAME"):
        parse_about(text, "ox.py")
