"""The loss of the routers in a model with experts.

    aux_loss_coef * load balancing loss + z_loss_coef * router z-loss     (kernels/experts/router_losses.py)

The load is balanced over the model rather than within each layer, so the loss needs the logits of all layers
at once. A layer notes its logits in the `RouterLogits` of the call (`Sequences.notes`), and the code that
computes the model's loss takes them after the last layer. They are ordinary tensors of the graph: scaling the
loss, recomputation, data parallelism and sharding treat their gradients like all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels import load_balancing_loss, router_z_loss
from liger_models.kernels.experts.router_losses import assignments_of
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.specs import MoESpec


def router_loss(logits: list[Tensor], spec: MoESpec, part: Slice | None = None) -> Tensor:
    """The weighted sum of the routers' losses by the coefficients of `spec`, a scalar in float32.

    `logits`: [T, E] of each layer of experts, from `RouterLogits.take`. The load is summed over all layers;
    the z-loss is the mean over all tokens of all layers. If sequences are divided over ranks, `logits` belong
    to the tokens of `part`, and the losses of the ranks sum to the loss of the batch.

    Raises:
        ValueError: no logits.
    """
    if part is None:
        loss = spec.aux_loss_coef * load_balancing_loss(logits, spec.experts_per_token)
    else:
        assignments = part.counted(assignments_of(logits, spec.experts_per_token))
        tokens = len(logits) * part.total
        loss = spec.aux_loss_coef * load_balancing_loss(logits, spec.experts_per_token, assignments, tokens)
    if spec.z_loss_coef:
        z_losses = [router_z_loss(layer).to(loss.device) for layer in logits]
        share = 1.0 if part is None else part.share
        loss = loss + share * spec.z_loss_coef * torch.stack(z_losses).mean()
    return loss


class Noted:
    """Tensors of some layers in one call, in the order of the layers, for the loss.

    Attributes:
        asked_for: whether all such layers note their tensors.

    Not a plain list, since sharding frameworks copy the lists among a layer's arguments and join the tensors
    in them to the layer's graph. They leave other objects alone.
    """

    whose = "a layer with an indexer"

    def __init__(self) -> None:
        self.asked_for = False
        self._with_gradients, self._cut_off = torch.is_grad_enabled(), False
        self._noted: list[Tensor] | None = []

    def note(self, tensor: Tensor) -> None:
        if self._noted is not None:
            self._noted.append(tensor)
            self._cut_off |= self._with_gradients and not torch.is_grad_enabled()

    def take(self) -> list[Tensor]:
        """Return the noted tensors and ignore later ones. A layer that runs again in the backward pass would
        keep its second graph alive, in a reference cycle with this object.

        Raises:
            RuntimeError: a layer ran without gradients in a call that has them, so its part of the loss would
                train nothing.
        """
        if self._cut_off:
            raise RuntimeError(
                f"{self.whose} ran without gradients in a call that has them, as torch's checkpoint runs "
                "one with use_reentrant=True, and its part of the loss would train nothing: pass "
                "use_reentrant=False, or activation_memory='checkpoint' in its place; freeze layers by "
                "requires_grad_(False)"
            )
        noted, self._noted = self._noted, None
        return noted or []


class RouterLogits(Noted):
    """The logits [T, E] of a model's routers. Those whose spec has a loss always note them."""

    whose = "a layer of experts"
