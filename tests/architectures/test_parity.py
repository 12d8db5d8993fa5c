"""Logits, loss and every gradient match transformers, for every registered family and its variants."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from pairs import (
    RefusedByReference,
    Run,
    changed,
    reference_class,
    reference_config,
    relative_distance,
    spec_of,
)
from representatives import representatives
from variants import (
    OF_LAYERS,
    ROPES_IN_TURN,
    accepts,
    first_that_rotates_like,
    left_out,
    nulls,
    rope_types,
    skipped,
    tied_if_possible,
    together,
    untried_keys,
    usual,
    variants,
)

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import DataError
from liger_models.layers.specs import BlockIndexerSpec, RecurrentSpec

of_layers = pytest.mark.of_layers


def every(table, mark_of=lambda family, name: None):
    """(family, changes) of every entry of every family's table, with its mark if it has one."""
    return [
        pytest.param(family, changes, id=f"{family}-{name}", marks=mark_of(family, name) or ())
        for family in list_architectures()
        for name, changes in table(family).items()
    ]


def mark_of_variant(family, name):
    """The usual variants are compared in one config, and registrations' own of one name, such as "in groups",
    in the first two families that have it: by day in families that together have every setting.
    """
    if name in OF_LAYERS:
        return of_layers
    in_one = name in usual(family) and together(family)
    if in_one or family in families_with(name)[2:]:
        return of_layers("alone")
    return None if name == "as_is" else of_layers("settings")


@functools.cache
def families_with(name):
    """The families whose registrations have a variant of a name."""
    return [f for f in list_architectures() if name in find_architecture(f).variants]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *every(variants, mark_of_variant),
        *every(lambda family: {"together": together(family)} if together(family) else {}, mark_of_variant),
    ],
)
def test_every_variant_agrees(family, changes, make_pair, failures, all_families):
    """A variant shows how the family's config is read, for which logits and loss suffice. Gradients of the
    layers are compared in the tiny config, and in every variant of the families that have all layers.
    """
    pair = make_pair(family, changes)
    if changes and not all_families and family not in representatives():
        assert not failures(pair.forward_distances())
    else:
        assert not failures(pair.distances(**pair.batch()))


def mark_of_rope(family, name):
    """Families read rope types with common code: some have them all, and others one in turn."""
    in_turn = ROPES_IN_TURN[list_architectures().index(family) % 5]
    own = in_turn if in_turn in rope_types(family) else "default"
    return of_layers("rotations" if name != own else "settings")


@pytest.mark.parametrize(("family", "spellings"), every(rope_types, mark_of_rope))
def test_every_rope_type_agrees_in_both_spellings(family, spellings, make_pair, failures):
    """The older spelling gives the same spec; logits are compared if the reference reads it differently.
    Gradients are compared in the first of the families that rotate queries and keys in the same way.
    """
    pair, old = make_pair(family, spellings["rope_parameters"]), spellings["rope_scaling"]
    if first_that_rotates_like(family) == family:
        assert not failures(pair.distances(**pair.batch()))
    else:
        assert not failures(pair.forward_distances())
    assert spec_of(family, old) == pair.ours.spec
    configs = (pair.config, changed(pair.architecture.tiny, old))
    new_read, old_read = (reference_config(pair.architecture, config).to_dict() for config in configs)
    if old_read != new_read:
        assert not failures(make_pair(family, old).forward_distances())


@of_layers("settings")
def test_a_missing_or_null_key_has_the_meaning_it_has_in_the_reference(family, make_pair, failures):
    """Its meaning is a value that the reference's config states for it and that gives the same spec; or else
    logits are compared. Each reading is compared once: several changes may be the same config to us and to
    the reference, or the same as a variant, which the tests above compare.
    """
    found = {}
    compared = [readings(family, changes) for changes in variants(family).values()]
    for what, table in {"absent": left_out, "null": nulls}.items():
        for key, changes in table(family):
            with contextlib.suppress(RefusedByReference):  # such as null for a number
                reading = readings(family, changes)
                if reading not in compared and not is_stated(family, key, *reading):
                    found[what, key] = failures(make_pair(family, changes).forward_distances())
                    compared.append(reading)
    wrong = {f"{what}:{key}": distances for (what, key), distances in found.items() if distances}
    assert not wrong, f"read differently than by the reference; state its default in `defaults`: {wrong}"


def is_stated(family, key, spec, theirs):
    """Whether the reference's config states a value of a key, from which we read the same spec."""
    stated = theirs.get(key)
    return stated is not None and accepts(family, {key: stated}) and spec_of(family, {key: stated}) == spec


