"""The activation memory level of each layer: users choose it, and trainers toggle checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from liger_models.layers.blocks import Block
from liger_models.layers.memory import FittingLevels
from liger_models.layers.recompute.activation_memory import ON_HOST, RERUN, ActivationMemory, set_levels
from liger_models.layers.recompute.offload import drop_unused_buffers


class _Levels(NamedTuple):
    """Chosen levels, and the function that chooses again for a larger batch."""

    layers: tuple[ActivationMemory, ...]
    encoders: tuple[tuple[ActivationMemory, ...], ...]
    fit_levels: FittingLevels | None


class ActivationLevels(nn.Module):
    """A module with layers, and possibly encoders, whose activation memory can be chosen.

    Attributes:
        fit_levels: chooses the levels when a batch arrives; None unless "auto" was requested.
    """

    layers: Sequence[Block]
    vision: Any
    audio: Any
    fit_levels: FittingLevels | None = None
    _before_checkpointing: _Levels | None = None  # while a trainer has it enabled
    _disabled_levels: tuple[_Levels, ...] = ()  # one per disabling by a trainer, until enabled

    @property
    def encoders(self) -> list[Any]:
        """The parts that encode images and sounds, as far as there are any."""
        return [part for part in (self.vision, self.audio) if part is not None]

    @property
    def activation_memory(self) -> tuple[ActivationMemory, ...]:
        """The level of each layer."""
        return tuple(layer.activation_memory for layer in self.layers)

    def set_activation_memory(
        self,
        levels: str | Sequence[str],
        memory_budget: float | str | None = None,
        optimizer_bytes: float | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        """Choose what is kept for the backward pass: one level for all layers, or one a layer. A single level
        also applies to encoders of images and sounds; otherwise call their own `set_activation_memory`.

        "auto" chooses the levels with the least recomputation within a memory budget when a training batch
        arrives: see `FittingLevels` in layers/memory/, which documents the other arguments.

        Raises:
            ValueError: an unknown level, the wrong number of them, or a budget that cannot be honoured.
        """
        self.fit_levels = None
        if levels == "auto":
            self.fit_levels = FittingLevels(memory_budget, optimizer_bytes, say)
            levels = "lean"
        elif memory_budget is not None:
            raise ValueError(f"memory_budget is {memory_budget!r}, but only the level 'auto' has a budget")
        for part in self.encoders if isinstance(levels, str) else ():
            part.encoder.set_activation_memory(levels)
        set_levels(self.layers, levels)
        if not {"offload", ON_HOST} & set(self.activation_memory):
            drop_unused_buffers()
        self._before_checkpointing, self._disabled_levels = None, ()

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute layers in the backward pass, as trainers request it: level `checkpoint`, or `offload`
        with `offload`, for the first of every `every_n_layers` layers.

        Levels from `set_activation_memory` that already recompute are kept: `tiled`, `offload` and "auto".
        After `gradient_checkpointing_disable`, this restores the previous levels, including lists: trainers
        disable and enable around a reference model's pass.

        `use_reentrant` and `preserve_rng_state` have no effect: results equal those without checkpointing.

        Raises:
            ValueError: an unsupported option.
        """
        given = set(activation_checkpointing_kwargs or {}) - {"use_reentrant", "preserve_rng_state"}
        if given or every_n_layers < 1:
            found = f"{sorted(given)}" if given else f"every_n_layers={every_n_layers}"
            raise ValueError(
                f"found {found}; of the options of checkpointing only use_reentrant, preserve_rng_state, "
                "every_n_layers (1 or more) and offload are known"
            )
        if every_n_layers == 1 and not offload:
            if self._disabled_levels:
                *earlier, last = self._disabled_levels
                self._disabled_levels = tuple(earlier)
                return self._restore_levels(last)
            if self.fit_levels is not None:
                return
        before = self._before_checkpointing or self._chosen_levels()

        def some(levels: Sequence[ActivationMemory]) -> tuple[ActivationMemory, ...]:
            return tuple(
                level if i % every_n_layers else "offload" if offload else _recomputed(level)
                for i, level in enumerate(levels)
            )

        self._restore_levels(_Levels(some(before.layers), tuple(map(some, before.encoders)), None))
        self._before_checkpointing, self._disabled_levels = before, ()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Restore the levels from before checkpointing was enabled. Layers that the user chose to recompute
        still do.
        """
        if self.is_gradient_checkpointing:
            self._disabled_levels += (self._chosen_levels(),)
        if self._before_checkpointing is not None:
            self._restore_levels(self._before_checkpointing)

    def _chosen_levels(self) -> _Levels:
        of_encoders = tuple(
            tuple(layer.activation_memory for layer in part.encoder.layers) for part in self.encoders
        )
        return _Levels(self.activation_memory, of_encoders, self.fit_levels)

    def _restore_levels(self, chosen: _Levels) -> None:
        set_levels(self.layers, chosen.layers)
        for part, levels in zip(self.encoders, chosen.encoders, strict=True):
            part.encoder.set_activation_memory(levels)
        self.fit_levels = chosen.fit_levels
        if not {"offload", ON_HOST} & set(self.activation_memory):
            drop_unused_buffers()

    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether some layer is recomputed as a whole in the backward pass."""
        return any(level in RERUN for level in self.activation_memory)


def _recomputed(level: ActivationMemory) -> ActivationMemory:
    return level if level in RERUN else "checkpoint"
