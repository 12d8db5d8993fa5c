"""transformers' `generate`, with its caches, produces the reference's tokens."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from hf_pairs import BOUND, relative_distance

from liger_models.convert.errors import DataError

transformers = pytest.importorskip("transformers")

NEW = 12  # together with the prompt, longer than the windows of the tiny configs
WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "no_cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams_static": {"num_beams": 3, "cache_implementation": "static"},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "chunked_prompt": {"prefill_chunk_size": 4},
}

FAMILIES = "llama", "gemma2", "gpt_oss", "llama4_text", "mistral4", "gemma4_text", "qwen3_next", "lfm2"


@pytest.fixture
def prompts():
    """Two prompts, the second padded on the left."""
    ids = torch.randint(3, 131, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask


def generate(model, ids, mask, **options):
    if model.config.model_type == "llama4_text" and "cache_implementation" in options:
        from transformers.masking_utils import create_chunked_causal_mask

        if "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
            pytest.skip("this transformers fails where its own Llama 4 has a static cache")
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=not options.get("num_beams"),
        **options,
    )


def assert_same_tokens(found, expected):
    """Compare greedy tokens; the two likeliest tokens always differ by more than rounding."""
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.logits or (), expected.logits or (), strict=True):
        assert relative_distance(ours, theirs) <= BOUND


def skip_where_the_reference_fails(way):
    """Skip chunked attention with a static cache."""
    takes = inspect.signature(transformers.masking_utils.create_chunked_causal_mask).parameters
    if "static" in way and "block_sequence_ids" not in takes:
        pytest.skip("this transformers makes no masks of chunks for a static cache")


@pytest.mark.supports(
    "transformers", "generate with dynamic, static and sliding caches", "beams", "prompt lookup"
)
@pytest.mark.parametrize(
    ("family", "way"),
    [
        (family, way)
        for i, family in enumerate(FAMILIES)
        for j, way in enumerate(WAYS)
        if way in ("dynamic", "static") or (i + j) % 3 == 0
    ],
)
def test_tokens_equal_the_references(family, way, make_both, prompts):
    if family == "llama4_text":
        skip_where_the_reference_fails(way)
    # In Llama 4, the reference counts left padding in the position that scales queries.
    both = make_both(family, **({"attn_temperature_tuning": False} if family == "llama4_text" else {}))
    ids, mask = prompts
    if way == "prompt_lookup":  # accepts a single prompt
        ids, mask = ids[:1], mask[:1]
        if both.ours._is_stateful:  # such models cannot roll back a token
            with pytest.raises(ValueError, match="not supported with stateful models"):
                generate(both.ours, ids, mask, **WAYS[way])
            return
    expected, found = (generate(m, ids, mask, **WAYS[way]) for m in (both.reference, both.ours))
    assert_same_tokens(found, expected)


@pytest.mark.parametrize("way", [way for way in WAYS if "beams" not in way])
def test_queries_scaled_by_position_continue_with_the_cache(way, make_both, prompts):
    skip_where_the_reference_fails(way)
    both = make_both("llama4_text")
    ids, mask = (x[:1] for x in prompts)  # without padding
    expected, found = (generate(m, ids, mask, **WAYS[way]) for m in (both.reference, both.ours))
    assert_same_tokens(found, expected)


@pytest.mark.supports("transformers", "assisted generation")
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_an_assistant_changes_no_token(family, make_both, prompts):
    both = make_both(family)
    ids, mask = (x[:1] for x in prompts)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = both.ours.generate(ids, attention_mask=mask, **options)
    assistant = type(both.ours).from_pretrained(both.folder).eval()
    with torch.no_grad():  # an assistant that is often wrong
        assistant.lm_head.weight.add_(0.05 * torch.randn(assistant.lm_head.weight.shape))
    found = both.ours.generate(ids, attention_mask=mask, assistant_model=assistant, **options)
    assert torch.equal(found, alone)


@pytest.mark.parametrize(
    ("family", "padding"),
    [("gemma2", 4), ("gemma2", 8), ("qwen3_next", 2), ("qwen3_next", 8), ("lfm2", 4), ("lfm2", 8)],
)
def test_a_cache_is_filled_call_by_call(family, padding, make_both, prompts):
    """Padding ends in the first call or in the second."""
    both = make_both(family)
    ids, mask = prompts
    mask[1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = both.ours(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        first = both.ours(ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6])
        rest = both.ours(
            ids[:, 6:],
            attention_mask=mask,
            position_ids=positions[:, 6:],
            past_key_values=first.past_key_values,
        )
    assert first.past_key_values.get_seq_length() == 11
    found = torch.cat([first.logits, rest.logits], 1)
    assert relative_distance(found[mask.bool()], whole[mask.bool()]) <= BOUND


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("mamba2", way) for way in ("dynamic", "no_cache", "beams")),
        *((family, "dynamic") for family in ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")),
        *((family, "dynamic") for family in ("falcon_mamba", "jamba", "mamba")),
    ],
)
def test_tokens_of_models_with_state_spaces_are_those_of_the_reference(family, way, make_both, prompts):
    """Of one without attention, whose cache transformers names `cache_params`, and of the others."""
    # Token by token, transformers' plain form does not bound time steps.
    both = make_both(family, **({"time_step_min": 1e-9} if family == "nemotron_h" else {}))
    expected, found = (generate(m, *prompts, **WAYS[way]) for m in (both.reference, both.ours))
    assert_same_tokens(found, expected)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_cache_of_states_alone_is_filled_call_by_call(family, make_both, prompts):
    """Which the reference's Mamba is not: it starts each call of several tokens from zeros."""
    ours = make_both(family).ours
    ids, mask = prompts
    with torch.no_grad():
        whole = ours(ids, attention_mask=mask, use_cache=False).logits
        first = ours(ids[:, :6], attention_mask=mask[:, :6])
        rest = ours(ids[:, 6:], attention_mask=mask, cache_params=first.cache_params)
        found = torch.cat([first.logits, rest.logits], 1)
        assert relative_distance(found[mask.bool()], whole[mask.bool()]) <= BOUND
        del first.cache_params.tokens_so_far
        with pytest.raises(DataError, match="filled by another model"):
            ours(ids[:, :1], cache_params=first.cache_params)