def readings(family, changes):
    """Our spec, and the config as a dictionary with the reference's defaults."""
    architecture = find_architecture(family)
    try:
        theirs = reference_config(architecture, changed(architecture.tiny, changes)).to_dict()
        return spec_of(family, changes), theirs
    except Exception as error:  # an error of any type is a refusal
        raise RefusedByReference(str(error)) from error


@of_layers("settings")
def test_every_key_that_a_family_reads_has_an_effect_in_one_of_its_configs(family):
    """Otherwise a wrong reading would go unnoticed."""
    untried = untried_keys(family)
    assert not untried, f"no tiny config shows the effect of {untried}; add a variant that does"


@of_layers("head")
@pytest.mark.parametrize(("pad", "tied"), [(5, True), (-1, False)])
def test_the_padding_row_has_the_gradient_of_the_reference(pad, tied, family, make_pair, failures):
    """The lookup gives it no gradient, a tied head does. If padding is the end token, every batch has it."""
    tied = tied_if_possible(family, tied)
    pair = make_pair(family, {"pad_token_id": pad, "tie_word_embeddings": tied})

    def draw():
        batch = pair.batch()
        batch["input_ids"][:, ::3] = pad % pair.vocab_size
        return batch

    assert not failures(pair.distances(**pair.clear(draw)))


@of_layers("head")
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_padding_row_is_zero_if_it_is_in_the_reference(tied, family):
    """It is like every other row if the reference's embedding has no padding row."""
    architecture = find_architecture(family)
    tied = tied_if_possible(family, tied)
    tiny = changed(architecture.tiny, {"pad_token_id": 5, "tie_word_embeddings": tied})
    reference = reference_class(architecture)(reference_config(architecture, tiny))
    expected = reference.get_input_embeddings().weight.any(dim=1)
    expected[5] &= family not in DRAWN
    weight = liger_models.from_config(tiny).embed_tokens.weight
    assert torch.equal(weight.any(dim=1), expected[: len(weight)])


DRAWN = {"modernbert-decoder"}  # whose reference draws the row of padding, too

DOCUMENTS = {"cu_seqlens": torch.tensor([0, 7, 26, 38])}
MIXED = ["mlp", "checkpoint", "lean@host"] * 6  # by layer


@pytest.mark.parametrize(
    ("packing", "levels"),
    [
        pytest.param({}, [MIXED], marks=of_layers, id="rows"),
        pytest.param(DOCUMENTS, ["all", "mlp", "checkpoint"], marks=of_layers("tokens"), id="packed"),
    ],
)
def test_every_level_of_activation_memory_gives_the_same_bits(packing, levels, pair):
    call = pair.clear(lambda: {**pair.batch(), **packing})
    expected = pair.run_ours(**call)
    try:
        for level in levels:
            pair.ours.set_activation_memory(level if level != MIXED else MIXED[: len(pair.ours.layers)])
            found = pair.run_ours(**call)
            assert torch.equal(found.loss, expected.loss)
            assert found.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                assert torch.equal(found.gradients[name], gradient), (level, name)
    finally:
        pair.ours.set_activation_memory("lean")


@of_layers("head")
def test_logits_without_labels_agree_and_carry_gradients(pair, failures):
    ids = pair.batch()["input_ids"]
    cotangent = torch.randn(*ids.shape, pair.vocab_size)
    assert not failures(pair.distances(input_ids=ids, cotangent=cotangent))


@of_layers("tokens")
def test_a_single_token_agrees(pair, failures):
    ids = pair.batch(rows=3, length=1)["input_ids"]
    call = {"input_ids": ids, "cotangent": torch.randn(3, 1, pair.vocab_size)}
    ours, reference = pair.run_ours(**call), pair.run_reference(**call)
    largest = max(gradient.norm() for gradient in reference.gradients.values())
    for name, gradient in reference.gradients.items():
        if not gradient.count_nonzero():  # of queries and keys: the softmax of one score is always 1
            assert ours.gradients.pop(name).norm() < 1e-5 * largest
    for name in ours.gradients.keys() - reference.gradients.keys():  # of keys of several tokens
        assert not ours.gradients.pop(name).count_nonzero()
    reference.gradients = {name: reference.gradients[name] for name in ours.gradients}
    assert not failures(ours.distances(reference))


@of_layers("head")
@pytest.mark.parametrize("keep", [3, torch.tensor([0, 5, 17])], ids=["last_three", "by_index"])
def test_logits_to_keep_selects_the_same_positions(keep, pair, failures):
    ids = pair.batch()["input_ids"]
    cotangent = torch.randn(2, 3, pair.vocab_size)
    assert not failures(pair.distances(input_ids=ids, logits_to_keep=keep, cotangent=cotangent))


