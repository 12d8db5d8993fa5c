"""Calls of a model: outputs, errors, and ownership of parameters."""

from __future__ import annotations

import pickle

import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.layers.model.head import LMHead

VOCAB = 61


@pytest.fixture
def model(make_model):
    return make_model(layers=1)


@pytest.fixture
def ids():
    return torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def test_logits_are_made_only_if_asked_for(model, ids):
    """With labels they are not made, in training and in evaluation."""
    for training in (True, False):
        model.train(training)
        assert list(model(ids)) == ["logits"]
        assert list(model(ids, labels=ids)) == ["loss"]
        assert list(model(ids, labels=ids, return_logits=True)) == ["loss", "logits"]
        assert list(model(ids, return_logits=False)) == []


def test_the_loss_is_the_same_with_and_without_a_graph_and_logits(model, ids):
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        assert torch.equal(model(ids, labels=ids).loss, loss)
        assert torch.equal(model(ids, labels=ids, return_logits=True).loss, loss)


def test_labels_may_have_any_integer_type(model, ids):
    assert torch.equal(model(ids, labels=ids.int()).loss, model(ids.int(), labels=ids).loss)


@pytest.mark.parametrize("outside", [-1, VOCAB, -100, 1 << 40])
def test_an_id_outside_the_vocabulary_is_named(outside, model, ids):
    ids[1, 3] = outside
    for call in ({}, {"labels": torch.zeros_like(ids)}):
        with pytest.raises(DataError, match=f"the id {outside}.*vocabulary of {VOCAB}: expected 0 to 60"):
            model(ids, **call)


@pytest.mark.parametrize("count", [0, -1, float("nan")])
def test_a_count_of_items_that_no_loss_can_be_divided_by_is_refused(count, model, ids):
    with pytest.raises(DataError, match=f"num_items_in_batch must be above 0, found {count}"):
        model(ids, labels=ids, num_items_in_batch=count)


def test_ids_and_labels_that_no_kernel_takes_are_refused(model, ids):
    with pytest.raises(DataError, match=r"input_ids must be integers, int64 or int32.*uint8"):
        model(ids.to(torch.uint8))
    with pytest.raises(DataError, match=r"labels must be integers, int64 or int32.*bool"):
        model(ids, labels=ids.bool())
    with pytest.raises(TypeError, match=r"must be a tensor of token ids.*found str; encode text"):
        model("text")


@pytest.mark.parametrize("outside", [-1, VOCAB, -101])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_a_label_outside_the_vocabulary_is_named(name, outside, model, ids):
    labels = ids.clone()
    labels[1, 3] = outside
    with pytest.raises(DataError, match=f"the label {outside}.*vocabulary of {VOCAB}: .* or -100"):
        model(ids, **{name: labels})


def test_a_batch_without_labels_is_refused_unless_their_count_is_given(model, ids):
    nothing = torch.full_like(ids, -100)
    first_only = nothing.clone()
    first_only[:, 0] = 5  # no token predicts the first one
    for labels in (nothing, first_only):
        with pytest.raises(DataError, match="no token of the batch has a label"):
            model(ids, labels=labels)
    loss = model(ids, labels=nothing, num_items_in_batch=9).loss
    assert loss == 0
    loss.backward()
    assert all(not p.grad.any() for p in model.parameters())


