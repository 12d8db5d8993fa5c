"""The loss of the indexers, which trains their choice of keys next to the model (DeepSeek-V3.2, 2025,
arXiv:2512.02556, section 2.1.1).

    loss = main loss + weight * mean over the indexers of (mean over the tokens t of KL(p_t || softmax(s_t)))

p_t is the mean of the attention weights of the layer's heads over the keys that t attends to, and s_t are
the indexer's scores of these keys (kernels/attention/indexer_loss.py): the chosen keys, as in the paper's
sparse stage, or all in documents of at most as many tokens as an indexer chooses. The loss changes the
indexers only, and the main loss does not reach them. A layer that attends to the keys of another layer's
indexer is not compared with it. With sinks, which take a share of the weights (Hunyuan 4), p_t is the sum of
the heads' weights divided by its sum over the keys.

DeepSeek-V4's layers attend to a window of tokens, to compressed keys and to a sink in one softmax, and their
indexers choose among the compressed keys. There p_t is the sum of the heads' weights of these keys, divided
by its sum over them, and tokens that see none have no loss. We found no recipe published for V4: this is
V3.2's formula for that softmax.

    model = liger_models.from_hub("deepseek-ai/DeepSeek-V3.2")
    model.train_indexers()
    output = model(input_ids, labels=labels, indexer_weight=1.0)   # output.loss, output.indexer_loss

A part of an accumulated step counts by its share of labels, as losses of routers do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.layers.attention.compressed.compressor import CompressedIndexer
from liger_models.layers.attention.indexer import Indexer
from liger_models.layers.model.output import ModelOutput
from liger_models.layers.sequences.sequences import Sequences


def indexers(model: nn.Module) -> list[Indexer | CompressedIndexer]:
    """The indexers of a model's layers, without those of modules for multi-token prediction."""
    layers: nn.Module = model.get_submodule("layers")
    return [module for module in layers.modules() if isinstance(module, (Indexer, CompressedIndexer))]


def train_indexers(model: nn.Module, enabled: bool = True) -> None:
    """Train the indexers, or freeze them.

    Raises:
        ValueError: no layer has an indexer.
    """
    if not (found := indexers(model)):
        raise ValueError("no layer of this model has an indexer to train")
    for indexer in found:
        indexer.untrained = not enabled
        indexer.requires_grad_(enabled)


def begin_indexer_loss(
    model: nn.Module, weight: float, targets: Tensor | None, sequences: Sequences, scored: bool
) -> None:
    """Ask the layers of a call for their indexers' losses.

    Raises:
        DataError: the model has no indexers, they are frozen, or there are no labels.
        TypeError: the call has no loss.
        ValueError: the weight is negative or not finite.
    """
    if scored:
        raise TypeError("indexer_weight is the weight of a loss, and score returns none: omit one of them")
    if not 0 <= weight < math.inf:
        raise ValueError(f"indexer_weight is {weight}; expected a finite number of 0 or more")
    if not (found := indexers(model)):
        raise DataError("no layer of this model has an indexer, which indexer_weight needs: omit it")
    if torch.is_grad_enabled() and all(indexer.untrained for indexer in found):
        raise DataError(
            "the indexers are frozen, and indexer_weight would train nothing: call model.train_indexers() "
            "first"
        )
    if targets is None:
        raise DataError("indexer_weight is the weight of a loss: pass labels or shift_labels, or omit it")
    sequences.notes.indexer_losses.asked_for = True


def add_indexer_loss(output: ModelOutput, weight: float, share: float | Tensor, sequences: Sequences) -> None:
    """Add the weighted loss to `loss` of an output, and set `indexer_loss`, without weight and gradients.
    Both count by the `share` of the step's labels that are the call's.
    """
    losses = sequences.notes.indexer_losses.take()
    device = output["loss"].device
    loss = torch.stack([found.to(device) for found in losses]).mean() * share
    output["loss"] = output["loss"] + weight * loss
    output["indexer_loss"] = loss.detach()
