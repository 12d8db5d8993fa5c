"""What a language model is without its head: embeddings, blocks and a final norm.

input_ids [batch, seq] -> tokens [T] -> hidden [T, H] -> blocks -> norm -> hidden [T, H]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import BACKENDS, AttentionBackend
from liger_models.layers.blocks import (
    BLOCKS,
    IMAGES,
    Block,
    add_and_norm,
    keys_and_values,
    own_input,
    run_block,
)
from liger_models.layers.blocks.per_layer_input import PerLayerInputs
from liger_models.layers.memory import FittingLevels
from liger_models.layers.model.call_checks import CallChecks, check_windows
from liger_models.layers.parts.embedding import TokenEmbedding
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory, set_levels
from liger_models.layers.recompute.eager import not_compiled
from liger_models.layers.recompute.offload import Offload, drop_unused_buffers
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.tree import check_tree
from liger_models.layers.specs import AttentionSpec, ModelSpec, SharedAttentionSpec
from liger_models.layers.vision import VISIONS
from liger_models.layers.vision.image_gradients import ImageGradients


class _Levels(NamedTuple):
    """A choice of levels, and what chooses them again for a larger batch."""

    layers: tuple[ActivationMemory, ...]
    encoder: tuple[ActivationMemory, ...]
    fit_levels: FittingLevels | None


class Decoder(nn.Module):
    """Embeddings, blocks and a final norm, which `make_decoder` gives to any module.

    Attributes:
        gathered_once: whether layers that are divided over processes stay whole from the forward pass on.
    """

    spec: ModelSpec
    embed_tokens: nn.Embedding
    fit_levels: FittingLevels | None = None
    gathered_once = False
    _before_checkpointing: _Levels | None = None  # while a trainer has it enabled
    _disabled_levels: tuple[_Levels, ...] = ()  # for each time that a trainer has disabled it, until enabled

    def _replicate_for_data_parallel(self) -> Any:
        """Called by torch.nn.DataParallel on each module that it copies.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "torch.nn.DataParallel copies a model each step into modules without parameters, which models "
            "here do not support; Trainer uses it when its process sees several GPUs. Start one process "
            "for each GPU (torchrun --nproc-per-node N script.py, or accelerate launch), or let the "
            "process see one GPU (CUDA_VISIBLE_DEVICES=0)"
        )

    def make_decoder(self, spec: ModelSpec, attention: AttentionBackend = "auto") -> None:
        """The parts of a spec.

        Raises:
            ValueError: an unknown attention backend.
        """
        if attention not in BACKENDS:
            raise ValueError(f"unknown attention backend {attention!r}; choose one of {', '.join(BACKENDS)}")
        self.spec = spec
        self.embed_tokens = TokenEmbedding(spec.num_ids, spec.hidden_size, spec.embed_scale, spec.padding_idx)
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        self.per_layer_inputs = _inputs_of_layers(spec)
        _hand_on_keys(self.layers)
        self.norm = make_norm(spec.hidden_size, spec.norm)
        self.vision: Any = None
        if spec.vision is not None:
            self.vision = VISIONS[type(spec.vision)](spec.vision, spec.hidden_size, attention)
            self.image_gradients = ImageGradients()

    def hidden_states(
        self,
        sequences: Sequences,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sight: Any = None,
    ) -> Tensor:
        """The normalised output of the last block, [T, H]: `prepare_call`, then `run_layers`."""
        self.prepare_call(sequences, input_ids, sight)
        return self.run_layers(sequences, input_ids, inputs_embeds, sight=sight)

    @not_compiled
    def prepare_call(self, sequences: Sequences, input_ids: Tensor | None = None, sight: Any = None) -> None:
        """All of a call that can be refused for its shapes and positions, before anything is computed that
        several processes share.

        Args:
            input_ids: [batch, seq].
            sight: what a model with `vision` is shown. `vision.finish` reports whether images and tokens fit.

        Raises:
            DataError: documents, padding, positions or images that this model cannot take.
        """
        if sequences.tree is not None:
            check_tree(self.spec, sight)
        if sequences.torn:
            check_windows(self.spec, sequences.torn)
        if self.vision is not None and sight is not None:
            self.vision.prepare(sight, sequences, input_ids)
        sequences.prepare_rotary(self.spec.ropes)

    def begin_checks(self, checks: CallChecks, sight: Any = None) -> None:
        """Begin the checks of a call that is prepared, with those of its images."""
        # Processes that choose levels together wait for each other.
        wait = self.fit_levels is not None and self.fit_levels.plan is None
        if sight is None:
            checks.begin(wait=wait)
        else:
            checks.begin(sight.wrong, partial(self.vision.finish, sight), wait)

    @not_compiled
    def run_layers(
        self,
        sequences: Sequences,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        inputs_of_layers: list[Tensor] | None = None,
        sight: Any = None,
    ) -> Tensor:
        """The normalised output of the last block, [T, H], from [batch, seq] ids or [batch, seq, H]
        embeddings; from both where layers have inputs of their own. The call is prepared (`prepare_call`).

        To a list `inputs_of_layers` the residual stream in front of each layer is added, [batch, seq, H] each
        and zero at padding, without what images add there; the layers read it from there, so that gradients
        pass through it.
        """
        if self.fit_levels is not None and torch.is_grad_enabled():
            self.fit_levels(self, sequences, None if sight is None else sight.pictures)
        # An id outside the vocabulary is reported by the checks; until then it must not stop the device.
        ids = None if input_ids is None else sequences.pack(input_ids).clamp(0, self.spec.num_ids - 1)
        inputs_embeds = self.embed_tokens(ids) if inputs_embeds is None else sequences.pack(inputs_embeds)
        if self.vision is not None:
            inputs_embeds = self.vision.place(sight, inputs_embeds)
        handed = self._own_inputs(ids, inputs_embeds, sight)
        if self.vision is not None:
            handed |= self.vision.handed(sight, sequences)
        if self.spec.input_scale != 1.0:
            inputs_embeds = inputs_embeds * self.spec.input_scale

        x, residual = inputs_embeds, None
        offload = Offload()
        for number, layer in enumerate(self.layers):
            if inputs_of_layers is not None and number == 0:
                inputs_of_layers.append(sequences.unpack(x))
                x = sequences.pack(inputs_of_layers[-1])
            if IMAGES not in layer.reads or IMAGES in handed:
                read = [handed[name] for name in layer.reads]
                x, residual, *made = run_block(layer, x, residual, sequences, *read, offload=offload)
                handed.update(zip(layer.makes, made, strict=True))
            if inputs_of_layers is not None and number + 1 < len(self.layers):
                x, residual = x if residual is None else x + residual, None
                # Without what images add, as transformers has it.
                inputs_of_layers.append(sequences.unpack(x))
                x = sequences.pack(inputs_of_layers[-1])
            if self.vision is not None and sight is not None:
                x = self.vision.add(sight, number, x)
        out = add_and_norm(self.norm, x, residual)[0]
        if self.vision is not None and self.training:
            parts = [self.vision.encoder, *self.vision.ways_out()]
            parts += [layer for layer in self.layers if IMAGES in layer.reads]
            with_images = sight is not None and sight.pictures is not None
            self.image_gradients.watch(out, parts, with_images)
        return out

    def kinds_of_layers(self) -> set[str]:
        """The names of the layers' classes, as sharding libraries ask for them: of this model's own, since a
        name that no module has is an error there.
        """
        encoder = () if self.vision is None else self.vision.encoder.layers
        return {type(layer).__name__ for layer in (*encoder, *self.layers)}

    def _own_inputs(self, ids: Tensor | None, inputs_embeds: Tensor, sight: Any) -> dict[str, Tensor]:
        """The inputs that layers have for themselves, by name."""
        if self.per_layer_inputs is None:
            return {}
        assert ids is not None  # which `batch_shape` sees to
        if sight is not None:  # those of pictures have what padding has
            ids = self.vision.ids_of_text(sight, ids, self.spec.padding_idx or 0)
        inputs = self.per_layer_inputs(ids, inputs_embeds)
        return {own_input(i): own for i, own in enumerate(inputs)}

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules of each part: "language", and of a model that sees "vision" and "projector"."""
        own = (getattr(self, name, None) for name in _OF_LANGUAGE)
        found: dict[str, list[nn.Module]] = {"language": [module for module in own if module is not None]}
        if self.vision is not None:
            found |= {"vision": [self.vision.encoder], "projector": self.vision.ways_out()}
        return found

    def freeze(self, *parts: str) -> None:
        """Train the other parts alone: no parameter of "vision", "projector" or "language" needs a gradient
        from here on, as named, and all others do. Without a name all train.

        Raises:
            ValueError: a part that the model does not have.
        """
        own = self.parts()
        if unknown := sorted(set(parts) - own.keys()):
            raise ValueError(f"no part {unknown[0]!r} in this model; expected {', '.join(own)}")
        for name, modules in own.items():
            for module in modules:
                module.requires_grad_(name not in parts)

    def seeing_parameters(self) -> Iterator[nn.Parameter]:
        """Those that only images reach: the encoder, the way from there, layers that read features."""
        seeing: list[Any] = [layer for layer in self.layers if IMAGES in layer.reads]
        if self.vision is not None:
            seeing += [self.vision.encoder, *self.vision.ways_out()]
        yield from {id(p): p for module in seeing for p in module.parameters()}.values()

    @property
    def needs_ids(self) -> bool:
        """Whether embeddings alone do not say what the model reads: its layers have inputs by id."""
        return self.per_layer_inputs is not None

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
        """Choose what is kept for the backward pass: one level for all layers, or one a layer. One for all is
        that of an encoder of images too; for others see its `set_activation_memory`.

        "auto" chooses the levels that repeat the least work within a budget of memory, when a batch to train
        on is there: see `FittingLevels` in layers/memory/, which tells of the other arguments.

        Raises:
            ValueError: an unknown level, the wrong number of them, or a budget that cannot be honoured.
        """
        self.fit_levels = None
        if levels == "auto":
            self.fit_levels = FittingLevels(memory_budget, optimizer_bytes, say)
            levels = "lean"
        elif memory_budget is not None:
            raise ValueError(f"memory_budget is {memory_budget!r}, but only the level 'auto' has a budget")
        if self.vision is not None and isinstance(levels, str):
            self.vision.encoder.set_activation_memory(levels)
        set_levels(self.layers, levels)
        if "offload" not in self.activation_memory:
            drop_unused_buffers()
        self._before_checkpointing, self._disabled_levels = None, ()

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute layers in the backward pass, as trainers switch it on: level `checkpoint`, or with
        `offload` the level `offload`, for the first of every `every_n_layers` layers.

        What `set_activation_memory` chose and recomputes already stays: a layer at `tiled` or `offload`, and
        "auto". After `gradient_checkpointing_disable` the levels come back that it found, lists too: trainers
        disable and enable around the pass of a reference model.

        `use_reentrant` and `preserve_rng_state` may be anything: the results are those of a run without
        checkpointing whatever they say.

        Raises:
            ValueError: another option, which would not be honoured.
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

        self._restore_levels(_Levels(some(before.layers), some(before.encoder), None))
        self._before_checkpointing, self._disabled_levels = before, ()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Back to what was chosen before checkpointing was enabled. Levels of layers that were recomputed by
        choice stay.
        """
        if self.is_gradient_checkpointing:
            self._disabled_levels += (self._chosen_levels(),)
        if self._before_checkpointing is not None:
            self._restore_levels(self._before_checkpointing)

    def _chosen_levels(self) -> _Levels:
        encoder = () if self.vision is None else self.vision.encoder.layers
        of_encoder = tuple(layer.activation_memory for layer in encoder)
        return _Levels(self.activation_memory, of_encoder, self.fit_levels)

    def _restore_levels(self, chosen: _Levels) -> None:
        set_levels(self.layers, chosen.layers)
        if self.vision is not None:
            self.vision.encoder.set_activation_memory(chosen.encoder)
        self.fit_levels = chosen.fit_levels
        if "offload" not in self.activation_memory:
            drop_unused_buffers()

    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether some layer runs again as a whole in the backward pass."""
        return any(level in RERUN for level in self.activation_memory)


def _recomputed(level: ActivationMemory) -> ActivationMemory:
    return level if level in RERUN else "checkpoint"


_OF_LANGUAGE = ("embed_tokens", "layers", "per_layer_inputs", "norm", "lm_head")


def _inputs_of_layers(spec: ModelSpec) -> PerLayerInputs | None:
    """
    Raises:
        ValueError: some layers have inputs of their own and others have not, or they differ in size, or the
            number of ids is missing.
    """
    sizes = {None if block.per_layer_input is None else block.per_layer_input.size for block in spec.blocks}
    size = next(iter(sizes), None)
    if len(sizes) > 1 or (size is None) != (spec.per_layer_vocab_size is None):
        raise ValueError(
            f"per_layer_vocab_size is {spec.per_layer_vocab_size}, and the layers' own inputs have the sizes "
            f"{sizes}; expected one size for all layers and a number of ids, or neither"
        )
    if size is None or spec.per_layer_vocab_size is None:
        return None
    return PerLayerInputs(
        spec.hidden_size, len(spec.blocks), size, spec.per_layer_vocab_size, spec.norm, spec.padding_idx
    )


def _hand_on_keys(layers: Sequence[Block]) -> None:
    """Let layers hand on their keys and values that later ones read.

    Raises:
        ValueError: the layer that is read comes later, has no keys of its own, others than are expected, or
            does not hand them on.
    """
    for i, reader in enumerate(layers):
        mixer = reader.spec.mixer
        if not isinstance(mixer, SharedAttentionSpec):
            continue
        read = layers[mixer.keys_of] if 0 <= mixer.keys_of < i else reader
        source = read.spec.mixer
        alike = ("num_key_value_heads", "head_dim", "window")
        if (
            not isinstance(source, AttentionSpec)
            or "keys of another layer" not in read.has_room_for
            or source.chunk is not None
            or any(getattr(source, name) != getattr(mixer, name) for name in alike)
        ):
            raise ValueError(
                f"layer {i} reads the keys and values of layer {mixer.keys_of}; expected an earlier one that "
                f"has keys of its own, hands them on, and has the same {', '.join(alike)}, and no chunks"
            )
        read.makes = keys_and_values(mixer.keys_of)