@of_layers("head")
@pytest.mark.parametrize("count", [53, torch.tensor(53)], ids=["int", "tensor"])
def test_num_items_in_batch_divides_the_loss(count, pair, failures):
    assert not failures(pair.distances(**pair.batch(), num_items_in_batch=count))


@of_layers("head")
def test_shifted_labels_agree(pair, failures):
    batch = pair.batch()
    shifted = torch.randint(0, pair.vocab_size, batch["labels"].shape)
    shifted[:, 4] = -100
    ours = pair.run_ours(input_ids=batch["input_ids"], shift_labels=shifted)
    reference = pair.run_reference(**batch, shift_labels=shifted)  # it requires labels too, but ignores them
    assert not failures(ours.distances(reference))


@of_layers("head")
def test_embeddings_in_place_of_ids_agree(pair, failures):
    """Embeddings together with ids, for layers with per-id inputs."""
    batch = pair.batch()
    given = batch if pair.ours.needs_ids else {"labels": batch["labels"]}
    call = pair.clear(
        lambda: {"inputs_embeds": torch.randn(2, 19, pair.hidden_size, requires_grad=True), **given}
    )
    distances = pair.distances(**call)
    assert "inputs_embeds" in distances
    assert not failures(distances)


@of_layers("tokens")
def test_given_position_ids_agree(family, pair, failures):
    if skipped(family, "positions", "given"):
        pytest.skip(find_architecture(family).skip["positions:given"])
    positions = torch.arange(19) + torch.tensor([[5], [31]])
    assert not failures(pair.distances(**pair.clear(lambda: {**pair.batch(), "position_ids": positions})))


@of_layers("tokens")
def test_position_ids_may_skip_numbers_if_a_mask_is_given(family, pair, failures):
    if skipped(family, "positions", "given"):
        pytest.skip(find_architecture(family).skip["positions:given"])
    positions = (2 * torch.arange(19))[None].expand(2, 19)
    given = {"position_ids": positions, "attention_mask": torch.ones(2, 19, dtype=torch.long)}
    assert not failures(pair.distances(**pair.clear(lambda: {**pair.batch(), **given})))


@of_layers("tokens")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_tokens(side, pair, failures):
    mask, call = padded(pair, side)
    ours, reference = pair.run_ours(**call), reference_of_padded(pair, mask, call)
    assert not failures(ours.distances(reference, positions=mask))
    assert ours.logits[~mask].count_nonzero() == 0


@of_layers("tokens")
def test_padding_between_tokens_is_refused_with_windows_and_recurrent_layers(pair, failures):
    """The reference's positions count padding, too."""
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[0, 5:9] = mask[1, 12:14] = mask[1, 0] = 0
    call = {"input_ids": pair.batch()["input_ids"], "attention_mask": mask}
    spec = pair.ours.spec
    shorter = [m for block in spec.blocks for m in block.mixers if windowed(m)]
    shorter += [m for block in spec.blocks for m in block.mixers if counts_padding(m, spec)]
    with (
        torch.no_grad(),
        pytest.raises(DataError, match="19 places") if shorter else contextlib.nullcontext(),
    ):
        ours = pair.ours(**call).logits[mask.bool()]
        theirs = pair.reference(**call, use_cache=False).logits[mask.bool()]
        assert not failures({"logits": relative_distance(ours, theirs)})
    mask[0, 5:9] = mask[1, 12:14] = 1
    pair.ours(**call)


def counts_padding(mixer, spec):
    return getattr(mixer, "slopes", None) is not None and spec.padding_has_positions


def windowed(mixer):
    limits = (getattr(mixer, name, None) or 19 for name in ("window", "chunk"))
    in_blocks = isinstance(getattr(mixer, "indexer", None), BlockIndexerSpec)
    return in_blocks or isinstance(mixer, RecurrentSpec) or min(limits) < 19


with_router_loss = pytest.mark.parametrize(
    "family", [f for f in list_architectures() if "output_router_logits" in find_architecture(f).tiny]
)


@of_layers
@with_router_loss
def test_the_router_loss_of_packed_documents_equals_that_of_padded_rows(family, make_pair, failures):
    pair = make_pair(family, {"output_router_logits": True})
    lengths = [7, 1, 11]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    call = pair.clear(lambda: {**pair.batch(rows=1), "cu_seqlens": bounds})
    ids = call["input_ids"][0]
    ours = pair.run_ours(**{**call, "labels": ids[None]})
    padded, mask = (torch.zeros(3, 11, dtype=torch.long) for _ in range(2))
    for row, document in enumerate(ids.split(lengths)):
        padded[row, : len(document)], mask[row, : len(document)] = document, 1
    labels = padded.masked_fill(mask == 0, -100)
    reference = pair.run_reference(input_ids=padded, labels=labels, attention_mask=mask)
    ours.logits = reference.logits = None
    assert not failures(ours.distances(reference))