def test_a_batch_of_single_tokens_has_no_label(model):
    with pytest.raises(DataError, match="no token of the batch has a label"):
        model(torch.ones(4, 1, dtype=torch.long), labels=torch.ones(4, 1, dtype=torch.long))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        (
            {"input_ids": torch.ones(1, 2).long(), "inputs_embeds": torch.ones(1, 2, 32)},
            "either input_ids or inputs_embeds",
        ),
        ({"input_ids": torch.ones(3).long()}, r"\[batch, seq\], found torch.int64 of shape \(3,\)"),
        ({"input_ids": torch.ones(1, 3)}, "must be integers.*found torch.float32"),
        ({"input_ids": torch.ones(0, 3).long()}, r"holds no token: its shape is \(0, 3\)"),
        ({"input_ids": torch.ones(2, 0).long()}, r"holds no token: its shape is \(2, 0\)"),
        ({"inputs_embeds": torch.ones(2, 0, 32)}, "holds no token"),
        ({"inputs_embeds": torch.ones(2, 3, 31)}, r"\[batch, seq, 32\], found \(2, 3, 31\)"),
        (
            {"input_ids": torch.ones(1, 3).long(), "labels": torch.ones(1, 4).long()},
            r"\(1, 3\); found torch.int64 of shape \(1, 4\)",
        ),
        ({"input_ids": torch.ones(1, 3).long(), "labels": torch.ones(1, 3)}, "labels must be integers"),
        (
            {
                "input_ids": torch.ones(1, 3).long(),
                "labels": torch.ones(1, 3).long(),
                "shift_labels": torch.ones(1, 3).long(),
            },
            "either labels or shift_labels",
        ),
        ({"input_ids": torch.ones(1, 65).long()}, "position 64 is beyond"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(call, message, model):
    with pytest.raises(DataError, match=message):
        model(**call)


def test_a_token_depends_on_no_later_token_and_on_no_other_document(model, ids):
    before = model(ids).logits
    changed = ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % VOCAB
    after = model(changed).logits
    assert torch.equal(before[0, :4], after[0, :4])
    assert (before[0, 4:] != after[0, 4:]).any(-1).all()
    assert torch.equal(before[1], after[1])
    cu_seqlens = torch.tensor([0, 5, 14])
    before, after = (model(x, cu_seqlens=cu_seqlens).logits.flatten(0, 1) for x in (ids, changed))
    assert torch.equal(before[5:], after[5:])


def test_parameters_are_counted_once(make_model):
    tied, untied = make_model(tied=True), make_model(tied=False)
    embedding = VOCAB * 32
    assert untied.num_parameters() - tied.num_parameters() == embedding
    assert untied.num_parameters() == sum(p.numel() for p in untied.parameters())
    assert untied.num_parameters() - untied.num_parameters(exclude_embeddings=True) == embedding
    untied.embed_tokens.requires_grad_(False)
    assert untied.num_parameters() - untied.num_parameters(only_trainable=True) == embedding


def test_a_tied_state_dict_has_one_entry_and_loads(make_model, ids):
    source, target = make_model(tied=True), make_model(tied=True)
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    state = source.state_dict()
    assert "lm_head.weight" not in state
    target.load_state_dict(state)
    assert target.lm_head.weight is target.embed_tokens.weight
    assert torch.equal(target(ids).logits, source(ids).logits)


def test_fresh_weights_are_made_where_and_as_the_spec_says(make_model):
    with torch.device("meta"):
        model = make_model(tied=True)
    model.materialize("cpu", torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    model.reset_parameters(torch.Generator().manual_seed(0))
    assert model.lm_head.weight is model.embed_tokens.weight
    for name, p in model.named_parameters():
        if "norm" in name:
            assert p.eq(1).all(), name
        elif name.endswith("bias"):
            assert p.eq(0).all(), name
        else:
            # the standard deviation of n normal numbers has an error of 1 / sqrt(2 n); allow five
            assert p.std().item() == pytest.approx(0.02, rel=5 / (2 * p.numel()) ** 0.5), name


def test_outputs_are_indexed_and_unpacked_as_in_transformers(model, ids):
    call = {"labels": ids, "return_logits": True, "output_hidden_states": True}
    output = model(ids, **call)
    assert list(output) == ["loss", "logits", "hidden_states"]
    assert output[0] is output["loss"] is output.loss
    assert output[:2] == (output.loss, output.logits)
    assert output.to_tuple()[-1] is output.hidden_states
    loss, logits, hidden_states = model(ids, **call, return_dict=False)
    assert torch.equal(loss, output.loss)
    assert torch.equal(logits, output.logits)
    assert all(map(torch.equal, hidden_states, output.hidden_states))
    assert model(ids)[0].shape == (2, 7, VOCAB)
    with pytest.raises(IndexError):
        model(ids)[1]


@pytest.mark.parametrize("level", ["all", "lean", "mlp", "checkpoint", "tiled", "offload"])
def test_hidden_states_carry_gradients_at_every_level(level, make_model, ids):
    """A loss on each of them, weighted, so that one which is missing or exchanged changes the gradients."""
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0

    def run(level):
        model = make_model(layers=2, activation_memory=level)
        output = model(ids, labels=ids, attention_mask=mask, output_hidden_states=True)
        for hidden in output.hidden_states:
            hidden.retain_grad()
        weighted = [(1 + i) * hidden.pow(2).mean() for i, hidden in enumerate(output.hidden_states)]
        (output.loss + sum(weighted)).backward()
        found = [*output.hidden_states, *(hidden.grad for hidden in output.hidden_states)]
        return [*found, *(p.grad for p in model.parameters())]

    plain = make_model(layers=2)(ids, labels=ids, attention_mask=mask)
    with_hidden = make_model(layers=2)(ids, labels=ids, attention_mask=mask, output_hidden_states=True)
    assert len(with_hidden.hidden_states) == 3
    torch.testing.assert_close(plain.loss, with_hidden.loss, rtol=1e-6, atol=0)  # sums in another order
    for one, other in zip(run(level), run("all"), strict=True):
        # float32, recomputed: 1e-5 of the largest, as everywhere
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_labels_and_all_that_follows_are_given_by_name(make_model, ids):
    """By position, transformers' second argument would be taken for ours."""
    with pytest.raises(TypeError, match="positional"):
        make_model()(ids, torch.ones_like(ids))


@pytest.mark.parametrize("name", ["lables", "use_cache", "output_attentions", "past_key_values"])
def test_a_keyword_that_asks_for_what_is_not_there_is_refused_by_name(name, make_model, ids):
    with pytest.raises(TypeError, match=name):
        make_model()(ids, **{name: True})
    make_model()(ids, **{name: None}, return_dict=True)


def test_a_call_that_is_not_to_be_causal_is_refused(make_model, ids):
    """In transformers that lets tokens see ahead: a False that asks for something."""
    make_model()(ids, is_causal=True)
    with pytest.raises(TypeError, match="is_causal"):
        make_model()(ids, is_causal=False)


@pytest.mark.parametrize("count", [0, -3, 0.0, float("nan")])
@pytest.mark.parametrize("form", [float, torch.tensor])
def test_a_count_of_items_that_is_not_above_zero_is_refused(form, count, make_model, ids):
    with pytest.raises(DataError, match="num_items_in_batch must be above 0, found"):
        make_model()(ids, labels=ids, num_items_in_batch=form(count))


def test_a_count_of_items_in_16_bits_is_refused(make_model, ids):
    """257 labels are 256 in bfloat16: mixed precision casts the arguments of a sharded model."""
    with pytest.raises(DataError, match=r"bfloat16.*tensor of integers"):
        make_model()(ids, labels=ids, num_items_in_batch=torch.tensor(257.0).bfloat16())


PACKED = {
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 3, 7, 7, 12, 14], dtype=torch.int32)},
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])},
}


