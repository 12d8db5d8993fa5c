"""One composition against one process: the loss, every gradient, and the weights after two steps.

The truth runs each document by itself, in one process, at activation memory level `all`, and adds up. Both
sides compute in float64, in which rounding is far below any error: a gradient g of n terms differs by about
n 2^-53 |g|, for these sizes by less than 1e-12, and the steps of the optimizers, which divide by gradients'
magnitudes plus 1e-8, by less than 1e-9. BOUND is between these and the smallest error of a wrong factor.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import liger_models
from benchmarks.certificate.case import LEVELS, Case, config_of
from liger_models import ConfigError, DataError, UnsupportedModelError
from liger_models.cards.workshop import randomise

BOUND = 1e-7
STEPS = 2
LEARNING_RATE = {"adamw": 1e-2, "sgd": 1e-1}
ROWS = 2  # of one micro-batch and reader
LENGTH = 24  # tokens of a row
REFUSALS = (ConfigError, DataError, UnsupportedModelError, NotImplementedError)


class Outcome(NamedTuple):
    """Result of a composition.

    Attributes:
        holds: whether it is right, or refused.
        refused: the message, if it is refused.
        worst: the largest relative distance and its name; or the error.
    """

    holds: bool
    refused: str = ""
    worst: str = ""


class _Batch(NamedTuple):
    """Rows of documents, [rows][documents][tokens], of one micro-batch and reader."""

    rows: list[list[Tensor]]

    def documents(self) -> list[Tensor]:
        return [document for row in self.rows for document in row]

    def labels(self) -> int:
        """Number of predicted tokens: all but the first of each document and those left out."""
        return sum(int((_labels(document)[1:] != -100).sum()) for document in self.documents())


def compare(case: Case, rank: int = 0, fault: float = 1.0, device: str = "cpu") -> Outcome:
    """Run a composition on this process, one of `case.ranks` that all call this.

    Args:
        case: the composition.
        rank: of this process.
        fault: factor of the first process's losses, to see that errors are found.
        device: of the model, and so of the processes' exchanges.
    """
    model = _model(case).to(device)
    truth = _run_alone(case, _model(case).to(device))
    try:
        found = _run_divided(case, model, rank, fault)
    except (*REFUSALS, ValueError) as error:
        if isinstance(error, ValueError) and not _says_what_to_do(error):
            raise
        return Outcome(True, refused=str(error).splitlines()[0])
    distances = {name: _distance(found[name], truth[name], truth) for name in truth}
    name = max(distances, key=lambda key: distances[key] if math.isfinite(distances[key]) else math.inf)
    worst = f"{name} {distances[name]:.1e}"
    return Outcome(all(distance <= BOUND for distance in distances.values()), worst=worst)


def _says_what_to_do(error: ValueError) -> bool:
    """Whether a ValueError is a refusal of this package, not an accident."""
    return any(word in str(error) for word in ("heads", "divide", "share", "expected"))


def _model(case: Case) -> Any:
    torch.manual_seed(case.seed)
    projections: Any = "split" if case.lora else "fused"
    model = liger_models.from_config(
        config_of(case.family), dtype=torch.float64, device="cpu", projections=projections, dropout=0.0
    )
    generator = torch.Generator().manual_seed(case.seed)
    randomise(model, generator)
    if case.freeze:
        names = [name for name, _ in model.named_parameters() if name.startswith("layers.0.")]
        weight_map = model.weight_map()
        model.freeze(*{ref.name for name in names for ref in weight_map[name].refs()})
    if case.lora:
        import peft

        layers = dict(model.layers.named_modules())
        untrained = tuple(f"{path}." for path, layer in layers.items() if getattr(layer, "untrained", False))
        linear = [path for path, layer in layers.items() if isinstance(layer, nn.Linear)]
        names = {path.rpartition(".")[2] for path in linear if not path.startswith(untrained)}
        if any(hasattr(layer, "A_log") for layer in layers.values()):
            names -= {"out_proj"}  # PEFT refuses it in models with Mamba layers
        targets = sorted(names)
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets))
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def _inner(model: Any) -> Any:
    """The model of this package inside adapters and wrappers."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _batches(case: Case, step: int) -> list[list[_Batch]]:
    """Batches of a step: [micro-batches][readers]. All rows have the same length in tokens."""
    draw = torch.Generator().manual_seed(case.seed * 1000 + step)
    size = int(config_of(case.family)["vocab_size"])

    def row() -> list[Tensor]:
        lengths, left = [], LENGTH
        while left:
            longest = left if case.layout in ("rows", "padded") else min(left, 9)
            lengths.append(int(torch.randint(1, longest + 1, (), generator=draw)))
            left -= lengths[-1]
        if case.layout == "rows":
            lengths = [LENGTH]
        elif case.layout == "padded":
            lengths = [max(3, lengths[0])]
        return [torch.randint(size, (length,), generator=draw) for length in lengths]

    return [
        [_Batch([row() for _ in range(ROWS)]) for _ in range(case.readers)] for _ in range(case.accumulation)
    ]