@of_layers
@with_router_loss
def test_a_divided_step_has_the_mean_of_the_router_losses(family, make_pair, failures):
    """Each part is weighted by its number of labels, as in the mean of the reference's losses."""
    pair = make_pair(family, {"output_router_logits": True})
    batch = pair.batch(rows=3)
    batch["labels"][0, 2:] = -100
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    assert counts[0] < counts[1] / 10
    results = []
    for model, options in ((pair.ours, {"num_items_in_batch": sum(counts)}), (pair.reference, {})):
        model.zero_grad()
        loss = torch.zeros(())
        for part, count in zip(parts, counts, strict=True):
            share = model(**part, **options).loss * (1 if options else count / sum(counts))
            share.backward()
            loss += share.detach()
        results.append(loss)
    gradients = {name: p.grad for name, p in pair.reference.named_parameters() if p.grad is not None}
    expected = Run(results[1], None, gradients)
    assert not failures(Run(results[0], None, pair.gradients_of_ours()).distances(expected))


@of_layers
@with_router_loss
def test_the_router_loss_excludes_padding(family, make_pair, failures):
    pair = make_pair(family, {"output_router_logits": True})
    mask, call = padded(pair, "left")
    ours, reference = pair.run_ours(**call), reference_of_padded(pair, mask, call)
    assert not failures(ours.distances(reference, positions=mask))


def padded(pair, side):
    """Mask of the tokens, and a call with rows of three lengths."""
    mask = torch.ones(3, 19, dtype=torch.bool)
    for row, padding in enumerate((0, 6, 11)):
        mask[row, slice(0, padding) if side == "left" else slice(19 - padding, 19)] = False
    call = pair.clear(lambda: {**pair.batch(rows=3), "attention_mask": mask.long()})
    for row, padding in enumerate((0, 6, 11)):
        # In the reference a padding token predicts the first token after it. Ours does not, so that label
        # is excluded.
        call["labels"][row, padding if side == "left" else 0] = -100
    call["labels"][~mask] = -100
    return mask, call


def reference_of_padded(pair, mask, call):
    """The reference of padded rows; with the padding moved to their ends if its layers count padding."""
    if not skipped(pair.architecture.model_type, "padding", "left"):
        return pair.run_reference(**call)
    order = mask.long().argsort(dim=1, descending=True, stable=True)
    moved = {key: value.gather(1, order) for key, value in call.items()}

    def run():
        found = pair.run_reference(**moved)
        back = order.argsort(dim=1)[..., None].expand_as(found.logits)
        return Run(found.loss, found.logits.gather(1, back), found.gradients)

    return Run.repeatable(run)


@of_layers("head")
def test_a_padding_token_predicts_nothing(pair):
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[:, :4] = 0
    batch = pair.batch()
    unlabelled = batch["labels"].clone()
    unlabelled[:, 4] = -100
    batch["labels"][:, 4] = batch["input_ids"][:, 4]
    with_label = pair.ours(**batch, attention_mask=mask).loss
    without = pair.ours(batch["input_ids"], labels=unlabelled, attention_mask=mask).loss
    assert with_label == without


@of_layers("tokens")
@pytest.mark.parametrize("form", ["cu_seqlens", "position_ids"])
def test_packed_documents_agree_with_documents_run_alone(form, pair, failures):
    lengths = [7, 1, 11, 12, 7]  # two rows of 19; in the reference's form no document spans two rows
    if form == "cu_seqlens":
        packing = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    else:
        positions = torch.cat([torch.arange(length) for length in lengths])
        packing = {"position_ids": positions.view(2, 19)}
    call = pair.clear(lambda: {**pair.batch(), **packing})
    ids = call["input_ids"]
    call["labels"] = labels = ids.clone()
    labels[0, 2] = -100
    ours = pair.run_ours(**call)
    assert not failures(ours.distances(pair.run_reference_by_document(ids, labels, lengths)))


@of_layers("tokens")
def test_documents_may_span_rows_and_be_empty(pair, failures):
    lengths = [0, 25, 0, 13, 0]
    call = pair.clear(lambda: {**pair.batch(), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)})
    ours = pair.run_ours(**call)
    expected = pair.run_reference_by_document(call["input_ids"], call["labels"], lengths)
    assert not failures(ours.distances(expected))
