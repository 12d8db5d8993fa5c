"""A native model and its reference in transformers: the same random parameters, the same batch, and the
distances of their results.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any
from unittest import mock

import pytest
import torch
from older import class_of_transformers
from rounding import BOUND as BOUND
from rounding import OtherOrder, beyond_rounding
from rounding import relative_distance as relative_distance
from ties import TieError, clear_of_ties
from torch import Tensor, nn

from liger_models.architectures import Architecture, find_architecture
from liger_models.cards.workshop import randomise as randomise
from liger_models.convert.checkpoints.expressions import Expr
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.experts.router import Router
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import ModelSpec
from liger_models.models.verification import config_class, mask_as_family

LENGTH = 19  # longer than the windows of the tiny configs
ABSENT: Any = ...
"""In the changes of a config: the key is left out. (None is a null.)"""


@dataclass
class Run:
    """Results of one forward and backward pass; gradients under the checkpoint's names."""

    loss: Tensor | None
    logits: Tensor | None
    gradients: dict[str, Tensor]
    again: Callable[[int], Run] | None = field(default=None, repr=False)
    """The same pass with its sums in another order, chosen by a seed."""

    @classmethod
    def repeatable(cls, run: Callable[[], Run]) -> Run:
        """The result of `run`, which `again` repeats with the same random numbers."""
        state = torch.get_rng_state()

        def again(seed: int) -> Run:
            with torch.random.fork_rng(devices=[]), OtherOrder(seed):
                torch.set_rng_state(state)
                return run()

        result = run()
        result.again = again
        return result

    def distances(self, truth: Run, positions: Tensor | None = None) -> Distances:
        """The relative distance of every result. `positions` [batch, seq]: which logits to compare."""
        results, expected = self._named(positions), truth._named(positions)
        assert results.keys() == expected.keys(), results.keys() ^ expected.keys()
        found = {
            name: relative_distance(results[name], expected[name], truth._least_size(name))
            for name in results
        }
        return Distances(found, truth, positions)

    def _least_size(self, name: str) -> float:
        """Lower bound of the scale of a gradient whose terms may cancel. For a scalar it is the largest
        scalar gradient. For a bias it is the gradient of the weight, which sums the same terms times inputs
        of order one: a key's bias without positions shifts all scores of a query equally, so that its
        gradient is rounding only.
        """
        if (matrix := self.gradients.get(name.removesuffix("scale") + "fn")) is not None:
            return (
                matrix.norm().item()
            )  # it is the inner product of this and a matrix with rows of length one
        if name in self.gradients and self.gradients[name].numel() == 1:
            return max(float(g.abs()) for g in self.gradients.values() if g.numel() == 1)
        weight = self.gradients.get(name.removesuffix("bias") + "weight") if name.endswith(".bias") else None
        if name.endswith("base"):  # the bias of connections to streams
            weight = self.gradients.get(name.removesuffix("base") + "fn")
        return 0.0 if weight is None else weight.norm().item() / math.sqrt(weight.shape[-1])

    def _named(self, positions: Tensor | None) -> dict[str, Tensor]:
        named = dict(self.gradients)
        if self.loss is not None:
            named["loss"] = self.loss
        if self.logits is not None:
            named["logits"] = self.logits if positions is None else self.logits[positions]
        return named


class Distances(dict[str, float]):
    """The distances of some results from the truth, by name."""

    def __init__(self, found: Mapping[str, float], truth: Run, positions: Tensor | None):
        super().__init__(found)
        self.truth, self.positions = truth, positions

    def of_truth_from_itself(self, seed: int) -> Distances:
        """The distances of the truth from itself in another order of sums."""
        assert self.truth.again is not None
        again = self.truth.again(seed)
        other = Run(
            None if self.truth.loss is None else again.loss,
            None if self.truth.logits is None else again.logits,
            {name: again.gradients[name] for name in self.truth.gradients},
        )
        return other.distances(self.truth, self.positions)


