"""Models that see, as transformers' models: `LigerForCausalLM` with what a processor gives of images.

    LigerForConditionalGeneration: ids [batch, seq], pixel_values, ... -> CausalLMOutputWithPast

What computes is `layers.vision`, within `LigerModel`; here stands what generation, trainers and sharding ask
of keywords.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.weight_map import Expr, Ref
from liger_models.hf.cache import knows_positions
from liger_models.hf.models import LigerForCausalLM
from liger_models.hf.module_names import move_to_the_top

PICTURES = (
    *("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids", "batch_num_images"),
    *("pixel_values_videos", "video_grid_thw", "video_position_ids", "num_frames_per_video"),
    *("second_per_grid_ts", "aspect_ratio_ids", "aspect_ratio_mask"),
)
"""What processors give of pictures, and"""
OF_TOKENS = ("mm_token_type_ids", "token_type_ids", "cross_attention_mask")
"""what they give of tokens beside ids and a mask."""
HEAD = "lm_head.weight"


class LigerForConditionalGeneration(LigerForCausalLM):
    """A causal language model that sees images."""

    def _place_parts(self) -> None:
        if not self.model.own_layout.root.startswith("model."):
            self.model_at_the_top = True
            move_to_the_top(self, self.model, self.model.own_layout.name(HEAD).removesuffix(".weight"))

    def weight_map(self, layout: Layout | None = None) -> dict[str, Expr]:
        """With the head, whose name differs between layouts."""
        layout, own, spec = layout or self.layouts[0], self.model.own_layout, self.model.spec
        head = Ref(layout.name(HEAD), (spec.vocab_size, spec.hidden_size))
        return {**super().weight_map(layout), own.name(HEAD): head}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Mixed precision of FSDP2 rounds every floating point tensor among the arguments, which seconds do
        not bear: they go on as numbers.
        """
        seconds = kwargs.get("second_per_grid_ts")
        if isinstance(seconds, Tensor):
            kwargs["second_per_grid_ts"] = seconds.tolist()
        return super().__call__(*args, **kwargs)

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
        image_sizes: Tensor | None = None,
        image_position_ids: Tensor | None = None,
        batch_num_images: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        video_position_ids: Tensor | None = None,
        num_frames_per_video: Tensor | None = None,
        second_per_grid_ts: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """As `LigerForCausalLM.forward`, with what the family's processor gives of images and videos: their
        names are in the signature, where `generate` and trainers look for them.

        Raises:
            TypeError: what another family's processor gives, by name.
            DataError: something is missing, or pictures and tokens do not fit.
        """
        given = locals()
        others |= {name: given[name] for name in (*PICTURES, *OF_TOKENS) if given[name] is not None}
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
        """Where a document's beginning is seen as a whole and nothing is to be learned, all is such (as in
        PaliGemma, whose processor then leaves out the kinds of tokens).
        """
        spec = self.model.spec.vision
        whole = getattr(spec, "spans", None) == "prefix" and spec.kinds not in given
        if input_ids is None or not whole or "pixel_values" not in given:
            return {}
        return {spec.kinds: torch.zeros_like(input_ids)}

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """transformers' own.

        Raises:
            ValueError: several sequences a prompt beside images that do not stand by rows: transformers would
                repeat each patch, or each image, and not those of a row.
        """
        by_rows = kwargs.get("aspect_ratio_ids") is not None
        if expand_size > 1 and not by_rows and any(kwargs.get(name) is not None for name in PICTURES):
            raise ValueError(
                f"{expand_size} sequences a prompt (num_beams, num_return_sequences) beside images are not "
                "supported; repeat the prompts and their images in what the processor is given"
            )
        whole: Any = super()
        return whole._expand_inputs_for_generation(expand_size, *args, **kwargs)

    def _prepare_position_ids_for_generation(self, inputs_tensor: Any, model_kwargs: Any) -> Any:
        """transformers' own, of text; None where images have positions on three axes, which are counted from
        what the model and the cache are shown.
        """
        held = knows_positions(model_kwargs.get("past_key_values"))
        shown = held or any(model_kwargs.get(name) is not None for name in PICTURES)
        if shown and getattr(self.model.spec.vision, "positions", None) is not None:
            return None
        whole: Any = super()
        return whole._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """transformers' own; a cache that holds the prompt holds its images."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            *args, **kwargs
        )
        cache = inputs.get("past_key_values")
        if cache is not None and cache.get_seq_length() and not kwargs.get("is_first_iteration"):
            for name in (*PICTURES, *OF_TOKENS):
                inputs.pop(name, None)
        return inputs
