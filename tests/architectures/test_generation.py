"""Greedy decoding gives the text of transformers, the cache does not change it, and sampling draws from the
right distribution.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from pairs import spec_of
from variants import skipped

from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import DataError
from liger_models.generating import decoding, generation
from liger_models.generating.generation import generate

NEW = 16  # after a prompt of 9: three times most windows of the tiny configs, longer than all of them


def reference_text(pair, ids, mask=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options}
    mask = torch.ones_like(ids) if mask is None else mask
    return pair.reference.generate(ids, attention_mask=mask, **options)


def prompts(pair, rows=3, length=9):
    return torch.randint(0, pair.vocab_size, (rows, length))


@pytest.mark.of_layers("tokens")
def test_greedy_decoding_gives_the_text_of_the_reference(pair):
    ids = prompts(pair)
    assert torch.equal(generate(pair.ours, ids, NEW), reference_text(pair, ids, pad_token_id=0))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_tied_or_untied_head_gives_the_text_of_the_reference(tied, make_pair):
    """One family suffices: all have the same head, whose logits test_parity.py compares, tied and not."""
    pair = make_pair("llama", {"tie_word_embeddings": tied})
    ids = prompts(pair)
    assert torch.equal(generate(pair.ours, ids, NEW), reference_text(pair, ids, pad_token_id=0))


LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("rope", "positions"), [(LONGROPE | FACTORS, 64), ({"rope_type": "dynamic", "factor": 3.0}, 16)]
)
def test_the_cache_changes_nothing_if_rotary_tables_depend_on_the_length(rope, positions, side, make_pair):
    """The text crosses the length beyond which all keys, earlier ones too, are rotated by other angles."""
    settings = {"rope_theta": 500.0, **rope}
    pair = make_pair("llama", {"rope_parameters": settings, "max_position_embeddings": positions})
    ids = prompts(pair, rows=2)
    mask = torch.ones_like(ids)
    if side != "none":
        mask[1] = torch.arange(9) >= 4 if side == "left" else torch.arange(9) < 5
    found = generate(pair.ours, ids, 14, attention_mask=mask)
    for _ in range(14):
        positions = mask.cumsum(1) - 1  # in the sequence without its padding
        logits = pair.ours(ids, attention_mask=mask, position_ids=positions).logits
        last = (mask * torch.arange(mask.shape[1])).argmax(1)
        ids = torch.cat([ids, logits[torch.arange(2), last].argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    assert torch.equal(found, ids)


@pytest.mark.of_layers("tokens")
def test_greedy_tokens_under_autocast_are_the_likeliest_up_to_rounding(pair):
    """Keys are in bfloat16, weights in float32."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ids = generate(pair.ours, prompts(pair), NEW)
        logits = pair.ours(ids).logits[:, 8:-1].float()
    chosen = logits.gather(-1, ids[:, 9:, None])[..., 0]
    # Logits of the order of 3, rounded about ten times by 2^-9 in each of the two passes.
    assert (logits.amax(-1) - chosen).max() < 3 * 20 * 2**-9


@pytest.mark.of_layers("tokens")
def test_greedy_decoding_of_padded_prompts_gives_the_text_of_the_reference(family, pair):
    if skipped(family, "positions", "given"):
        pytest.skip(find_architecture(family).skip["positions:given"])
    ids = prompts(pair)
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [8]])).long()
    found = generate(pair.ours, ids, NEW, attention_mask=mask)
    assert torch.equal(found, reference_text(pair, ids, mask, pad_token_id=0))


@pytest.mark.of_layers("tokens")
def test_prompts_may_be_padded_on_either_side(pair):
    ids = prompts(pair, rows=2)
    right = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    found = generate(pair.ours, ids, NEW, attention_mask=right)
    alone = generate(pair.ours, ids[1:, :5], NEW)
    assert torch.equal(found[1, 9:], alone[0, 5:])


def cache_of(family):
    """Kind of the caches: the types of token mixers, and whether windows or chunks limit them."""
    return frozenset(
        (type(mixer), *(bool(getattr(mixer, limit, None)) for limit in ("window", "chunk")))
        for block in spec_of(family).blocks
        for mixer in block.mixers
    )


# The end of a sequence concerns only the decoding loop and its caches.
first_with_its_cache = pytest.mark.parametrize(
    "family", {cache_of(name): name for name in reversed(list_architectures())}.values()
)