PACKED = [5, 1, 5]


@pytest.mark.parametrize(
    "packing",
    [
        {"position_ids": torch.cat([torch.arange(length) for length in PACKED])[None]},
        {"cu_seq_lens_q": torch.tensor([0, *PACKED]).cumsum(0)},
    ],
    ids=["position_ids", "cu_seq_lens_q"],
)
def test_packed_documents_stay_separate_without_gradients(packing, make_both, prompts):
    """Without gradients a cache is created by default, but not for packed documents."""
    model, ids = make_both("llama").ours, prompts[0][:1]
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in ids.split(PACKED, 1)], 1)
        found = model(ids, **packing)
        hidden = model.model(ids, **packing).last_hidden_state
    assert found.past_key_values is None
    assert relative_distance(found.logits, expected) <= BOUND
    assert relative_distance(model.lm_head(hidden), expected) <= BOUND
    for asked in ({"use_cache": True}, {"past_key_values": transformers.DynamicCache(config=model.config)}):
        with torch.no_grad(), pytest.raises((DataError, TypeError), match=r"several documents|cu_seq_lens_q"):
            model(ids, **packing, **asked)


def test_with_a_mask_positions_with_gaps_are_one_document(make_both, prompts):
    model, ids = make_both("llama").ours, prompts[0][:1]
    call = {"position_ids": 2 * torch.arange(11)[None], "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        found, expected = model(ids, **call), model(ids, **call, use_cache=False)
    assert found.past_key_values.get_seq_length() == 11
    assert relative_distance(found.logits, expected.logits) <= BOUND


@pytest.mark.parametrize("shape", [(2, 5), (2, 10), (1, 11)], ids=str)
def test_with_a_cache_a_mask_of_only_the_new_tokens_is_refused(shape, make_both, prompts):
    """transformers would apply such a mask to the first tokens."""
    model, ids = make_both("llama").ours, prompts[0]
    with torch.no_grad():
        cache = model(ids[:, :6]).past_key_values
        with pytest.raises(DataError, match=r"cover all tokens so far, \[2, 11\]"):
            model(ids[:, 6:], past_key_values=cache, attention_mask=torch.ones(shape))


def test_classes_that_generate_have_generation_mixin_as_a_direct_base(hf):
    """Tools look for GenerationMixin there."""
    for family in ("llama", "gemma3"):
        assert transformers.GenerationMixin in hf.classes_of(family).causal_lm.__bases__
        assert transformers.GenerationMixin not in hf.classes_of(family).base.__bases__


def decode(model, ids, steps=4, **first):
    """Decode greedily in a loop that passes the cache along, as users write it."""
    output, tokens = model(ids, **first), []
    for _ in range(steps):
        tokens.append(output.logits[:, -1:].argmax(-1))
        output = model(tokens[-1], past_key_values=output.past_key_values)
    return torch.cat(tokens, 1)


@pytest.mark.parametrize(
    ("call", "family"),
    [
        *((call, "llama") for call in ("gradients", "labels", "training", "checkpointing", "asked for")),
        ("labels", "gemma2"),
        ("training", "deepseek_v3"),
    ],
)
def test_a_loop_without_no_grad_attends_to_all_tokens(call, family, make_both, prompts):
    model, ids = make_both(family).ours, prompts[0]
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[:, 11:]
    first = {}
    if call in ("labels", "asked for"):
        first["labels"] = ids
    if call == "checkpointing":
        model.gradient_checkpointing_enable()
    if call in ("training", "asked for"):
        model.train()
    if call == "asked for":
        first |= {"use_cache": True, "return_logits": True}
    assert torch.equal(decode(model, ids, **first), expected)


def test_a_training_step_fills_a_cache_only_on_request(make_both, prompts):
    model, ids = make_both("llama").ours.train(), prompts[0]
    for calls in ({"labels": ids}, {"labels": ids, "use_cache": None}):
        cache = model(ids, **calls).past_key_values
        with pytest.raises(DataError, match=r"training step.*use_cache=True"):
            model(ids[:, :1], past_key_values=cache)
    assert model(ids, labels=ids, use_cache=True).past_key_values.get_seq_length() == 11
    assert model(ids, labels=ids, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(ids, labels=ids).past_key_values is None
    model.config.use_cache = True
    model.gradient_checkpointing_enable()
    cache = model(ids).past_key_values
    with pytest.raises(DataError, match=r"training step.*use_cache=True"):
        model(ids[:, :1], past_key_values=cache)


def test_gradients_pass_through_a_cache(make_both, prompts):
    model, ids = make_both("gemma2").ours, prompts[0]
    whole = model(ids, use_cache=False).logits[:, 6:]
    first = model(ids[:, :6])
    parts = model(ids[:, 6:], past_key_values=first.past_key_values).logits
    expected, found = (
        torch.autograd.grad(x.square().mean(), list(model.parameters())) for x in (whole, parts)
    )
    assert max(map(relative_distance, found, expected)) <= BOUND


def test_a_cache_takes_gradients_and_is_refused_under_checkpointing(make_both, prompts):
    """Prefix tuning does this."""
    model = make_both("llama").ours.train()
    ids, _ = prompts
    prefix = torch.randn(2, 2, 5, 16, requires_grad=True)  # [batch, heads, tokens, dim]

    def loss():
        cache = transformers.DynamicCache(config=model.config)
        for layer in range(model.config.num_hidden_layers):
            cache.update(prefix, prefix, layer)
        return model(ids, labels=ids, past_key_values=cache).loss

    (gradient,) = torch.autograd.grad(loss(), [prefix])
    assert gradient.any()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="cannot recompute layers that fill a cache"):
        loss()


def test_a_cache_of_keys_and_values_alone_is_refused_by_recurrent_layers(make_both, prompts):
    """Prefix tuning makes one."""
    model, cache = make_both("granitemoehybrid").ours, transformers.DynamicCache()
    keys = torch.randn(2, 2, 5, 16)
    for layer in range(model.config.num_hidden_layers):
        cache.update(keys, keys, layer)
    with pytest.raises(DataError, match="recurrent, and the cache holds 5 tokens without its state"):
        model(prompts[0], past_key_values=cache)


def test_a_call_frees_its_cache_without_the_garbage_collector(make_both, batch):
    model = make_both("llama").ours
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            cache = weakref.ref(model(batch["input_ids"]).past_key_values)
        assert cache() is None
    finally:
        gc.enable()
