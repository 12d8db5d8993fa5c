"""The choice of blocks by mean keys at positions on three axes, by the definition: one query and one block
at a time.
"""

from __future__ import annotations

import pytest
import torch

from liger_models.kernels.attention.chosen_blocks import blocks_mask
from liger_models.layers.parts.pooled_indexer import PooledIndexer
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.positions import Positions
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec, NormSpec, PooledIndexerSpec, QKNormSpec, RopeSpec

HIDDEN, HEADS, DIM, SIZE, TOP = 16, 24, 10, 3, 2
AXES = (0, 1, 2, 0)
ROPE = RopeSpec(dim=8, theta=30.0, axes=AXES)
SPEC = AttentionSpec(
    *(2, 1, 8, 0.3, ROPE),
    qk_norm=QKNormSpec(NormSpec(offset=1.0)),
    indexer=PooledIndexerSpec(HEADS, DIM, SIZE, TOP),
)


@pytest.fixture
def indexer():
    torch.manual_seed(0)
    made = PooledIndexer(HIDDEN, SPEC).double()
    for p in made.parameters():
        p.normal_()
    return made


def places(tokens):
    """Positions [3, T], as of a picture between texts, with gaps."""
    return torch.cumsum(torch.randint(0, 4, (3, tokens)), 1)


def rotated(heads, position):
    """The first eight elements of heads [..., DIM] by the angles of a position [3]."""
    angle = position[list(AXES)] * 30.0 ** -(torch.arange(4).double() / 4)
    first, second, rest = heads.split([4, 4, DIM - 8], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


@torch.no_grad()
def expected(indexer, x, positions):
    """The keys that each token of one document attends to, [T, T]."""
    seen = torch.zeros(len(x), len(x), dtype=torch.bool)
    queries, keys = indexer.index_qk_proj(x).split([HEADS * DIM, DIM], -1)
    for place in range(len(x)):
        query = rotated(indexer.q_layernorm(queries[place].view(HEADS, DIM)), positions[:, place])
        scores = []
        for block in range((place + 1) // SIZE):
            own = slice(SIZE * block, SIZE * block + SIZE)
            key = rotated(indexer.k_layernorm(keys[own].mean(0)), positions[:, own.start])
            scores.append((query @ key * DIM**-0.5).relu().sum().item())
        for block in sorted(range(len(scores)), key=scores.__getitem__)[-TOP:]:
            seen[place, SIZE * block : SIZE * block + SIZE] = True
        seen[place, (place + 1) // SIZE * SIZE : place + 1] = True
    return seen


def test_packed_documents_choose_blocks_by_the_positions_of_their_first_tokens(indexer):
    lengths = [11, 2, 13, 9]
    x, positions = torch.randn(sum(lengths), HIDDEN).double(), places(sum(lengths))
    documents = Sequences.of_lengths(lengths, torch.device("cpu"))
    ids = documents.positions.ids
    sequences = Sequences(documents.visibility, Positions(ids, int(positions.max()) + 1, positions))
    sequences.prepare_rotary((ROPE,))
    chosen = indexer(*indexer.projected(x, sequences), sequences)
    found = blocks_mask(chosen, sequences.documents.bounds(), len(x))[0]
    found &= torch.ones_like(found).tril()
    parts = zip(x.split(lengths), positions.split(lengths, 1), strict=True)
    assert torch.equal(found, torch.block_diag(*(expected(indexer, *part) for part in parts)))


def test_cached_blocks_are_rotated_by_the_positions_of_their_first_tokens(indexer):
    """The first call has twelve tokens of two rows, at positions of their own, and the second has five."""
    rows, tokens, device = 2, 17, torch.device("cpu")
    x, positions = torch.randn(rows, tokens, HIDDEN).double(), [places(tokens) for _ in range(rows)]
    cache = KVCache([indexer.new_cache(rows, tokens, device, x.dtype)], rows, device)
    for new in (slice(0, 12), slice(12, 17)):
        count = new.stop - new.start
        ids = cache.reserve(torch.full((rows,), count), count)
        axes = torch.cat([row[:, new] for row in positions], 1)
        documents = Sequences.of_lengths([count] * rows, device)
        sequences = Sequences(documents.visibility, Positions(ids, int(axes.max()) + 1, axes), cache)
        sequences.prepare_rotary((ROPE,))
        queries, *kept = indexer.projected(x[:, new].flatten(0, 1), sequences)
        kept = cache.append(0, *kept)
    mask = cache.mask(0, None).unflatten(0, (rows, -1))[:, :, 0]
    found = indexer.of_cached(queries, kept, mask, sequences)
    for row in range(rows):
        assert torch.equal(found[row], expected(indexer, x[row], positions[row])[12:])