@first_with_its_cache
def test_a_sequence_ends_with_one_of_the_end_tokens(pair):
    assert_ends_as_the_reference(pair, several=True)


def test_a_sequence_ends_with_a_single_end_token(shared_pair):
    """One family suffices: layers do not depend on end tokens."""
    assert_ends_as_the_reference(shared_pair("llama"), several=False)


def assert_ends_as_the_reference(pair, several):
    ids = prompts(pair)
    unbounded = generate(pair.ours, ids, NEW)[:, 9:]
    ends = [unbounded[0, 4].item(), unbounded[1, 7].item()]
    ends = ends if several else ends[0]
    pad = next(i for i in range(pair.vocab_size) if i not in unbounded)
    found = generate(pair.ours, ids, NEW, eos_token_id=ends, pad_token_id=pad)
    assert torch.equal(found, reference_text(pair, ids, eos_token_id=ends, pad_token_id=pad))
    assert (found[0] == pad).any() or found.shape[1] < 9 + NEW


@first_with_its_cache
def test_generation_stops_when_all_sequences_have_ended(pair):
    ids = prompts(pair, rows=1)
    text = generate(pair.ours, ids, NEW)[0, 9:]
    first_end = text.tolist().index(text[5])
    found = generate(pair.ours, ids, NEW, eos_token_id=text[5].item())
    assert found.shape[1] == 9 + first_end + 1


@pytest.mark.of_layers("tokens")
def test_cached_logits_equal_those_of_one_pass_over_the_text(pair, monkeypatch):
    cached_steps = []
    choose = generation._choose
    monkeypatch.setattr(
        generation, "_choose", lambda logits, *rest: (cached_steps.append(logits), choose(logits, *rest))[1]
    )
    ids, lengths = prompts(pair), [9, 6, 1]
    mask = (torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]).long()
    text = generate(pair.ours, ids, NEW, attention_mask=mask)
    cached = torch.stack(cached_steps, dim=1)  # [batch, new, V]
    for row, length in enumerate(lengths):
        with torch.no_grad():
            whole = pair.ours(text[row : row + 1, 9 - length :]).logits[0, length - 1 : -1]
        # float32 through three layers, attention in another order
        assert (cached[row] - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.of_layers("tokens")
def test_steps_in_their_recorded_form_generate_the_same_text(pair, monkeypatch):
    """With static buffers of ids, a cache with more visible slots than tokens, and states in fixed memory."""
    ids = prompts(pair)
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [8]])).long()
    expected = generate(pair.ours, ids, NEW, attention_mask=mask)
    monkeypatch.setattr(generation, "can_be_recorded", lambda model: True)
    monkeypatch.setattr(decoding, "LEAST_EXTENT", 8)  # exceeded at once, and again later
    memory, record = {}, decoding.Decoding._record

    def recorded(self):
        record(self)
        step, found = self._play, memory.setdefault(self.extent, set())

        def play():
            step()
            found.add(tuple(x.data_ptr() for x in _tensors_of(self.cache)))

        self._play = play

    monkeypatch.setattr(decoding.Decoding, "_record", recorded)
    assert torch.equal(generate(pair.ours, ids, NEW, attention_mask=mask), expected)
    assert [len(found) for found in memory.values()] == [1, 1]


def _tensors_of(cache):
    of_layers = [*cache.layers, *cache.recurrent, *(room.values() for room in cache.of_compressed.values())]
    return [x for tensors in of_layers for x in tensors if x is not None]


def test_recording_a_step_leaves_the_states_unchanged(shared_pair, monkeypatch):
    """Recording runs the step once before the first replay."""
    pair = shared_pair("qwen3_next")
    ids = prompts(pair)
    expected = generate(pair.ours, ids, NEW)
    monkeypatch.setattr(generation, "can_be_recorded", lambda model: True)
    monkeypatch.setattr(decoding, "LEAST_EXTENT", 8)
    kept = decoding.Decoding._states_kept

    @contextmanager
    def running_the_step(self):
        with kept(self):
            self._step(self.ids, self.slots, self.extent)
            yield

    monkeypatch.setattr(decoding.Decoding, "_states_kept", running_the_step)
    assert torch.equal(generate(pair.ours, ids, NEW), expected)


