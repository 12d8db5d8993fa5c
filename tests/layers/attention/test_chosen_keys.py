"""Attention to chosen keys: all keys, and refusals."""

from dataclasses import replace

import pytest
import torch

from liger_models.kernels.invariant.mode import batch_invariant
from liger_models.layers.attention.backends import attend
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec

SPEC = AttentionSpec(2, 2, 4, 0.5)
TOKENS = 40
CHOSEN = torch.full((TOKENS, 3), -1, dtype=torch.int32)


def operands():
    return [torch.randn(TOKENS, 2, 4) for _ in range(3)]


@pytest.mark.parametrize("backend", ["masked", "eager", "auto"])
def test_all_keys_chosen_is_attention_to_all_keys(backend):
    """By "auto" with sinks, which masks do not support."""
    sequences, inputs = Sequences.of_lengths([13, 27], torch.device("cpu")), operands()
    spec, sinks = (replace(SPEC, sinks=True), torch.randn(2)) if backend == "auto" else (SPEC, None)
    expected = attend(*inputs, spec, sequences, "eager", sinks)
    found = attend(*inputs, spec, sequences, backend, sinks, chosen=CHOSEN)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_other_limits_backends_and_modes_are_refused():
    sequences, inputs = Sequences.of_lengths([TOKENS], torch.device("cpu")), operands()
    for change in (
        {"window": 3},
        {"chunk": 8},
        {"softcap": 1.0},
        {"causal": False},
        {"slopes": (1.0, 2.0)},
        {"dropout": 0.1},
    ):
        with pytest.raises(ValueError, match="chosen keys need causal attention"):
            attend(*inputs, replace(SPEC, **change), sequences, chosen=CHOSEN)
    with pytest.raises(ValueError, match="'sdpa' does not support chosen keys"):
        attend(*inputs, SPEC, sequences, "sdpa", chosen=CHOSEN)
    with batch_invariant(), pytest.raises(ValueError, match="depends on the batch"):
        attend(*inputs, SPEC, sequences, chosen=CHOSEN)
