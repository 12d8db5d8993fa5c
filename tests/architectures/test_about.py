"""What is said of a family is read off its docstring."""

import pytest

from liger_models.architectures import Architecture, find_architecture
from liger_models.architectures.about import About, about


def test_a_family_says_what_it_is_called_where_it_comes_from_and_what_it_is(family):
    words = about(find_architecture(family))
    assert all((words.name, words.source, words.traits))


def described(text):
    def build(c):
        raise NotImplementedError

    build.__doc__ = text
    return about(Architecture("x", build, "XForCausalLM", {}))


def test_the_first_sentence_is_taken_apart():
    found = described("""Ox 2 and 2.5 (Bo et al., 2024, arXiv:2401.12345; 2502.01234), text: with
    3.5 heads (three, or so). More of it.""")
    source = "Bo et al., 2024, arXiv:2401.12345; 2502.01234"
    papers = ("2401.12345", "2502.01234")
    assert found == About("Ox 2 and 2.5, text", source, papers, "with 3.5 heads (three, or so)")


@pytest.mark.parametrize("text", ["Ox 2: an ox.", "Ox 2 (Bo, 2024)."])
def test_a_docstring_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"begins with 'Ox 2.*expected 'NAME"):
        described(text)
