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
        layers: of each layer, in execution order.
        gradients: of each layer's full gradients.
        parts: this process's share of these.
        head: of the head and of its gradient, if it is a separate FSDP group.
        rest: of parameters that stay gathered for the whole step, and of their gradients outside this
            process's shard.
        once: layers stay gathered until their backward pass, and the embedding to the end.
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
        """Sum up the parts of a model.

        Args:
            layers: in execution order.
            embedding: its weight, if it is a separate group; the head is then one of the same size.
            rest: all other parameters.
            gpus: that share the parameters, unless these are already sharded.
            trains: some of them are trained.
            once: layers are gathered once per step.
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
        """Bytes in the backward pass of layer i from the end (-1 is the last): the gathered parameters of
        this layer and the one before it, the gradients of the layer after it, and its own outside this
        process's shard.
        """
        i += len(self.layers)
        after = self.gradients[i + 1] if i + 1 < len(self.layers) else self.head[1]
        layers = sum(self.layers[: i + 1]) if self.once else sum(self.layers[max(0, i - 1) : i + 1])
        return sum(self.rest) + layers + after + self.gradients[i] - self.parts[i]