def _labels(document: Tensor) -> Tensor:
    """Labels that leave every fifth token out."""
    labels = document.clone()
    labels[4::5] = -100
    return labels


def _inputs(batch: _Batch, layout: str) -> dict[str, Tensor]:
    """Arguments of the model's call for a whole batch."""
    if layout == "padded":
        pad = nn.utils.rnn.pad_sequence
        (documents, labels) = ([f(row[0]) for row in batch.rows] for f in (lambda row: row, _labels))
        mask = pad([torch.ones_like(document) for document in documents], batch_first=True)
        return {
            "input_ids": pad(documents, batch_first=True),
            "labels": pad(labels, batch_first=True, padding_value=-100),
            "attention_mask": mask,
        }
    inputs = {
        "input_ids": torch.stack([torch.cat(row) for row in batch.rows]),
        "labels": torch.stack([torch.cat([_labels(document) for document in row]) for row in batch.rows]),
    }
    lengths = [len(document) for document in batch.documents()]
    if layout == "packed":
        inputs["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    elif layout == "positions":
        positions = torch.cat([torch.arange(length) for length in lengths])
        inputs["position_ids"] = positions.view(len(batch.rows), -1)
    return inputs


def _run_alone(case: Case, model: Any) -> dict[str, Tensor]:
    """Losses, gradients of the first step and weights, of each document by itself."""
    _inner(model).set_activation_memory("all")
    optimizer, results, device = _optimizer(case, model), {}, _inner(model).device
    for step in range(STEPS):
        batches = [batch for part in _batches(case, step) for batch in part]
        total = sum(batch.labels() for batch in batches)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for document in (row.to(device) for batch in batches for row in batch.documents()):
            labels = _labels(document)
            if bool((labels[1:] != -100).any()):
                own = model(input_ids=document[None], labels=labels[None], num_items_in_batch=total).loss
                own.backward()
                loss += own.detach()
        results |= _results(case, model, optimizer, step, loss)
    return results


def _run_divided(case: Case, model: Any, rank: int, fault: float) -> dict[str, Tensor]:
    layers = _inner(model).layers
    levels = [LEVELS[i % len(LEVELS)] if case.level == "mixed" else case.level for i in range(len(layers))]
    _inner(model).set_activation_memory(levels)
    if case.wrapper == "fsdp":
        dims = liger_models.ParallelDims(
            data_replicate=case.replicate, sequence=case.sequence, experts=case.experts
        )
        liger_models.parallelize(_inner(model), mesh=dims)
    elif case.wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer, results = _optimizer(case, model), {}
    reader, device = rank // case.sequence, _inner(model).device
    for step in range(STEPS):
        batches = _batches(case, step)
        total = sum(batch.labels() for part in batches for batch in part)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for number, part in enumerate(batches):
            last = number == len(batches) - 1
            waiting = contextlib.nullcontext() if case.wrapper != "ddp" or last else model.no_sync()
            with waiting:
                inputs = {key: x.to(device) for key, x in _inputs(part[reader], case.layout).items()}
                own = model(**inputs, num_items_in_batch=total / case.readers).loss
                own = own * fault if rank == 0 else own
                own.backward()
            loss += own.detach() / case.readers
        if case.ranks > 1:
            torch.distributed.all_reduce(loss)
            loss /= case.sequence
        results |= _results(case, model, optimizer, step, loss)
    return results


def _optimizer(case: Case, model: Any) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    lr = LEARNING_RATE[case.optimizer]
    if case.optimizer == "adamw":
        return liger_models.optim.AdamW(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr)


def _results(case: Case, model: Any, optimizer: Any, step: int, loss: Tensor) -> dict[str, Tensor]:
    """Take a step. Returns the loss, and the gradients of the first step or the weights after the last."""
    named = {_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    found = {f"loss of step {step + 1}": loss}
    if step == 0:
        found |= {
            f"gradient of {name}": torch.zeros(p.shape, dtype=p.dtype, device=p.device)
            if p.grad is None
            else _whole(p.grad)
            for name, p in named.items()
        }
    optimizer.step()
    optimizer.zero_grad()
    if step == STEPS - 1:
        found |= {f"{name} after {STEPS} steps": _whole(p.detach()) for name, p in named.items()}
    return found


def _name(name: str) -> str:
    return name.removeprefix("module.")


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def _distance(found: Tensor, truth: Tensor, results: dict[str, Tensor]) -> float:
    """Relative distance. Gradients whose terms cancel are measured by the largest gradient."""
    scale = float(truth.norm())
    floor = 1e-6 * max(float(other.norm()) for other in results.values())
    return float((found - truth).norm()) / max(scale, floor)
