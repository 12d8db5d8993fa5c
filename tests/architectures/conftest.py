"""A native model beside its reference in transformers: the same random parameters, the same batch, and how
far apart their results are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_models.architectures import Architecture, find_architecture
from liger_models.convert.checkpoints.weight_map import Expr
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.model import CausalLM
from liger_models.layers.spec import ModelSpec

# float32 rounds to 6e-8 of a value. From a parameter to its gradient a value passes about a hundred roundings
# that matter in a tiny model (three layers forward and back), and they add up like a random walk, 1e-6 at
# most where nothing cancels. A gradient is a sum over tokens in which much cancels: a factor of ten for that.
# Faults stand out far above (test_mutations.py).
BOUND = 1e-5

Change = Callable[[dict[str, Expr]], dict[str, Expr]]


@dataclass
class Run:
    """What came out of one forward and backward pass; gradients under the checkpoint's names."""

    loss: Tensor | None
    logits: Tensor | None
    gradients: dict[str, Tensor]

    def distances(self, truth: Run, positions: Tensor | None = None) -> dict[str, float]:
        """The relative distance of every result. `positions` [batch, seq]: which logits to compare."""
        results, expected = self._named(positions), truth._named(positions)
        assert results.keys() == expected.keys(), results.keys() ^ expected.keys()
        return {name: relative_distance(results[name], expected[name]) for name in results}

    def _named(self, positions: Tensor | None) -> dict[str, Tensor]:
        named = dict(self.gradients)
        if self.loss is not None:
            named["loss"] = self.loss
        if self.logits is not None:
            named["logits"] = self.logits if positions is None else self.logits[positions]
        return named


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, in float64; NaN counts as infinitely far."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    distance, size = (found - expected).norm().item(), expected.norm().item()
    if math.isnan(distance) or not math.isfinite(size):
        return math.inf
    return distance / size if size else distance


@dataclass
class Pair:
    architecture: Architecture
    config: dict[str, Any]
    ours: CausalLM
    reference: Any  # a PreTrainedModel
    weight_map: dict[str, Expr]

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    def batch(self, rows: int = 2, length: int = 19) -> dict[str, Tensor]:
        """Random ids, and labels that leave some positions out."""
        ids = torch.randint(0, self.vocab_size, (rows, length))
        labels = ids.clone()
        labels[:, 3:5] = -100
        return {"input_ids": ids, "labels": labels}

    def run_ours(self, cotangent: Tensor | None = None, **call: Any) -> Run:
        """Forward, and backward from the loss, or from the logits with `cotangent`."""
        output = self.ours(**call, return_logits=True)
        own = dict(self.ours.named_parameters())
        grads = _gradients(self.ours, output, cotangent, call)
        by_name: dict[str, Tensor] = {}
        for name, expression in self.weight_map.items():
            if own[name].grad is not None:
                by_name |= expression.write(own[name].grad)
        return Run(output.loss, output.logits, by_name | grads)

    def run_reference(self, cotangent: Tensor | None = None, **call: Any) -> Run:
        output = self.reference(**call, use_cache=False)
        grads = _gradients(self.reference, output, cotangent, call)
        by_name = {name: p.grad for name, p in self.reference.named_parameters() if p.grad is not None}
        return Run(output.loss, output.logits, by_name | grads)

    def run_reference_by_document(self, input_ids: Tensor, labels: Tensor, lengths: list[int]) -> Run:
        """The reference of packed documents: each alone, and the mean over all their labels together."""
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
        by_name = {name: p.grad for name, p in self.reference.named_parameters()}
        return Run(loss, joint.unflatten(0, tuple(input_ids.shape)), by_name)

    def distances(self, **call: Any) -> dict[str, float]:
        return self.run_ours(**call).distances(self.run_reference(**call))


def _gradients(
    model: torch.nn.Module, output: Any, cotangent: Tensor | None, call: Mapping[str, Any]
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


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Every parameter random: the ones of fresh norms and the zeros of fresh biases would hide a mix-up."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:  # such that activations and scores stay of the order of one
                p.copy_(noise / math.sqrt(p.shape[-1]))
            else:
                p.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))


def copy_parameters(weight_map: Mapping[str, Expr], model: CausalLM, source: Mapping[str, Tensor]) -> None:
    """Fill a native model from the checkpoint tensors `source`."""
    own = dict(model.named_parameters())
    assert own.keys() == weight_map.keys()
    with torch.no_grad():
        for name, expression in weight_map.items():
            own[name].copy_(expression.read(source.__getitem__))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors of a few hundred elements gain nothing from a second thread, and wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_pair() -> Callable[..., Pair]:
    """A factory: `make_pair("llama", head_dim=24)` is the family's tiny config with changes; None removes a
    key. `change_spec` and `change_map` bring in faults.
    """
    transformers = pytest.importorskip("transformers")

    def make(
        model_type: str,
        changes: Mapping[str, Any] | None = None,
        *,
        change_spec: Callable[[ModelSpec], ModelSpec] | None = None,
        change_map: Change | None = None,
        **model_options: Any,
    ) -> Pair:
        torch.manual_seed(0)
        architecture = find_architecture(model_type)
        merged = {**architecture.tiny, **(changes or {})}
        config = {key: value for key, value in merged.items() if value is not None}
        spec = architecture.spec(HFConfig.load(config))
        if change_spec is not None:
            spec = change_spec(spec)
        ours = CausalLM(spec, architecture.names, **model_options)
        reference_class = getattr(transformers, architecture.reference)
        reference_config = reference_class.config_class(**config)
        reference_config._attn_implementation = "eager"
        reference = reference_class(reference_config)
        randomise(reference, torch.Generator().manual_seed(1))
        weight_map = ours.weight_map()
        if change_map is not None:
            weight_map = change_map(weight_map)
        copy_parameters(weight_map, ours, reference.state_dict())
        return Pair(architecture, config, ours, reference, weight_map)

    return make


@pytest.fixture(scope="session")
def failures() -> Callable[[dict[str, float]], dict[str, float]]:
    """The results of a comparison that miss the bound."""
    return lambda distances: {name: d for name, d in distances.items() if not d <= BOUND}


@pytest.fixture(scope="session")
def change_blocks() -> Callable[..., Callable[[ModelSpec], ModelSpec]]:
    """A change of one part of every layer, as `change_spec` takes it."""

    def change(part: str, edit: Callable[[Any], Any]) -> Callable[[ModelSpec], ModelSpec]:
        return lambda spec: replace(
            spec,
            blocks=tuple(replace(block, **{part: edit(getattr(block, part))}) for block in spec.blocks),
        )

    return change