def test_tokens_after_the_end_of_all_sequences_are_cut_off():
    text = torch.tensor([[1, 7, 2, 9, 0, 0], [1, 8, 9, 0, 0, 0]])
    cut = generation._up_to_the_end
    assert cut(text, 1, torch.tensor([9])).tolist() == [[1, 7, 2, 9], [1, 8, 9, 0]]
    assert cut(text, 1, torch.tensor([9, 7])).tolist() == [[1, 7, 2], [1, 8, 9]]
    assert cut(text, 1, torch.tensor([7])).tolist() == text.tolist()


def test_a_draw_equals_that_of_torch_multinomial():
    logits = torch.randn(50, 30)
    ours = generation._choose(logits, 0.7, 1.0, 0, torch.Generator().manual_seed(3))
    theirs = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours, theirs[:, 0])


def test_min_p_excludes_the_same_tokens_as_transformers():
    transformers = pytest.importorskip("transformers")
    logits, draw = 3 * torch.randn(50, 30), torch.Generator().manual_seed(3)
    kept = transformers.MinPLogitsWarper(0.2)(None, logits / 0.7)
    ours = generation._choose(logits, 0.7, 1.0, 0, torch.Generator().manual_seed(3), 0.2)
    assert torch.equal(ours, torch.multinomial(kept.softmax(-1), 1, generator=draw)[:, 0])


def test_repetitions_are_penalised_as_in_transformers(shared_pair):
    pair = shared_pair("llama")
    ids = prompts(pair)
    found = generate(pair.ours, ids, NEW, repetition_penalty=3.0)
    assert torch.equal(found, reference_text(pair, ids, repetition_penalty=3.0))
    assert not torch.equal(found, generate(pair.ours, ids, NEW))


def test_a_callback_ends_sequences(shared_pair):
    pair = shared_pair("llama")
    ids = prompts(pair, rows=2)
    whole = generate(pair.ours, ids, NEW)
    steps = []

    def end(tokens):
        steps.append(tokens)
        return torch.tensor([len(steps) >= 2, len(steps) >= 4])

    found = generate(pair.ours, ids, NEW, on_token=end, pad_token_id=5)
    assert torch.equal(found[1], whole[1, : 9 + 4])
    assert found[0].tolist() == [*whole[0, : 9 + 2].tolist(), 5, 5]


@pytest.mark.gpu
def test_recorded_steps_on_a_gpu_generate_the_same_text_and_seldom_synchronize(pair, monkeypatch):
    model = copy.deepcopy(pair.ours).cuda()
    ids = prompts(pair).cuda()
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [8]])).long().cuda()
    monkeypatch.setattr(decoding, "LEAST_EXTENT", 8)
    played = []
    record = decoding.record
    monkeypatch.setattr(decoding, "record", lambda step: (played.append(0), record(step))[1])

    def text(new=NEW, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                made = generate(model, ids, new, attention_mask=mask, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return made, sum("synchronizing CUDA operation" in str(w.message) for w in caught)

    options = {"eos_token_id": -1}  # never generated, but checked for
    found, waits = text(**options)
    assert len(played) == 2  # for 16 slots and for 32
    assert waits <= text(9, **options)[1] + NEW // generation.LOOK_EVERY + len(played)
    monkeypatch.setattr(generation, "can_be_recorded", lambda model: False)
    expected, _ = text(**options)
    assert torch.equal(found, expected)
    ends = {"eos_token_id": expected[0, 9 + 5].item()}
    ended, _ = text(**ends)
    monkeypatch.undo()
    assert torch.equal(text(**ends)[0], ended)


@pytest.mark.of_layers("tokens")
def test_the_callback_receives_tokens_as_they_are_generated(pair):
    ids, received = prompts(pair), []
    text = generate(pair.ours, ids, 5, on_token=received.append)
    assert torch.equal(torch.stack(received, dim=1), text[:, 9:])


@pytest.mark.of_layers("tokens")
def test_generation_keeps_no_graph_and_training_can_continue(pair):
    ids = prompts(pair)
    generate(pair.ours, ids, 3)
    pair.ours(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in pair.ours.parameters() if p.requires_grad)


# -- sampling

DRAWS = 4000


def drawn_counts(pair, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Count how often each token is drawn after a prompt; return the counts and the model's logits."""
    ids = prompts(pair, rows=1, length=4)
    with torch.no_grad():
        logits = pair.ours(ids).logits[0, -1]
    text = generate(pair.ours, ids.expand(DRAWS, 4), 1, seed=0, **options)
    return text[:, -1].bincount(minlength=pair.vocab_size), logits.double()


def nucleus(probabilities: torch.Tensor, top_p: float) -> set[int]:
    """The smallest set of likeliest tokens whose probability reaches top_p, one token after the other."""
    chosen: set[int] = set()
    while sum(probabilities[i].item() for i in chosen) < top_p:
        chosen.add(max(set(range(len(probabilities))) - chosen, key=lambda i: probabilities[i].item()))
    return chosen


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 0.4, "top_k": 5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.4, "top_p": 0.6},
        {"temperature": 0.4, "top_p": 1e-6},
        {"temperature": 0.4, "top_k": 9, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 1000},
    ],
    ids=str,
)
def test_sampling_draws_from_the_right_distribution(options, make_pair):
    counts, logits = drawn_counts(make_pair("llama"), **options)
    probabilities = (logits / options["temperature"]).softmax(0)
    allowed = set(probabilities.topk(min(options.get("top_k") or len(logits), len(logits))).indices.tolist())
    kept = torch.zeros_like(probabilities)
    kept[list(allowed)] = probabilities[list(allowed)]
    allowed = nucleus(kept / kept.sum(), options["top_p"]) if "top_p" in options else allowed
    expected = torch.zeros_like(probabilities)
    expected[list(allowed)] = probabilities[list(allowed)]
    expected = DRAWS * expected / expected.sum()
    assert set(counts.nonzero()[:, 0].tolist()) <= allowed
    # The counts are binomial: five standard deviations, and one count for the rare tokens.
    assert ((counts - expected).abs() <= 5 * expected.sqrt() + 1).all()