@pytest.mark.parametrize("form", PACKED)
def test_a_count_that_may_hold_the_labels_of_documents_first_tokens_is_refused(form, make_model, ids):
    """As transformers' Trainer counts: two of these four documents begin within a row."""
    model, packed = make_model(), PACKED[form]
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[0, 3] = starts[1, 5] = True
    counted = (ids[:, 1:] != -100).sum()
    with pytest.raises(DataError, match="first tokens of 2 packed documents have labels"):
        model(ids, labels=ids, num_items_in_batch=counted, **packed)
    mean = model(ids, labels=ids, **packed).loss
    masked = ids.masked_fill(starts, -100)
    counted = (masked[:, 1:] != -100).sum()
    bound = {"rtol": 1e-6, "atol": 0}  # float32: the same sum, divided by the same count
    torch.testing.assert_close(
        model(ids, labels=masked, num_items_in_batch=counted, **packed).loss, mean, **bound
    )
    torch.testing.assert_close(
        model(ids, labels=ids, num_items_in_batch=int(counted), **packed).loss, mean, **bound
    )


def test_a_token_before_a_hole_in_the_mask_is_not_trained_on_the_one_behind_it(make_model, ids):
    model = make_model()
    mask = torch.ones_like(ids)
    mask[0, 3] = mask[1, :2] = 0
    loss = model(ids, labels=ids, attention_mask=mask).loss
    labels = ids.masked_fill(mask == 0, -100)
    logits = model(ids, attention_mask=mask).logits
    targets = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # float32, sums in another order


