"""Memory that FSDP2 needs for sharded parameters, in addition to each process's shard.

A layer is gathered into one buffer while the previous one runs, and its parameters are copied out when it
starts. Its full gradients exist until its backward pass ends, then in one communication buffer until the
backward pass of the layer before it ends. The embedding and the head are freed after they run; a tied weight,
and parameters outside of layers, stay gathered to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from liger_models.layers.memory.own_parts import gathered_bytes, own_bytes, whole_bytes


@dataclass(frozen=True)
class Gathered:
    """Bytes of gathered parameters and of gradients (0 if none are trained).

    Attributes:
        layers: of each layer, in the order in which they run.
        gradients: of each layer's whole gradients.
        parts: what of these is this process's own.
        head: of the head, and of its gradient, where it is a group of its own.
        rest: what stays from the beginning to the end, and of its gradient what is not this process's own.
        once: whether layers stay until their backward pass, and the embedding to the end.
    """

    layers: Sequence[int]
    gradients: Sequence[int]
    parts: Sequence[int]
    head: tuple[int, int]
    rest: tuple[int, int]
    once: bool

    @staticmethod
    def of(
        layers: Sequence[nn.Module],
        embedding: Tensor | None,
        rest: Sequence[Tensor],
        gpus: int,
        trains: bool,
        once: bool,
    ) -> Gathered:
        """Of a model's parts.

        Args:
            layers: one after the other.
            embedding: its weight, if it is a group of its own, and so is a head of the same size.
            rest: parameters in none of these.
            gpus: that divide them, where parameters do not say so themselves.
            trains: whether any of them are trained.
            once: whether layers are gathered once a step.
        """

        def gradient(parameters: Iterable[Tensor]) -> int:
            return sum(whole_bytes(p) for p in parameters if p.requires_grad) if trains else 0

        def part(parameters: Iterable[Tensor]) -> int:
            return sum(own_bytes(p) for p in parameters if p.requires_grad) // gpus if trains else 0

        head = [] if embedding is None else [embedding]
        of_head = sum(map(gathered_bytes, head))
        return Gathered(
            [sum(map(gathered_bytes, layer.parameters())) for layer in layers],
            [gradient(layer.parameters()) for layer in layers],
            [part(layer.parameters()) for layer in layers],
            (of_head, gradient(head)),
            (sum(map(gathered_bytes, rest)) + once * of_head, gradient(rest) - part(rest)),
            once,
        )

    def at_the_loss(self) -> int:
        """The head with its buffer, and the last layer, which is gathered next."""
        layers = sum(self.layers) if self.once else self.layers[-1]
        return self.rest[0] + 2 * self.head[0] + layers

    def at_layer(self, i: int) -> int:
        """In its backward pass, of layer i from the end (-1 is the last): what is gathered of it and the one
        before it, the gradients of the one behind it, and its own beyond this process's part.
        """
        i += len(self.layers)
        behind = self.gradients[i + 1] if i + 1 < len(self.layers) else self.head[1]
        layers = sum(self.layers[: i + 1]) if self.once else sum(self.layers[max(0, i - 1) : i + 1])
        return sum(self.rest) + layers + behind + self.gradients[i] - self.parts[i]
