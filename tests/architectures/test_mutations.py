"""The parity comparison notices faults: each of these, introduced into a native model, makes it fail.

The faults are derived from the family's spec, weight map and module tree (mutations.py). One that goes
unnoticed is a setting that the comparison does not test: the family needs a variant that does, or a reason in
its registration, `skip={"field:RopeSpec.truncate": "..."}`.
"""

from __future__ import annotations

import functools
import re

import pytest
from mutations import (
    Additions,
    form_at,
    is_noticed,
    norms,
    spec_fields,
    swapped,
    swaps,
    unnoticed_fields,
    without_norm,
)
from pairs import spec_of
from representatives import representatives
from variants import ROPE_FIELDS, first_that_rotates_like, rope_types, skipped, variants

from liger_models.architectures import find_architecture


@pytest.mark.of_layers
def test_without_a_fault_the_comparison_passes(pair):
    assert not is_noticed(pair)


@pytest.mark.of_layers
def test_another_value_of_any_field_of_the_spec_is_noticed(family, pair, make_pair, all_families):
    """Values are changed layer by layer in the tiny config; those unnoticed there are changed in a variant.
    Fields that an earlier family has in the same form, at the same place of its layers, are left to that one.
    Of families that rotate queries and keys in the same way, only the first tests the settings of rope types.
    """
    stated = {entry.removeprefix("field:") for entry in find_architecture(family).skip}
    tried = None if all_families else forms_of_earlier(family, stated)
    faults = unnoticed_fields(pair, tried=tried)
    missed = {fault: field for fault, field in faults.items() if not skipped(family, "field", field)}
    if first_that_rotates_like(family, None if all_families else representatives()) != family:
        missed = {fault: field for fault, field in missed.items() if field not in ROPE_FIELDS}
    noticed = fields_noticed_in_variants(family, pair, make_pair, set(missed.values()))
    unnoticed = [fault for fault, field in missed.items() if field not in noticed]
    assert not unnoticed, "\n".join(["change `tiny` or add a variant that notices:", *unnoticed])
    needless = {f"field:{field}" for field in set(values_by_field(pair.ours.spec)) - set(faults.values())}
    assert not needless & find_architecture(family).skip.keys()


def forms_of_earlier(family, stated):
    """The forms of earlier families' fields, except of those `stated` to go unnoticed here."""
    names = representatives()
    return set().union(*(forms_of(name) for name in names[: names.index(family)])) - {
        form for form, field in forms_of(family).items() if field in stated
    }


@functools.cache
def forms_of(family):
    spec = spec_of(family)
    return {form_at(spec, path): field for path, field, *_ in spec_fields(spec)}


def fields_noticed_in_variants(family, pair, make_pair, wanted):
    """Select the fields whose faults are all noticed in some variant that changes them."""
    usual = values_by_field(pair.ours.spec)
    ropes = {name: spellings["rope_parameters"] for name, spellings in rope_types(family).items()}
    noticed = set()
    for changes in [*variants(family).values(), *ropes.values()]:
        spec = spec_of(family, changes)
        fresh = {
            field: usual.get(field, set()) if values - usual.get(field, set()) else set()
            for field, values in values_by_field(spec).items()
            if field in wanted - noticed and values != usual.get(field)
        }
        if fresh:
            missed = unnoticed_fields(make_pair(family, changes), fresh)
            noticed |= fresh.keys() - set(missed.values())
    return noticed


def values_by_field(spec):
    values = {}
    for _, field, value, _ in spec_fields(spec):
        values.setdefault(field, set()).add(value)
    return values


@pytest.mark.of_layers("tokens")
def test_swapped_tensors_are_noticed(family, make_pair):
    """Tensors of equal shape are swapped within a native tensor, within a layer or between adjacent layers.
    Some have equal shapes only with as many key heads as query heads.
    """
    tried, missed = set(), []
    for variant in ("as_is", "kv_heads_as_many_as_heads"):
        if variant not in variants(family):
            continue
        pair = make_pair(family, variants(family)[variant])
        for couple in swaps(pair):
            if couple in tried:
                continue
            tried.add(couple)
            with swapped(pair, *couple):
                if not is_noticed(pair) and not skipped(family, "swap", couple[0]):
                    missed.append((variant, *couple))
        assert not is_noticed(pair)  # every swap is undone
    assert not missed


@pytest.mark.of_layers
def test_a_missing_norm_is_noticed(family, pair):
    missed, called = set(), 0
    for name, module in norms(pair.ours):
        with without_norm(module) as calls:
            if not is_noticed(pair) and calls:
                missed.add(re.sub(r"^layers\.\d+\.", "", name))
            called += bool(calls)
    skips = find_architecture(family).skip
    assert missed == {entry.removeprefix("norm:") for entry in skips if entry.startswith("norm:")}
    assert called > len(pair.ours.layers)


@pytest.mark.of_layers("tokens")
def test_a_missing_residual_stream_or_branch_is_noticed(pair):
    assert not is_noticed(pair)  # computes the reference's results, whose additions must not be counted below
    with Additions(pair.hidden_size) as clean:
        assert not is_noticed(pair)
    branches = [len(block.mixers[:1]) + (block.mlp is not None) for block in pair.ours.spec.blocks]
    assert clean.count >= sum(branches)
    for fault in range(clean.count):
        for keep in (0, 1):
            with Additions(pair.hidden_size, fault, keep):
                assert is_noticed(pair), (fault, keep)