def test_sampling_with_a_seed_is_reproducible_and_leaves_the_global_generator_alone(make_pair):
    pair = make_pair("llama")
    ids, options = prompts(pair), {"max_new_tokens": 8, "temperature": 1.0}
    state = torch.get_rng_state()
    first, again, other = (generate(pair.ours, ids, **options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())
    unseeded, next_unseeded = (generate(pair.ours, ids, **options) for _ in range(2))
    assert not torch.equal(unseeded, next_unseeded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "at least 1, found 0"),
        ({"temperature": -0.1}, "must not be negative, found -0.1"),
        ({"top_p": 0.0}, "above 0 and at most 1, found 0.0"),
        ({"top_p": 1.1}, "above 0 and at most 1, found 1.1"),
        ({"top_k": -1}, "must not be negative, found -1"),
    ],
)
def test_options_outside_their_range_are_refused(options, message, make_pair):
    pair = make_pair("llama")
    with pytest.raises(ValueError, match=message):
        generate(pair.ours, prompts(pair), **options)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (3,)], ids=str)
def test_prompts_without_tokens_are_refused(shape, make_pair):
    with pytest.raises(DataError, match=r"hold a token, found"):
        generate(make_pair("llama").ours, torch.zeros(shape, dtype=torch.long))


def test_an_empty_prompt_in_a_batch_is_refused(make_pair):
    pair = make_pair("llama")
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(DataError, match="prompt of the batch is empty"):
        generate(pair.ours, prompts(pair), 4, attention_mask=mask)


@pytest.mark.parametrize("shape", [(2, 4), (2, 12), (1, 9), (2, 1, 9, 9), (9,)], ids=str)
def test_a_mask_of_another_shape_than_the_prompts_is_refused(shape, make_pair):
    model = make_pair("llama").ours
    with pytest.raises(DataError, match=r"shape of the prompts, \(2, 9\)"):
        generate(model, torch.ones(2, 9, dtype=torch.long), 2, attention_mask=torch.ones(shape))


def test_more_positions_than_the_tables_hold_are_refused(make_pair):
    pair = make_pair("llama", {"max_position_embeddings": 32})
    assert generate(pair.ours, prompts(pair), 24).shape == (3, 33)  # the last token is not fed back
    with pytest.raises(DataError, match="position 32 is beyond"):
        generate(pair.ours, prompts(pair), 25)


@pytest.mark.parametrize("outside", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_named(outside, shared_pair):
    pair = shared_pair("llama")
    ids = prompts(pair)
    ids[1, 3] = outside
    with pytest.raises(DataError, match=f"the id {outside}, which is outside the vocabulary"):
        generate(pair.ours, ids, 1)


def test_a_temperature_of_nan_is_refused(shared_pair):
    pair = shared_pair("llama")
    with pytest.raises(ValueError, match="temperature must not be negative, found nan"):
        generate(pair.ours, prompts(pair), 1, temperature=float("nan"))
