"""Multi-token prediction: each of the modules after the decoder predicts one token further (DeepSeek-V3,
2024, arXiv:2412.19437, section 2.2).

    h_0[t] = the decoder's output after its final norm
    h_k[t] = norm(block(W [norm(e[t + k]), norm(h_{k-1}[t])]))                     e: embeddings of the input
    loss   = main loss + weight / D * sum over k = 1..D of L_k
    L_k    = sum over t of -log softmax(head(h_k[t]))[label t + k + 1] / labels of the main loss

The embedding and the head are the model's own. The paper writes the hidden state first; the released weights
of DeepSeek-V3, GLM-4.5, Ling, Qwen3-Next and Qwen3.5 expect the embedding first, and hidden states after the
final norm (vLLM and SGLang run them so). Rotary positions are those of t. Equation 24 divides by the length
of the sequence, as the main loss does, so the parts of an accumulated step add up exactly. A term whose
tokens lie in two documents, or whose label does not count, is left out. Router losses leave the modules out.

    model = liger_models.from_hub("zai-org/GLM-4.5-Air", mtp=True)
    output = model(input_ids, labels=labels, mtp_weight=0.1)       # output.loss, and output.mtp_loss alone
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks import BLOCKS, Block, add_and_norm
from liger_models.layers.model.head import LogitForm, loss_of_head
from liger_models.layers.model.output import ModelOutput
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import (
    RERUN,
    ActivationMemory,
    carry_recipe,
    keep_recipes,
    recompute,
)
from liger_models.layers.sequences.documents import IGNORE_INDEX
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec, NormSpec


class MTPModule(nn.Module):
    """One module: h_k of this file's formula, from the embeddings and h_{k-1}.

    Args:
        hidden_size: the width H of the hidden states.
        block: its layer.
        norm: of its inputs and its output.
        number: its index among the model's layers.
        attention: the attention backend.
    """

    def __init__(
        self,
        hidden_size: int,
        block: BlockSpec,
        norm: NormSpec | LayerNormSpec,
        number: int,
        attention: AttentionBackend = "auto",
    ):
        super().__init__()
        self.enorm, self.hnorm = make_norm(hidden_size, norm), make_norm(hidden_size, norm)
        self.eh_proj = Linear(2 * hidden_size, hidden_size, bias=False)
        self.block: Block = BLOCKS[block.topology](hidden_size, block, number, attention)
        self.shared_head_norm = make_norm(hidden_size, norm)

    def forward(self, embeddings: Tensor, hidden: Tensor, sequences: Sequences) -> Tensor:
        """embeddings [T, H] of the tokens ahead, hidden [T, H] -> hidden [T, H], normalised."""
        parts = self.enorm(embeddings), self.hnorm(hidden)
        both = carry_recipe(_side_by_side(*parts), _side_by_side, *parts, late=True, deep=True)
        x, residual = self.block(self.eh_proj(both), None, sequences)
        return add_and_norm(self.shared_head_norm, x, residual)[0]


def _side_by_side(*parts: Tensor) -> Tensor:
    return torch.cat(parts, -1)


def make_mtp(spec: ModelSpec, attention: AttentionBackend = "auto") -> nn.ModuleDict | None:
    """The modules of a spec by their number; None without any."""
    if spec.mtp is None:
        return None
    modules = {}
    for k, block in enumerate(spec.mtp.blocks):
        number = len(spec.blocks) + k
        modules[str(spec.mtp.first + k)] = MTPModule(
            spec.hidden_size, block, spec.mtp.norm, number, attention
        )
    return nn.ModuleDict(modules)


class MTPCall:
    """A call's loss of multi-token prediction. Created before the layers run; the number of each module's
    counted targets is then read without waiting for the device.

    Args:
        weight: of the loss.
        modules: the model's.
        targets: [T], the token that each position must predict, or -100.
        sequences: of the call.
        scored: the call requests scores in place of a loss.

    Attributes:
        embedded: list to which the decoder appends its embeddings, [T, H].

    Raises:
        DataError: the model has no such modules, there are no labels, or documents continue others.
        TypeError: the call has no loss.
        ValueError: the weight is negative or not finite.
    """

    def __init__(
        self,
        weight: float,
        modules: nn.ModuleDict | None,
        targets: Tensor | None,
        sequences: Sequences,
        scored: bool,
    ):
        if scored:
            raise TypeError("mtp_weight is the weight of a loss, and score returns none: omit one of them")
        if not 0 <= weight < math.inf:
            raise ValueError(f"mtp_weight is {weight}; expected a finite number of 0 or more")
        if modules is None:
            raise DataError(
                "this model was loaded without modules for multi-token prediction, which mtp_weight needs: "
                "from_hub(..., mtp=True)"
            )
        if targets is None:
            raise DataError("mtp_weight is the weight of a loss: pass labels or shift_labels, or omit it")
        if sequences.documents.tree is not None:
            raise DataError(
                "mtp_weight needs the next token of each token, and documents that continue others (parents) "
                "may have several: repeat their prefix in each document, or omit mtp_weight"
            )
        self.weight, self.modules, self.sequences = weight, modules, sequences
        self.embedded: list[Tensor] = []
        self._targets: list[Tensor] = []
        for _ in modules:
            targets = sequences.documents.next_labels(targets)
            self._targets.append(targets)
        self._counts = HostCopy(torch.stack([(found != IGNORE_INDEX).sum() for found in self._targets]))

    def add_to(
        self,
        output: ModelOutput,
        head: nn.Module,
        form: LogitForm,
        hidden: Tensor,
        level: ActivationMemory,
        num_items: Tensor | int,
    ) -> None:
        """Add the weighted loss to `loss` of an output, and set `mtp_loss`, without weight and gradients.

        Args:
            head, form: the model's head and the form of its logits.
            hidden: [T, H], the decoder's output.
            level: the modules' activation memory level.
            num_items: the divisor of the main loss.
        """
        following, (embeddings,) = self._following(hidden.device), self.embedded
        losses = []
        for module, targets, count in zip(
            self.modules.values(), self._targets, self._counts.tolist(), strict=True
        ):
            embeddings = embeddings.index_select(0, following)
            hidden = _run(module, embeddings, hidden, self.sequences, level)
            losses.append(loss_of_head(head, hidden, targets, count, num_items, form))
            # Another tensor, without the recipe of the norm, whose weight may be freed before the next
            # module's backward pass.
            hidden = hidden.view_as(hidden)
        loss = torch.stack(losses).mean()
        output["loss"] = output["loss"] + self.weight * loss
        output["mtp_loss"] = loss.detach()

    def _following(self, device: torch.device) -> Tensor:
        """The place of the token after each token, [T]: of a document's last one, its own. No label counts
        for outputs that read it.
        """
        documents = self.sequences.documents
        places = torch.arange(documents.num_tokens, device=device)
        following = documents.next_labels(places)
        return torch.where(following == IGNORE_INDEX, places, following)


def _run(
    module: Any, embeddings: Tensor, hidden: Tensor, sequences: Sequences, level: ActivationMemory
) -> Tensor:
    """Run a module, keeping tensors for the backward pass according to the level."""
    if module.block.activation_memory != level:
        module.block.set_activation_memory(level)
    if not torch.is_grad_enabled():
        return module(embeddings, hidden, sequences)
    if level in RERUN:
        return recompute(module, embeddings, hidden, sequences)
    with keep_recipes() if level != "all" else nullcontext():
        return module(embeddings, hidden, sequences)
