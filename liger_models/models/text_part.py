"""The text part of a multimodal checkpoint, read as a text-only checkpoint."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from liger_models.architectures import find_architecture, list_architectures
from liger_models.architectures.registry.multimodal import MULTIMODAL, text_config
from liger_models.architectures.registry.ternary import asks_for_rounding
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.checkpoints.source_layout import repeats
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import UnsupportedModelError

if TYPE_CHECKING:
    from liger_models.models.causal_lm import LigerCausalLM


def text_config_of(config: HFConfig) -> HFConfig:
    """Config of a multimodal model's text part; of a language model, its own.

    Raises:
        UnsupportedModelError, ConfigError: see `text_config`.
    """
    if config.model_type not in MULTIMODAL:
        return config
    if asks_for_rounding(config.raw):
        raise UnsupportedModelError(
            f"{config.name}: text_only: quantization_config asks for weights of three values, which is "
            "supported in checkpoints of language models alone"
        )
    text = config.with_raw(text_config(config.raw, config.name))
    if text.model_type not in list_architectures():
        raise UnsupportedModelError(
            f"{config.name}: text_only: transformers has no language model {text.model_type!r}, so nothing "
            f"else could read it; load the {config.model_type!r} model as a whole, and freeze its encoder"
        )
    return text


def select_text(
    config: HFConfig, text: HFConfig, reader: CheckpointReader
) -> tuple[HFConfig, list[TensorInfo]]:
    """Restrict a reader to the text part's tensors, under their names in a text-only checkpoint.

    Args:
        config, text: of the checkpoint, and of its text part.
        reader: of the checkpoint.

    Returns:
        The text's config, with the head tied if it is in the files; and the dropped tensors.
    """
    family, vocab_size = MULTIMODAL[config.model_type], text.raw["vocab_size"]
    layout = find_architecture(text.model_type).layouts[0]
    head, embedding = layout.name("lm_head.weight"), layout.name("embed_tokens.weight")
    names = {name: family.name_in_text(name, config.raw) for name in reader.tensors}
    rest, of_images = [], family.extra_ids if type(vocab_size) is int and vocab_size > 0 else 0
    for name, new in names.items():
        rows = reader.tensors[name].shape[:1]
        if of_images and new == embedding and rows == (vocab_size + of_images,):
            rest.append(reader.cut(name, vocab_size))
    left_out = [*reader.rename(names.get), *rest]
    if text.raw["tie_word_embeddings"] and head in reader.tensors:
        # The reference uses a head that is in the files, whatever the config says or leaves out, which is
        # often wrong.
        text = text.with_raw({**text.raw, "tie_word_embeddings": repeats(reader, head, embedding)})
    return text, left_out


def save_alone(model: LigerCausalLM, left_out: Sequence[TensorInfo]) -> None:
    """Note what a text part left out, and how it is saved: in a layout of language models."""
    if model.layout.of_parts:
        model.layout = model.architecture.layouts[0]
    model.left_out = tuple(info.name for info in left_out)


def warn_of(left_out: list[TensorInfo], config: HFConfig, text: HFConfig) -> None:
    """Warn the caller of `from_hub` of the tensors that were not read."""
    towers = Counter(info.name.removeprefix("model.").partition(".")[0] for info in left_out)
    warnings.warn(
        f"{config.name}: only the text part of this {config.model_type!r} checkpoint was loaded; left out "
        f"were {len(left_out)} tensors of {sum(info.nbytes for info in left_out)} bytes ("
        + ", ".join(f"{count} of {tower}" for tower, count in towers.items())
        + f"). What is saved from it is a {text.model_type!r} checkpoint",
        stacklevel=3,
    )