@pytest.mark.parametrize("assign", [False, True])
def test_a_tied_head_stays_tied_when_a_state_is_loaded(assign, make_model):
    model = make_model(tied=True)
    state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, state["embed_tokens.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_goes_through_a_pickle_whole(tied, make_model, ids):
    """As processes that are spawned get it."""
    model = make_model(tied=tied)
    again = pickle.loads(pickle.dumps(model))
    assert (again.lm_head.weight is again.embed_tokens.weight) == tied
    assert torch.equal(again(ids, labels=ids).loss, model(ids, labels=ids).loss)


def test_an_output_is_made_again_from_a_mapping(make_model, ids):
    """As accelerate makes one when it converts outputs to float32."""
    output = make_model()(ids, labels=ids, return_logits=True)
    again = type(output)({name: value.double() for name, value in output.items()})
    assert type(again) is type(output)
    assert list(again) == ["loss", "logits"]
    assert again.loss.dtype == torch.float64
    assert again.loss == output.loss.double()


def test_checkpointing_options_that_would_be_ignored_are_refused(make_model):
    model = make_model()
    for options in (
        {"every_n_layers": 0},
        {"activation_checkpointing_kwargs": {"context_fn": 1}},
    ):
        with pytest.raises(ValueError, match="only use_reentrant, preserve_rng_state, every_n_layers"):
            model.activation_checkpointing_enable(**options)
    model.activation_checkpointing_enable({"use_reentrant": True}, every_n_layers=2)
    assert model.activation_memory == ("checkpoint", "lean", "checkpoint")
    assert model.is_gradient_checkpointing
    model.activation_checkpointing_enable(offload=True)
    assert model.activation_memory == ("offload",) * 3
    assert model.is_gradient_checkpointing
    model.activation_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["narrow", "wide"])
def test_a_head_in_float32_rounds_no_logit(dtype):
    """Its weight may be wider than the hidden states."""
    head = LMHead(24, VOCAB, float32=True).to(dtype)
    hidden = torch.randn(5, 24).bfloat16().requires_grad_()
    labels = torch.randint(VOCAB, (5,))
    logits = hidden.detach().float() @ head.weight.detach().float().mT
    assert torch.equal(head(hidden), logits)
    found = head(hidden, labels)
    wide = [x.detach().float().requires_grad_() for x in (hidden, head.weight)]
    expected = torch.nn.functional.cross_entropy(wide[0] @ wide[1].mT, labels)
    torch.testing.assert_close(found, expected)
    for gradient, truth in zip(
        torch.autograd.grad(found, [hidden, head.weight]), torch.autograd.grad(expected, wide), strict=True
    ):
        # rounded once at the end
        torch.testing.assert_close(gradient.float(), truth, rtol=2**-8, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(hidden).dtype == torch.bfloat16
