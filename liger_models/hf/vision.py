"""Multimodal models as transformers' models: `LigerForCausalLM` with a processor's images and sounds.

    LigerForConditionalGeneration: ids [batch, seq], pixel_values, ... -> CausalLMOutputWithPast

`LigerModel` runs the computation, through `layers.vision` and `layers.audio`. This file handles the keywords
of generation, trainers and sharding, and defines the base model methods that other tools call (METHODS).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from liger_models.convert.errors import DataError
from liger_models.hf.cache import CACHE, knows_positions
from liger_models.hf.checkpoints.module_names import LanguageModel, move_to_the_top
from liger_models.hf.models import HEAD, LigerForCausalLM
from liger_models.layers.audio.sounds import KEYWORDS, repeat_sounds
from liger_models.layers.model.call_checks import refuse_unknown
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.vision.grid_inputs import DOWNSAMPLING, seconds_as_numbers
from liger_models.layers.vision.pictures import Pictures
from liger_models.layers.vision.processor_inputs import take_pictures
from liger_models.layers.vision.repeated import repeat_pictures
from liger_models.layers.vision.vision import SOUND_OF_VIDEO
from liger_models.layers.vision.vision_inputs import VisionInputs

PICTURES = (
    *("pixel_values", "image_grid_thw", "image_grid_hw", "image_sizes"),
    *("target_sizes", "target_sizes_videos"),
    *("image_position_ids", "batch_num_images", "pixel_values_local", "num_local_patches"),
    *("pixel_values_videos", "video_grid_thw", "video_position_ids", "num_frames_per_video"),
    *(
        "second_per_grid_ts",
        "video_second_per_grid",
        "aspect_ratio_ids",
        "aspect_ratio_mask",
        "spatial_shapes",
        "pixel_attention_mask",
    ),
    *("image_merge_sizes", "video_merge_sizes", "video_compression_mask"),
    *("pixel_mask", "image_pixel_values", "image_attention_mask"),
    *("image_token_pooling", "image_grids", "image_num_crops", "video_token_pooling", "video_grids"),
)
"""Outputs of processors for images and videos."""
MEDIA = (*PICTURES, *KEYWORDS)
"""The same, and for sounds."""
OF_TOKENS = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "cross_attention_mask")
"""Outputs of processors for tokens, in addition to ids and a mask."""


@can_return_tuple
def get_image_features(self: Any, pixel_values: Tensor, **others: Any) -> BaseModelOutputWithPooling:
    """Compute the projected features of images: `pooler_output` holds [tokens, H] for each.

    Args:
        pixel_values: from the processor.
        others: its other image inputs, such as `image_grid_thw`.

    Raises:
        DataError: an input is missing or does not fit.
        TypeError: a keyword is not an image input.
    """
    return _features(self.base_decoder, {"pixel_values": pixel_values, **others})


@can_return_tuple
def get_video_features(self: Any, pixel_values_videos: Tensor, **others: Any) -> BaseModelOutputWithPooling:
    """Compute the projected features of videos, as `get_image_features`."""
    return _features(self.base_decoder, {"pixel_values_videos": pixel_values_videos, **others})


@can_return_tuple
def get_audio_features(self: Any, input_features: Tensor, **others: Any) -> BaseModelOutputWithPooling:
    """Compute the projected features of sounds: `pooler_output` [tokens of all sounds, H]. Where features
    depend on the time in a recording, `input_ids` say which clips follow one another.
    """
    decoder, given = self.base_decoder, {"input_features": input_features, **others}
    inputs = decoder.audio.take(given)
    ids = given.pop("input_ids", None) if decoder.spec.audio.times is not None else None
    refuse_unknown(given)
    if inputs.sounds is None:
        raise DataError("no sounds were given; expected the processor's output for them")
    if ids is not None:  # which clips are of one recording
        decoder.audio.prepare(inputs, Sequences.from_call(tuple(ids.shape), ids.device, None), ids)
        decoder.audio.finish(inputs)
    return BaseModelOutputWithPooling(pooler_output=decoder.audio(inputs.sounds, windows=inputs.windows))


def _features(decoder: Any, given: dict[str, Any]) -> BaseModelOutputWithPooling:
    pictures = take_pictures(decoder.spec.vision, decoder.vision.merge, given)
    refuse_unknown(given)
    if pictures is None:
        raise DataError("no pixels were given; expected the processor's output for images or videos")
    features, *deep = decoder.vision(pictures)
    counts = pictures.counts(decoder.vision.merge)
    if decoder.spec.vision.layered:
        made, layers = BaseModelOutputWithPooling(), decoder.spec.vision.projector.layers
        of_layers = zip(layers, (features, *deep), strict=True)
        made["deepstack_features"] = [(layer, x.split(counts)) for layer, x in of_layers]
        return made
    return BaseModelOutputWithPooling(pooler_output=features[: sum(counts)].split(counts))


def get_rope_index(
    self: Any,
    input_ids: Tensor,
    mm_token_type_ids: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Any = None,
    attention_mask: Tensor | None = None,
    second_per_grids: Any = None,
    target_sizes: Tensor | None = None,
    target_sizes_videos: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return (positions [3, batch, seq], 0 at padding; next position minus the row's number of tokens,
    [batch, 1]) for text with images, as `forward` computes them.

    Raises:
        DataError: the grids do not match the tokens.
    """
    second_per_grid_ts = second_per_grids if second_per_grid_ts is None else second_per_grid_ts
    given = (
        target_sizes if image_grid_thw is None else image_grid_thw,
        target_sizes_videos if video_grid_thw is None else video_grid_thw,
    )
    tables = ([] if grids is None else torch.as_tensor(grids).tolist() for grids in given)
    images, videos = ([(*[1] * (3 - len(grid)), *grid) for grid in table] for table in tables)
    seconds = None if second_per_grid_ts is None else torch.as_tensor(second_per_grid_ts).tolist()
    vision = self.base_decoder.vision
    spec = vision.spec
    forms = {"paired": spec.paired, "rows_end": spec.rows_end}
    pictures = Pictures(torch.empty(0), images + videos, len(images), seconds, **forms)
    vision_inputs = VisionInputs(pictures if pictures.grids else None, mm_token_type_ids)
    shape = (input_ids.shape[0], input_ids.shape[1])
    sequences = Sequences.from_call(shape, input_ids.device, attention_mask)
    vision.prepare(vision_inputs, sequences, input_ids)
    vision.finish(vision_inputs)
    axes = sequences.positions.axes
    if axes is None:  # text only: count tokens without padding
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        axes = sequences.pack(mask.cumsum(1) - 1).expand(4 if spec.rows_end else 3, -1)
    rows = sequences.pack(torch.arange(shape[0], device=input_ids.device)[:, None].expand(shape))
    last = rows.new_full((shape[0],), -1).scatter_reduce(0, rows, axes.amax(0), "amax")
    deltas = last + 1 - rows.bincount(minlength=shape[0])
    return torch.stack([sequences.unpack(axis) for axis in axes]), deltas[:, None]


