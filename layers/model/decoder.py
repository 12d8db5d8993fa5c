"""A language model without its head: embeddings, blocks and a final norm.

input_ids [batch, seq] -> tokens [T] -> hidden [T, H] -> blocks -> norm -> hidden [T, H]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_models.convert.errors import ConfigError
from liger_models.layers.attention.backends import BACKENDS, AttentionBackend
from liger_models.layers.audio.audio import Audio
from liger_models.layers.audio.media import NO_MEDIA, Media, MediaParts
from liger_models.layers.blocks import (
    BLOCKS,
    EMBEDDINGS,
    IDS,
    IMAGES,
    Block,
    add_and_norm,
    joined,
    own_input,
    run_block,
)
from liger_models.layers.blocks.connections import connect
from liger_models.layers.blocks.per_layer_input import PerLayerInputs
from liger_models.layers.blocks.shared_transformer import make_shared
from liger_models.layers.memory import offloaded_bytes
from liger_models.layers.model.activation_levels import ActivationLevels
from liger_models.layers.model.call_checks import CallChecks, check_windows
from liger_models.layers.model.first_step import compile_first_step
from liger_models.layers.model.mtp import make_mtp
from liger_models.layers.model.recorded_layers import RecordedLayers
from liger_models.layers.model.weights_memory import WeightsMemory
from liger_models.layers.parts.altup import clamp_stored, make_stream_ends, spread_streams
from liger_models.layers.parts.embedder import embeds_ids
from liger_models.layers.parts.embedding import TokenEmbedding, make_positions
from liger_models.layers.parts.frequencies import make_frequencies
from liger_models.layers.parts.gated_streams import make_last_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import round_operands
from liger_models.layers.recompute.eager import not_compiled
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.encoder_gradients import EncoderGradients
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.tree import check_tree
from liger_models.layers.specs import AltUpSpec, ModelSpec
from liger_models.layers.vision import VISIONS
from liger_models.layers.vision.encoder import VisionEncoder


class Decoder(MediaParts, ActivationLevels, WeightsMemory):
    """Embeddings, blocks and a final norm; `make_decoder` adds them to any module.

    Attributes:
        gathered_once: whether sharded layers stay gathered after the forward pass.
        recorded: the layers' CUDA graphs, if they were asked for: `set_cuda_graphs`.
    """

    spec: ModelSpec
    embed_tokens: nn.Embedding
    gathered_once = False
    recorded: RecordedLayers | None = None

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
        """Build the parts of a spec.

        Raises:
            ValueError: an unknown attention backend.
        """
        if attention not in BACKENDS:
            raise ValueError(f"unknown attention backend {attention!r}; choose one of {', '.join(BACKENDS)}")
        self.spec = spec
        scale = spec.embed_scale, spec.padding_idx, spec.round_embed_scale, spec.id_norm
        self.embed_tokens = TokenEmbedding(spec.num_ids, spec.hidden_size, *scale)
        if spec.extra_ids:
            self.embed_tokens.axes = {"vocab": spec.vocab_size}
        self.embed_positions = make_positions(spec)
        self.embed_norm = None if spec.embed_norm is None else make_norm(spec.hidden_size, spec.embed_norm)
        self.embed_dropout = nn.Dropout(spec.embed_dropout) if spec.embed_dropout else None
        layers = [BLOCKS[b.topology](spec.hidden_size, b, i, attention) for i, b in enumerate(spec.blocks)]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        for layer in self.layers:
            round_operands(layer, spec.ternary)
        self.shared = make_shared(self.layers, spec.hidden_size, attention)
        self.per_layer_inputs = _inputs_of_layers(spec)
        connect(self.layers)
        if len({getattr(block.streams, "weighted_head", None) for block in spec.blocks}) > 1:
            raise ValueError("weighted_head differs between layers; all streams must end in the same way")
        self.stream_ends = make_stream_ends(spec.hidden_size, spec.streams)
        self.norm = make_last_norm(spec)
        self.rotary_emb = make_frequencies(spec.ropes)
        self.mtp = make_mtp(spec, attention)
        self.vision: Any = None
        if spec.vision is not None:
            self.vision = VISIONS[type(spec.vision)](spec.vision, spec.hidden_size, attention)
            self.image_gradients = EncoderGradients()
        self.audio: Audio | None = None
        if spec.audio is not None:
            self.audio = Audio(spec.audio, spec.hidden_size, attention)
            self.sound_gradients = EncoderGradients()

    def hidden_states(
        self,
        sequences: Sequences,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        media: Media = NO_MEDIA,
    ) -> Tensor:
        """The normalised output of the last block, [T, H]: `prepare_call`, then `run_layers`."""
        self.prepare_call(sequences, input_ids, media)
        return self.run_layers(sequences, input_ids, inputs_embeds, media=media)

    @not_compiled
    def prepare_call(
        self, sequences: Sequences, input_ids: Tensor | None = None, media: Media = NO_MEDIA
    ) -> None:
        """Check shapes and positions of a call and prepare it, before any computation that processes share.

        Args:
            input_ids: [batch, seq].
            media: of a model with encoders, whose `finish` reports whether images and tokens match.

        Raises:
            DataError: documents, padding, positions, images or sounds that this model does not support.
            ConfigError: sharded weights that cannot be clamped (layers/parts/altup.py).
        """
        if isinstance(self.spec.streams, AltUpSpec):
            clamp_stored(cast(Any, self.layers))
        if sequences.documents.tree is not None:
            check_tree(self.spec, media.vision)
        if sequences.documents.gapped_extent:
            check_windows(self.spec, sequences.documents.gapped_extent)
        for part, inputs in self.with_inputs(media):
            part.prepare(inputs, sequences, input_ids)
        if not self.spec.padding_has_positions:
            sequences.count_tokens_alone()
        if self.spec.learned_positions is not None:
            sequences.positions.check_end(self.spec.learned_positions, sequences.documents.shape)
        sequences.prepare_rotary(self.spec.ropes, self.rotary_factors())

    def rotary_factors(self) -> Tensor | None:
        """The factors of learned rotary frequencies, [dim / 2] float32; None if they are not learned."""
        return None if self.rotary_emb is None else self.rotary_emb()

    def begin_checks(self, checks: CallChecks, media: Media = NO_MEDIA, refusal: Any = None) -> None:
        """Begin the checks of a prepared call, of its images and sounds, and of its experts (`Refusal`)."""
        # Processes that choose levels together wait for each other.
        wait = self.fit_levels is not None and self.fit_levels.plan is None
        wrong, explanations = [], []
        for part, inputs in self.with_inputs(media):
            wrong.append(inputs.wrong)
            explanations.append(partial(part.finish, inputs))
        if refusal is not None:
            wrong.append(refusal.wrong)
            explanations.append(refusal.finish)
        known = [one.reshape(()).long() for one in wrong if one is not None]
        any_wrong = torch.stack(known).amax() if known else None
        checks.begin(any_wrong, lambda: [explain() for explain in explanations], wait)

    @not_compiled
    def run_layers(
        self,
        sequences: Sequences,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        inputs_of_layers: list[Tensor] | None = None,
        media: Media = NO_MEDIA,
        embedded: list[Tensor] | None = None,
    ) -> Tensor:
        """The normalised output of the last block, [T, H], from [batch, seq] ids or [batch, seq, H]
        embeddings, or from both if layers have per-id inputs. Requires `prepare_call`.

        Appends the residual stream before each layer, [batch, seq, H], or several streams [batch, seq, n, H],
        and zero at padding, to a list
        `inputs_of_layers`, without features added there from images. The layers read these tensors, so that
        gradients flow through them. Appends the embeddings, [T, H] and with features of images and sounds, to
        a list `embedded`.
        """
        if self.fit_levels is not None and torch.is_grad_enabled():
            self.fit_levels(self, sequences, media.pictures, media.sounds)
        # The checks report an id outside the vocabulary; until then it must not stop the device.
        ids = None if input_ids is None else sequences.pack(input_ids).clamp(0, self.spec.num_ids - 1)
        inputs_embeds = self.embed_ids(ids) if inputs_embeds is None else sequences.pack(inputs_embeds)
        if self.vision is not None:
            inputs_embeds = self.vision.place(media.vision, inputs_embeds)
        if self.audio is not None:
            inputs_embeds = self.audio.place(media.audio, inputs_embeds)
        if embedded is not None:
            embedded.append(inputs_embeds)
        layer_inputs = self._own_inputs(ids, inputs_embeds, media)
        if self.vision is not None:
            layer_inputs |= self.vision.layer_inputs(media.vision, sequences)
        if self.spec.input_scale != 1.0:
            inputs_embeds = inputs_embeds * self.spec.input_scale
        if self.embed_positions is not None:
            inputs_embeds = self.embed_positions(inputs_embeds, sequences.positions.ids)
        if self.embed_norm is not None:
            inputs_embeds = cast(Tensor, self.embed_norm(inputs_embeds))
        if self.embed_dropout is not None:
            inputs_embeds = self.embed_dropout(inputs_embeds)
        if self.spec.streams is not None:
            inputs_embeds = spread_streams(inputs_embeds, self.spec.streams.count, self.stream_ends)
        compile_first_step(self, inputs_embeds, sequences)
        run = partial(self._run_blocks, inputs_of_layers=inputs_of_layers, vision_inputs=media.vision)
        first = [inputs_embeds]
        del inputs_embeds  # frozen embeddings are freed after layer 0
        if self.recorded is not None and torch.is_grad_enabled() and sequences.cache is None:
            if inputs_of_layers is not None or getattr(media.vision, "deep", None):
                raise ConfigError(_NOT_RECORDED)
            out = self.recorded(first, sequences, layer_inputs, run)
        else:
            out = run(first, sequences, layer_inputs)
        if self.vision is not None and self.training:
            with_images = media.pictures is not None or sequences.modality is not None
            self.image_gradients.watch(out, self.parts_of_images(), with_images)
        if self.audio is not None and self.training:
            self.sound_gradients.watch(out, self.parts_of_sounds(), media.sounds is not None)
        return out

    def _run_blocks(
        self,
        first: list[Tensor],
        sequences: Sequences,
        layer_inputs: dict[str, Tensor],
        inputs_of_layers: list[Tensor] | None,
        vision_inputs: Any,
    ) -> Tensor:
        """The layers and the final norm of `run_layers`. Takes the input of layer 0, [T, H], out of `first`,
        so that nothing else holds it.
        """
        x, residual = first.pop(), None
        if self.shared is not None:
            layer_inputs[EMBEDDINGS] = x
        offload = Offload(self._offloaded_bytes(x, sequences))
        if self.vision is not None and vision_inputs is not None:
            x = self.vision.add(vision_inputs, -1, x)
        for number, layer in enumerate(self.layers):
            if inputs_of_layers is not None and number == 0:
                x = self._noted(x, inputs_of_layers, sequences)
            if IMAGES not in layer.reads or IMAGES in layer_inputs:
                read = [layer_inputs[name] for name in layer.reads]
                x, residual, *made = run_block(layer, x, residual, sequences, *read, offload=offload)
                layer_inputs.update(zip(layer.makes, made, strict=True))
            if inputs_of_layers is not None and number + 1 < len(self.layers):
                x, residual = joined(x, residual, self.spec.float32_stream)
                # Without the features that images add, as in transformers.
                x = self._noted(x, inputs_of_layers, sequences)
            if self.vision is not None and vision_inputs is not None:
                x = self.vision.add(vision_inputs, number, x)
        offload.finish()
        if self.stream_ends is not None:
            x = self.stream_ends(x)
        return add_and_norm(self.norm, x, residual)[0]

    def _noted(self, x: Tensor, inputs_of_layers: list[Tensor], sequences: Sequences) -> Tensor:
        """Note the input of a layer, [batch, seq, H], or of several streams [batch, seq, n, H]. Returns it as
        the layer reads it.
        """
        if self.spec.streams is None:
            inputs_of_layers.append(sequences.unpack(x))
            return sequences.pack(inputs_of_layers[-1])
        inputs_of_layers.append(sequences.unpack(x.unflatten(-1, (self.spec.streams.count, -1))))
        return sequences.pack(inputs_of_layers[-1]).flatten(1)

    def set_cuda_graphs(self, enabled: bool = True) -> None:
        """Record the layers of training steps as CUDA graphs, and replay them where the shapes of a batch
        repeat: layers/model/recorded_layers.py. For small batches, whose kernels a host launches more slowly
        than a GPU runs them. Results have the same bits.

        The first training call with new shapes runs as usual, the second records. Calls without gradients are
        not recorded. Each recording needs the memory of a step's activations, in a pool of their own, and
        gradients keep their place in it: copy those that you keep beyond a step. What cannot be recorded
        raises ConfigError in the call: layers with hooks, sharded or on the host, several processes.
        Layers of a trained image encoder are recorded, too, for each number and size of pictures, unless some
        have windows of their own, or several give outputs.
        """
        self.recorded = RecordedLayers(self) if enabled else None
        encoder = None if self.vision is None else self.vision.encoder
        if isinstance(encoder, VisionEncoder):
            encoder.recorded = RecordedLayers(encoder) if enabled else None

    def recorded_parts(self) -> list[nn.Module]:
        """The modules that `recorded` runs."""
        more = [] if self.shared is None else [*self.shared.values()]
        return [*self.layers, self.norm, *more, *([] if self.stream_ends is None else [self.stream_ends])]

    def _offloaded_bytes(self, x: Tensor, sequences: Sequences) -> int | None:
        """Host memory of this call's layers at the level `offload`; None without such layers."""
        if "offload" not in self.activation_memory or not torch.is_grad_enabled():
            return None
        sizes = len(x), sequences.documents.max_seqlen, x.element_size(), sequences.slice is not None
        return offloaded_bytes(self.layers, *sizes)

    def layer_class_names(self) -> set[str]:
        """Class names of the layers, for sharding libraries: only this model's own, since they reject a name
        that no module has.
        """
        encoder = [layer for part in self.encoders for layer in part.encoder.layers]
        shared = () if self.shared is None else [block.shared_transformer for block in self.shared.values()]
        return {type(layer).__name__ for layer in (*encoder, *self.layers, *shared)}

    def _own_inputs(self, ids: Tensor | None, inputs_embeds: Tensor, media: Media) -> dict[str, Tensor]:
        """The per-layer inputs, by name."""
        own = {IDS: ids} if ids is not None and self._looks_up_ids else {}
        if self.per_layer_inputs is None:
            return own
        assert ids is not None  # ensured by `batch_shape`
        padding = self.spec.padding_idx or 0  # whose input the tokens of images and sounds use
        if media.vision is not None and not embeds_ids(self.vision):
            ids = self.vision.ids_of_text(media.vision, ids, padding)
        if media.audio is not None and media.audio.is_audio is not None and not embeds_ids(self.audio):
            ids = ids.masked_fill(media.audio.is_audio, padding)
        inputs = self.per_layer_inputs(ids, inputs_embeds)
        return {own_input(i): own for i, own in enumerate(inputs)}

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules of each part: "language"; "mtp", the modules for multi-token prediction; "vision" and
        "audio", the encoders; and "projector", all that lies between these and the language model.
        """
        own = (getattr(self, name, None) for name in _OF_LANGUAGE)
        found: dict[str, list[nn.Module]] = {"language": [module for module in own if module is not None]}
        if self.mtp is not None:
            found |= {"mtp": [self.mtp]}
        named = (("vision", self.vision), ("audio", self.audio))
        found |= {name: [part.encoder] for name, part in named if part is not None}
        if self.encoders:
            found |= {"projector": [module for part in self.encoders for module in part.ways_out()]}
        return found

    def shared_modules(self) -> set[nn.Module]:
        """Modules that run in more than one layer."""
        held: list[Any] = [] if self.shared is None else [*self.shared.values()]
        blocks = [block.shared_transformer for block in held]
        return {module for block in blocks if block.uses > 1 for module in block.modules()}

    @property
    def needs_ids(self) -> bool:
        """Whether embeddings alone are insufficient, because layers have per-id inputs."""
        return self.per_layer_inputs is not None or self._looks_up_ids

    @property
    def _looks_up_ids(self) -> bool:
        return any(IDS in layer.reads for layer in self.layers)


_NOT_RECORDED = (
    "CUDA graphs were asked for, and a call with output_hidden_states, or with images whose features are "
    "added in several layers, cannot be recorded: leave these out, or call model.set_cuda_graphs(False)"
)

_OF_LANGUAGE = (
    "embed_tokens",
    "embed_positions",
    "embed_norm",
    "layers",
    "shared",
    "per_layer_inputs",
    "stream_ends",
    *("norm", "head_layers", "lm_head"),
)


def _inputs_of_layers(spec: ModelSpec) -> PerLayerInputs | None:
    """Build the inputs of all layers; None if they have none.

    Raises:
        ValueError: only some layers have own inputs, or inputs of different sizes, or no number of ids.
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
        spec.hidden_size, len(spec.blocks), size, spec.per_layer_vocab_size, spec.last_norm, spec.padding_idx
    )