def beyond_bound(distances: Mapping[str, float]) -> dict[str, float]:
    """The results of a comparison that miss the bound."""
    if isinstance(distances, Distances) and distances.truth.again:
        return beyond_rounding(distances, distances.of_truth_from_itself)
    return {name: distance for name, distance in distances.items() if not distance <= BOUND}


@dataclass
class Pair:
    architecture: Architecture
    config: dict[str, Any]
    ours: CausalLM
    reference: Any  # a PreTrainedModel
    weight_map: dict[str, Expr]

    @property
    def vocab_size(self) -> int:
        return self.ours.spec.num_labels

    @property
    def hidden_size(self) -> int:
        return self.ours.spec.hidden_size

    def batch(self, rows: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
        """Random ids, and labels that leave some positions out."""
        shape = rows, length
        ids = self.clear(lambda: {"input_ids": torch.randint(0, self.vocab_size, shape)})["input_ids"]
        labels = ids.clone()
        labels[:, 3:5] = -100
        return {"input_ids": ids, "labels": labels}

    def clear(self, draw: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Draw calls until no router's choice is near a tie, and return that call."""
        call = draw()
        if any(isinstance(module, Router) for module in self.ours.modules()):
            while not self._is_clear(call):
                call = draw()
        return call

    def _is_clear(self, call: Mapping[str, Any]) -> bool:
        training = self.ours.training
        self.ours.eval()  # in training, routers with a correction bias would count these choices
        try:
            with torch.no_grad(), clear_of_ties(2 * BOUND):
                self.ours(**call)
        except TieError:
            return False
        finally:
            self.ours.train(training)
        return True

    @cached_property
    def probe(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """One batch with the reference's logits and loss, to compare mutants with."""
        batch = self.batch()
        with torch.no_grad():
            output = self.reference(**batch, use_cache=False)
        return batch, output.logits, output.loss

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The reference's tensors, under the checkpoint's names; a tied head is the embedding. Valid as long
        as the reference keeps its tensors.
        """
        return self.reference.state_dict()

    def run_ours(self, cotangent: Tensor | None = None, *, near_ties: bool = False, **call: Any) -> Run:
        """Forward, and backward from the loss, or from the logits with `cotangent`. TieError where a router's
        choice is near a tie, unless `near_ties` are allowed.
        """
        with nullcontext() if near_ties else clear_of_ties(BOUND):
            output = self.ours(**call, return_logits=True)
        grads = _gradients(self.ours, output, cotangent, call)
        return Run(output.loss, output.logits, self.gradients_of_ours() | grads)

    def gradients_of_ours(self) -> dict[str, Tensor]:
        """Under the checkpoint's names."""
        own = dict(self.ours.named_parameters())
        by_name: dict[str, Tensor] = {}
        for name, expression in self.weight_map.items():
            if name in own and own[name].grad is not None:
                by_name |= expression.write(own[name].grad)
        return by_name

    def run_reference(self, cotangent: Tensor | None = None, **call: Any) -> Run:
        return Run.repeatable(lambda: self._run_reference(cotangent, call))

    def _run_reference(self, cotangent: Tensor | None, call: Mapping[str, Any]) -> Run:
        own, both = {}, self.ours.needs_ids and "inputs_embeds" in call
        if both and hasattr(self.reference.model, "get_per_layer_inputs"):
            own["per_layer_inputs"] = self.reference.model.get_per_layer_inputs(call["input_ids"])
        refused = "inputs_embeds" if both and not own else "input_ids" if own else None
        given = {name: value for name, value in call.items() if name != refused}
        embedded = nullcontext()
        if refused == "inputs_embeds":  # experts are chosen by ids, and the reference takes no embeddings
            embedding = self.reference.get_input_embeddings()
            embedded = mock.patch.object(embedding, "forward", return_value=call["inputs_embeds"])
        with embedded:
            output = self.reference(**given, **own, use_cache=False)
        grads = _gradients(self.reference, output, cotangent, call)
        by_name = {name: p.grad for name, p in self.reference.named_parameters() if p.grad is not None}
        return Run(output.loss, output.logits, by_name | grads)

    def run_reference_by_document(self, input_ids: Tensor, labels: Tensor, lengths: list[int]) -> Run:
        """The reference of packed documents: each by itself, and the mean over all their labels together.

        The reference's own packing is not used: in several families its documents attend to each other.
        """
        return Run.repeatable(lambda: self._run_by_document(input_ids, labels, lengths))

    def _run_by_document(self, input_ids: Tensor, labels: Tensor, lengths: list[int]) -> Run:
        self.reference.zero_grad()
        logits, targets = [], []
        for ids, own_labels in zip(
            input_ids.flatten().split(lengths), labels.flatten().split(lengths), strict=True
        ):
            if ids.numel():
                logits.append(self.reference(input_ids=ids[None], use_cache=False).logits[0])
                targets.append(torch.cat([own_labels[1:], torch.tensor([-100])]))
        joint = torch.cat(logits)
        loss = torch.nn.functional.cross_entropy(joint, torch.cat(targets))
        loss.backward()
        by_name = {name: p.grad for name, p in self.reference.named_parameters() if p.grad is not None}
        return Run(loss, joint.unflatten(0, tuple(input_ids.shape)), by_name)

    def distances(self, **call: Any) -> Distances:
        return self.run_ours(**call).distances(self.run_reference(**call))

    def forward_distances(self) -> Distances:
        """The distances of only logits and loss, of one batch."""
        batch = self.batch()

        def run(model: nn.Module, **options: Any) -> Run:
            with torch.no_grad():
                output = model(**batch, **options)
            return Run(output.loss, output.logits, {})

        with clear_of_ties(BOUND):
            ours = run(self.ours, return_logits=True)
        return ours.distances(Run.repeatable(lambda: run(self.reference, use_cache=False)))


def _gradients(
    model: nn.Module, output: Any, cotangent: Tensor | None, call: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Run backward, and return the gradient of embeddings, where they were given."""
    model.zero_grad()
    embeds = call.get("inputs_embeds")
    if embeds is not None:
        embeds.grad = None
    if cotangent is None:
        output.loss.backward()
    else:
        output.logits.backward(cotangent)
    return {} if embeds is None else {"inputs_embeds": embeds.grad}


# -- construction


def changed(config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A deep copy of a config with changes; some references modify the config that they are given."""
    merged = {**config, **(changes or {})}
    return copy.deepcopy({key: value for key, value in merged.items() if value is not ABSENT})


def spec_of(family: str, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of the family's tiny config with changes."""
    return _spec_of(family, changes) if changes else _unchanged_spec_of(family)


def _spec_of(family: str, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    architecture = find_architecture(family)
    return architecture.spec(HFConfig.load(changed(architecture.tiny, changes)))


_unchanged_spec_of = functools.cache(_spec_of)


def reference_class(architecture: Architecture) -> Any:
    transformers = pytest.importorskip("transformers")
    found = class_of_transformers(architecture.reference)
    if architecture.reference_of and architecture.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {architecture.model_type}")
    return found


def reference_config(architecture: Architecture, config: Mapping[str, Any]) -> Any:
    """The config as the reference reads it."""
    reference_class(architecture)  # or skip
    return config_class(architecture)(**copy.deepcopy(dict(config)))


class RefusedByReference(ValueError):
    """The reference does not take the config."""


def reference_model(architecture: Architecture, config: Mapping[str, Any], attention: str = "eager") -> Any:
    """The reference, with every parameter random."""
    try:
        own_config = reference_config(architecture, config)
        own_config._attn_implementation = attention
        scan_short_chunks(own_config.get_text_config())
        reference = reference_class(architecture)(own_config)
    except Exception as error:  # an error of any type is a refusal
        raise RefusedByReference(f"{architecture.reference}: {error}") from error
    skip_groups_normalised_together(reference, own_config)
    randomise(reference, torch.Generator().manual_seed(1))
    mask_as_family(architecture, reference)
    return reference


def scan_short_chunks(config: Any) -> None:
    """Let the reference's scans of state spaces have chunks as long as the tests' sequences. It pads these to
    whole chunks, of 256 tokens by default, which took ten times as long as all else.
    """
    for key in ("chunk_size", "mamba_chunk_size"):
        if isinstance(size := getattr(config, key, None), int):
            setattr(config, key, min(size, 32))


def skip_groups_normalised_together(reference: nn.Module, config: Any) -> None:
    """Skip where an older transformers normalises the groups of Mamba 2's heads together. Mamba 2's own code
    normalises each (arXiv:2405.21060, section 8.2), as later releases do.
    """
    groups = max(getattr(config, key, None) or 1 for key in ("n_groups", "mamba_n_groups"))
    gated = [m for m in reference.modules() if type(m).__name__.endswith("RMSNormGated")]
    if groups > 1 and not all(hasattr(m, "group_size") or hasattr(m, "n_groups") for m in gated):
        pytest.skip("this transformers normalises the groups of Mamba 2's heads together")


def make_pair(
    model_type: str, changes: Mapping[str, Any] | None = None, kind: type[Pair] = Pair, **model_options: Any
) -> Pair:
    """The family's tiny config, with changes, as a native model and as its reference."""
    torch.manual_seed(0)
    architecture = find_architecture(model_type)
    config = changed(architecture.tiny, changes)
    ours = CausalLM(architecture.spec(HFConfig.load(config)), **model_options)
    reference = reference_model(architecture, config)
    in_comparable_mode(ours.spec, ours, reference)
    carried = architecture.carried(HFConfig.load(config))
    names = {n for n in names_of(reference) if not any(fnmatchcase(n, pattern) for pattern in carried)}
    weight_map = map_like(architecture, ours, names)
    copy_parameters(weight_map, ours, reference.state_dict())
    return kind(architecture, config, ours, reference, weight_map)


def in_comparable_mode(spec: ModelSpec, *models: nn.Module) -> None:
    """Set training mode, or evaluation mode for models that draw random numbers in training."""
    for model in models:
        model.train(not spec.draws_in_training)


def map_like(architecture: Architecture, model: CausalLM, names: Set[str]) -> dict[str, Expr]:
    """The family's layout with these names, which the reference uses in memory."""
    maps = [model.weight_map(layout) for layout in architecture.layouts]
    for found in maps:
        if checkpoint_shapes(found).keys() == names:
            return found
    ours = checkpoint_shapes(maps[0]).keys()
    raise ValueError(
        f"none of the {len(maps)} layouts of {architecture.model_type} has the reference's names: only the "
        f"first layout has {sorted(ours - names)[:4]}, and only the reference {sorted(names - ours)[:4]}"
    )


def names_of(reference: nn.Module) -> set[str]:
    """All tensors that the reference saves, tied ones once."""
    seen: dict[int, str] = {}
    for name, tensor in reference.state_dict().items():
        seen.setdefault(tensor.data_ptr() or id(tensor), name)
    return set(seen.values())


def copy_parameters(weight_map: Mapping[str, Expr], model: CausalLM, source: Mapping[str, Tensor]) -> None:
    """Fill a native model from the checkpoint tensors `source`."""
    own = model.saved_tensors()
    assert own.keys() == weight_map.keys(), own.keys() ^ weight_map.keys()
    with torch.no_grad():
        for name, expression in weight_map.items():
            own[name].copy_(expression.read(source.__getitem__))


def make_pair_once() -> Callable[[str], Pair]:
    """`make_pair` of tiny configs as they are, each made once: for tests that do not change parameters."""
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            made[family] = make_pair(family)
        torch.manual_seed(0)
        return made[family]

    return get