METHODS = {
    "get_image_features": get_image_features,
    "get_video_features": get_video_features,
    "get_audio_features": get_audio_features,
    "get_rope_index": get_rope_index,
}
"""Methods that some of transformers' own models have; ours have them where those do."""


class LigerForConditionalGeneration(LigerForCausalLM):
    """Causal language model with image or audio inputs."""

    def _place_parts(self) -> None:
        if not self.base_decoder.own_layout.root.startswith("model."):
            self.model_at_the_top = True
            move_to_the_top(
                self, self.base_decoder, self.base_decoder.own_layout.name(HEAD).removesuffix(".weight")
            )
            LanguageModel.within(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with the seconds of videos converted to numbers: `seconds_as_numbers`."""
        return super().__call__(*args, **seconds_as_numbers(kwargs))

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        image_grid_hw: Tensor | None = None,
        image_sizes: Tensor | None = None,
        target_sizes: Tensor | None = None,
        target_sizes_videos: Tensor | None = None,
        downsample_mode: str | None = None,
        image_position_ids: Tensor | None = None,
        batch_num_images: Tensor | None = None,
        pixel_values_local: Tensor | None = None,
        num_local_patches: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        video_position_ids: Tensor | None = None,
        num_frames_per_video: Tensor | None = None,
        second_per_grid_ts: Tensor | None = None,
        video_second_per_grid: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        image_merge_sizes: Tensor | None = None,
        video_merge_sizes: Tensor | None = None,
        video_compression_mask: Tensor | None = None,
        pixel_mask: Tensor | None = None,
        image_pixel_values: Tensor | None = None,
        image_attention_mask: Tensor | None = None,
        image_token_pooling: Tensor | None = None,
        image_grids: Tensor | None = None,
        image_num_crops: Tensor | None = None,
        video_token_pooling: Tensor | None = None,
        video_grids: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        moe_mm_token_type_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        feature_attention_mask: Tensor | None = None,
        input_features_mask: Tensor | None = None,
        audio_input_features: Tensor | None = None,
        audio_embed_sizes: Tensor | None = None,
        audio_attention_mask: Tensor | None = None,
        use_audio_in_video: bool | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Any:
        """Run `LigerForCausalLM.forward` with the inputs of the family's processor. Their names are in the
        signature, where `generate` and trainers look for them.

        Raises:
            TypeError: an input that this family does not take.
            DataError: an input is missing, or images or sounds do not match the tokens.
        """
        given = locals()
        named = (*MEDIA, *OF_TOKENS, SOUND_OF_VIDEO, DOWNSAMPLING, "cache")
        others |= {name: given[name] for name in named if given[name] is not None}
        if labels is None and "shift_labels" not in others:
            others |= self._all_prefix(input_ids, others)
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            labels,
            use_cache,
            logits_to_keep,
            **others,
        )

    def _all_prefix(self, input_ids: Tensor | None, given: dict[str, Any]) -> dict[str, Tensor]:
        """Mark all tokens as prefix when a prefix-LM is given no labels (PaliGemma, whose processor then
        omits the token types).
        """
        spec = self.base_decoder.spec.vision
        whole = getattr(spec, "spans", None) == "prefix" and spec.kinds not in given
        if input_ids is None or not whole or "pixel_values" not in given:
            return {}
        return {spec.kinds: torch.zeros_like(input_ids)}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does. In families whose adapters are for sounds, those that were loaded or
        added by the model's own methods are switched on if there are sounds, and off otherwise, and stay so.
        """
        audio = self.base_decoder.spec.audio
        whole: Any = super()
        if audio is not None and audio.adapts_language and self._hf_peft_config_loaded:
            heard = kwargs.get(audio.sounds.features) is not None
            (self.enable_adapters if heard else self.disable_adapters)()
        return whole.generate(*args, **kwargs)

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Expand inputs for several sequences per prompt, as transformers does, with each row's own pictures
        and sounds: transformers would repeat each image, patch or sound.
        """
        whole: Any = super()
        shown, heard = (
            {name: kwargs.pop(name) for name in names if kwargs.get(name) is not None}
            for names in (PICTURES, KEYWORDS)
        )
        ids, expanded = whole._expand_inputs_for_generation(expand_size, *args, **kwargs)
        spec = self.base_decoder.spec
        if shown and expand_size > 1:
            shown = repeat_pictures(spec.vision, shown, kwargs["input_ids"], expand_size)
        if heard and expand_size > 1:
            heard = repeat_sounds(spec.audio, heard, kwargs["input_ids"], expand_size)
        return ids, expanded | shown | heard

    def _prepare_position_ids_for_generation(self, inputs_tensor: Any, model_kwargs: Any) -> Any:
        """Prepare positions of text as transformers does; None for models with three position axes, whose
        positions are computed in the forward from its inputs and the cache.
        """
        held = knows_positions(model_kwargs.get(CACHE))
        shown = held or any(model_kwargs.get(name) is not None for name in PICTURES)
        if shown and getattr(self.base_decoder.spec.vision, "positions", None) is not None:
            return None
        whole: Any = super()
        return whole._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as transformers does. Images and sounds are passed unless the cache holds the prompt
        already; transformers would drop them in an assistant model's first call.
        """
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            *args, **kwargs
        )
        cache = inputs.get(CACHE)
        if cache is None or not cache.get_seq_length():
            inputs |= {name: kwargs[name] for name in MEDIA if kwargs.get(name) is not None}
        elif not kwargs.get("is_first_iteration"):
            for name in (*MEDIA, *OF_TOKENS):
                inputs.pop(name, None)
        ids = inputs.get("input_ids")
        for name in OF_TOKENS:  # transformers does not extend these to draft tokens
            given = inputs.get(name)
            if ids is not None and given is not None and given.shape[1] < ids.shape[1]:
                more = given[:, -1:] if name == "cross_attention_mask" else torch.zeros_like(given[:, -1:])
                drafted = ids.shape[1] - given.shape[1]
                inputs[name] = torch.cat([given, more.repeat_interleave(drafted, 1)], 1)
        return inputs

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' generator, with drafts cut before any placeholder. Prompt lookup may copy such
        tokens from the prompt, and no image or sound belongs to the copies.
        """
        generator: Any = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        draft, ids = generator.get_candidates, [*self.base_decoder.spec.placeholders.values()]

        def get_candidates(input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            candidates, logits = draft(input_ids, *args, **kwargs)
            known = input_ids.shape[1]
            placeholders = torch.isin(candidates[0, known:], candidates.new_tensor(ids)).nonzero()
            if not len(placeholders):
                return candidates, logits
            kept = int(placeholders[0])
            return candidates[:, : known + kept], None if logits is None else logits[:, :kept]

        generator.get_candidates = get_candidates
        return generator
