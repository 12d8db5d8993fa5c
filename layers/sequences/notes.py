"""Notes that layers leave for the code that runs after them."""

from __future__ import annotations

from torch import Tensor

from liger_models.kernels import ChosenBlocks
from liger_models.layers.sequences.router_loss import Noted, RouterLogits
from liger_models.layers.sequences.routing_decisions import RoutingDecisions


class Notes:
    """The notes of one call, shared by all layers on all devices.

    Attributes:
        router_logits: logits of the routers that have a loss, or of all routers if they are asked for.
        routing: the decisions of each router, for layers that run again in the backward pass.
        chosen_keys: by layer, the keys that its indexer has chosen for later layers; None for all keys.
        indexer_losses: the loss of each layer's indexer, if the losses are asked for.

    Not a dataclass, for the reason that `Sequences` gives.
    """

    def __init__(self) -> None:
        self.router_logits = RouterLogits()
        self.routing = RoutingDecisions()
        self.chosen_keys: dict[int, Tensor | ChosenBlocks | None] = {}
        self.indexer_losses = Noted()
