"""The choice of pools, by the definition: one query and one pool at a time."""

from __future__ import annotations

import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.kernels.attention.chosen_blocks import blocks_mask
from liger_models.layers.parts.gated_pools import GatedPoolIndexer
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedPoolsSpec, LatentAttentionSpec

HIDDEN, LENGTHS = 16, [11, 2, 13, 9]
SPEC = LatentAttentionSpec(2, 8, 0, 8, 12, 0.3, 10, indexer=GatedPoolsSpec(24, 6, 3, 2))


@pytest.fixture
def indexer():
    torch.manual_seed(0)
    made = GatedPoolIndexer(HIDDEN, SPEC).double()
    for p in made.parameters():
        p.normal_()
    return made


@torch.no_grad()
def expected(indexer, x, q_latent):
    """The keys that each token of one document attends to, [T, T]."""
    seen = torch.zeros(len(x), len(x), dtype=torch.bool)
    keys, gates = indexer.k_norm(indexer.wk(x)), x @ indexer.index_kpool_compress_gate.mT
    for place in range(len(x)):
        scores = []
        for pool in range((place + 1) // 3):
            own = slice(3 * pool, 3 * pool + 3)
            key = ((gates[own] + indexer.index_kpool_compress_ape).softmax(0) * keys[own]).sum(0)
            heads = indexer.wq_b(q_latent[place]).view(24, 6) @ key * 6**-0.5
            scores.append((heads.relu() @ indexer.weights_proj(x[place])).item())
        for pool in sorted(range(len(scores)), key=scores.__getitem__)[-2:]:
            seen[place, 3 * pool : 3 * pool + 3] = True
        seen[place, (place + 1) // 3 * 3 : place + 1] = True
    return seen


def test_packed_documents_choose_pools_by_themselves(indexer):
    x, q_latent = torch.randn(sum(LENGTHS), HIDDEN).double(), torch.randn(sum(LENGTHS), 10).double()
    sequences = Sequences.of_lengths(LENGTHS, torch.device("cpu"))
    chosen = indexer(x, q_latent, indexer.keys(x, sequences), sequences)
    found = blocks_mask(chosen, sequences.documents.bounds(), len(x))[0]
    found &= torch.ones_like(found).tril()
    parts = zip(x.split(LENGTHS), q_latent.split(LENGTHS), strict=True)
    assert torch.equal(found, torch.block_diag(*(expected(indexer, *part) for part in parts)))
    short = Sequences.of_lengths([8] * 4, torch.device("cpu"))  # two whole pools at most
    assert indexer(x[:32], q_latent[:32], indexer.keys(x[:32], short), short) is None
    tree = Sequences.from_call(
        (1, 35), torch.device("cpu"), cu_seqlens=torch.tensor([0, 20, 35]), parents=torch.tensor([-1, 0])
    )
    with pytest.raises(DataError, match="attends to 2 chosen pools of 3 keys, which documents of"):
        indexer(x, q_latent, indexer.keys(x, tree), tree)


def test_cached_tokens_are_chosen_alike_wherever_a_sequence_begins(indexer):
    """Two rows, the second with four slots of padding before it; the last five tokens are new."""
    tokens, new, before = 17, 5, (0, 4)
    x, q_latent = torch.randn(2, tokens, HIDDEN).double(), torch.randn(2, tokens, 10).double()
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[-new:].repeat(2, 1, 1)
    mask[1, :, : before[1]] = False
    sequences = Sequences.of_lengths([tokens], torch.device("cpu"))
    keys = torch.stack([indexer.keys(row, sequences) for row in x])
    last = x[:, -new:].flatten(0, 1), q_latent[:, -new:].flatten(0, 1)
    found = indexer.of_cached(*last, keys, mask, sequences)
    for row, start in enumerate(before):
        of_row = expected(indexer, x[row, start:], q_latent[row, start:])[-new:]
        assert torch.equal(found[row, :, start:], of_row)
        assert not found[row, :, :start].any()
