"""Verification of a checkpoint: its round trip is exact, and its results match transformers. Used by
`liger-models verify` and `liger-models card`.

The distance of two tensors is |ours - theirs| / |theirs|, over a whole tensor, and must be at most 1e-5.
If a gradient cancels almost completely, no two float32 programs agree that closely; the bound is then derived
from the distance between two of transformers' own implementations of attention.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.round_trip import RoundTrip, verify_roundtrip
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import UnsupportedModelError
from liger_models.convert.quantised.reader import ModelReader
from liger_models.images.pieces import documents_with_media
from liger_models.images.scenes import Image, Scenes
from liger_models.images.sounds import Sound
from liger_models.layers.experts.moe import Experts
from liger_models.layers.specs import ModelSpec, SubsampledSounds
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.loading import from_config, from_hub
from liger_models.models.matching import exact_dtypes, find_layout

# float32 rounds to 6e-8, and between a parameter and its gradient lie some hundred roundings.
TOLERANCE = 1e-5
# Their spread measures attention only; ours differs from theirs in other operations, too.
SPREADS = 4
ROWS, LENGTH = 2, 64


def verify_bytes(folder: Path) -> RoundTrip:
    """Convert every tensor to our layout and back, one parameter at a time, and compare."""
    skeleton = from_config(folder, device="meta", dropout=0.0)
    with ModelReader(folder) as reader:
        find_layout(skeleton, reader)
        dtypes = exact_dtypes(skeleton, reader.dtypes)
        return verify_roundtrip(reader, skeleton.weight_map(), dtypes)


@dataclass(frozen=True)
class Comparison:
    """Distances of our results from those of transformers.

    Attributes:
        transformers: its version.
        length: tokens in each of the `ROWS` rows of random ids, the longest.
        images, sounds: numbers of images and sounds among them.
        distance: of ours from theirs, for "logits", "loss" and every gradient by its name in transformers;
            for stacked experts one by one, as `...experts.down_proj[3]`.
        spread: the same between two of their own implementations.
        lonely: names that only one side has.
    """

    transformers: str
    length: int
    images: int
    sounds: int
    distance: Mapping[str, float]
    spread: Mapping[str, float]
    lonely: tuple[str, ...]

    @property
    def gradients(self) -> list[str]:
        """Names of the gradients, the farthest first."""
        return sorted(self.distance.keys() - {"logits", "loss"}, key=lambda name: -self.distance[name])

    @property
    def too_far(self) -> list[str]:
        return [
            name
            for name, distance in self.distance.items()
            if not distance <= max(TOLERANCE, SPREADS * self.spread[name])
        ]


def verify_numbers(folder: Path) -> Comparison:
    """Compare logits, loss and every gradient with those of transformers, in float32 on random ids, with
    random images and sounds for multimodal models.

    Raises:
        UnsupportedModelError: the installed transformers does not have the family.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    skeleton = from_config(folder, device="meta", dropout=0.0)
    call, images, sounds = _call_of(skeleton.spec, folder)
    # One model after the other: both at once would need half as much again.
    # By its name: the Auto class does not know every family, and may have been given ours.
    name, borrowed = skeleton.architecture.reference, skeleton.architecture.reference_of
    if not hasattr(transformers, name):
        raise UnsupportedModelError(f"transformers {transformers.__version__} does not have {name}")
    reference = (
        getattr(transformers, name)
        .from_pretrained(
            folder,
            **({"config": config_class(skeleton.architecture).from_pretrained(folder)} if borrowed else {}),
            dtype=torch.float32,
            attn_implementation="eager",
        )
        .eval()  # as it is: without dropout
    )
    mask_as_family(skeleton.architecture, reference)
    _freeze_untrained(reference, skeleton)
    stacks = _names_of_stacks(skeleton)
    expected = _results(reference, call) | _gradients(reference, stacks)
    reference.zero_grad()  # lets go of the gradients, which are kept in `expected`
    hears = isinstance(getattr(skeleton.spec.audio, "sounds", None), SubsampledSounds)
    again = _summed_otherwise(reference, call, skeleton.spec.is_recurrent or hears)
    again |= _gradients(reference, stacks)
    least = {name: _least_size(name, expected) for name in expected}
    spread = {name: relative_distance(again[name], expected[name], least[name]) for name in expected}
    del reference, again

    model = from_hub(folder, dtype=torch.float32, device="cpu", dropout=0.0).eval()
    found = _results(model, call, return_logits=True)
    found |= _gradients_as_named_in(expected, model, stacks)
    distance = {
        name: relative_distance(found[name], expected[name], least[name])
        for name in found.keys() & expected.keys()
    }
    lonely = tuple(sorted(found.keys() ^ expected.keys()))
    return Comparison(
        transformers.__version__, call["input_ids"].shape[1], images, sounds, distance, spread, lonely
    )


def _call_of(spec: ModelSpec, folder: Path) -> tuple[dict[str, Any], int, int]:
    """Random rows of one length, and the numbers of images and of sounds in them."""
    length = min(LENGTH, spec.position_limit or LENGTH)
    generator = torch.Generator().manual_seed(0)
    if spec.vision is None and spec.audio is None:
        ids = torch.randint(spec.num_labels, (ROWS, length), generator=generator)
        return {"input_ids": ids, "labels": ids}, 0, 0
    documents = documents_with_media(spec)
    call = Scenes(spec, HFConfig.load(folder).raw, generator).make_even(documents)
    pieces = [piece for document in documents for piece in document]
    images, sounds = (sum(isinstance(piece, kind) for piece in pieces) for kind in (Image, Sound))
    return call, images, sounds


def _results(model: nn.Module, call: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    output = model(**call, **options)
    output.loss.backward()
    return {"logits": output.logits.detach(), "loss": output.loss.detach()}


def config_class(architecture: Architecture) -> Any:
    """The class of a family's config in transformers."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if architecture.reference_of:
        return CONFIG_MAPPING[architecture.model_type]
    return getattr(transformers, architecture.reference).config_class


def mask_as_family(architecture: Architecture, reference: Any) -> None:
    """Let every forward pass of a family's reference mask the tokens of images as its `generate` does, if the
    family follows that (`Architecture.masks_of_generation`), and number images by row
    (`Architecture.images_by_document`), and encode and project sounds by row
    (`Architecture.sounds_by_document`). Batch norms use their stored moments in training, too.
    """
    for module in reference.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = functools.partial(_with_stored_moments, module)  # type: ignore[method-assign]
    if architecture.sounds_by_document:
        media = reference.model.embed_tokens_extend
        encoder = media.audio_embed.encoder
        encoder.forward = functools.partial(_clips_alone, encoder.forward)
        media.forward = functools.partial(_media_by_row, media.forward)
        _note_states_once(reference)
    if architecture.images_by_document:
        reference.model.get_rope_index = functools.partial(_positions_by_row, reference.model.get_rope_index)
    if not architecture.masks_of_generation:
        return

    def masks(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        kinds, ids = kwargs.get("mm_token_type_ids"), kwargs.get("input_ids")
        if kinds is None or ids is None or isinstance(kwargs.get("attention_mask"), dict):
            return None
        made = type(reference).create_masks_for_generate(
            config=module.config,
            inputs_embeds=module.get_input_embeddings()(torch.zeros_like(ids)),
            attention_mask=kwargs.get("attention_mask"),
            past_key_values=kwargs.get("past_key_values"),
            position_ids=kwargs.get("position_ids"),
            mm_token_type_ids=kinds,
        )
        return args, {**kwargs, "attention_mask": made}

    reference.model.register_forward_pre_hook(masks, with_kwargs=True)


def _with_stored_moments(norm: Any, x: Tensor) -> Tensor:
    """The output of a batch norm in evaluation mode."""
    moments = norm.running_mean, norm.running_var
    return torch.nn.functional.batch_norm(x, *moments, norm.weight, norm.bias, eps=norm.eps)


def _note_states_once(reference: Any) -> None:
    """Let the reference note hidden states by one hook a layer. Asked for the language model's after those of
    its encoder, which it reads in every call, transformers would note the latter twice.
    """
    from transformers.utils import output_capturing

    output_capturing.maybe_install_capturing_hooks(reference)


def _clips_alone(encode: Any, features: Tensor, mask: Tensor | None, **others: Any) -> Tensor:
    """The reference's frames of clips encoded one by one, without padding, [clips, most frames, width]."""
    columns = [features.shape[1]] * len(features) if mask is None else mask.sum(1).tolist()
    made = [encode(clip[None, :n], None, **others)[0] for clip, n in zip(features, columns, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(made, batch_first=True)


def _media_by_row(embed: Any, input_ids: Tensor, inputs_embeds: Tensor, **given: Any) -> Tensor:
    """The reference's embeddings with images and sounds in their places, row by row: sounds in a row without
    images are projected like sounds alone.
    """
    images, sounds = given.get("image_pixel_values"), given.get("audio_input_features")
    module, made, starts = embed.__self__, [], {"image": 0, "audio": 0}
    sizes: dict[str, list[int]] = {"image": [], "audio": []}
    if images is not None and given.get("image_sizes") is not None:  # else: the next tokens in generation
        tiles = given["image_sizes"] // images.shape[-1]
        sizes["image"] = [_tokens_of(*x) for x in zip(tiles, given["image_attention_mask"], strict=True)]
    if sounds is not None:
        sizes["audio"] = given["audio_embed_sizes"].tolist()
    for ids, embeds in zip(input_ids, inputs_embeds, strict=True):
        own: dict[str, Any] = {}
        for kind, token in (("image", module.image_token_id), ("audio", module.audio_token_id)):
            tokens, first = int((ids == token).sum()), starts[kind]
            last = first
            while tokens > 0 and last < len(sizes[kind]):
                tokens, last = tokens - sizes[kind][last], last + 1
            if tokens:  # a placeholder that was generated stays as it is
                last = first
            if last > first:
                own |= {n: x[first:last] for n, x in given.items() if n.startswith(kind) and x is not None}
            starts[kind] = last
        made.append(embed(ids[None], embeds[None], **own))
    return torch.cat(made)


def _tokens_of(tiles: Tensor, mask: Tensor) -> int:
    """The number of tokens of an image in so many rows and columns of tiles, with a mask of their patches."""
    n, count = mask.shape[-1] // 2, int(tiles.prod())
    grid = mask[1 : 1 + count, ::2, ::2].unflatten(0, tiles.tolist()).transpose(1, 2).flatten(2).flatten(0, 1)
    rows, columns = int(grid[:, 0].sum()), int(grid[0].sum())
    return rows * (columns + 1) + 1 + n * (n + 1)


def _freeze_untrained(reference: nn.Module, model: LigerCausalLM) -> None:
    """Freeze parameters of a reference that are buffers here, such as Whisper's positions: `from_pretrained`
    would train them, though the class itself does not.
    """
    buffers = {name for name, _ in model.named_buffers()}
    maps = [model.weight_map(layout) for layout in (model.layout, *model.architecture.layouts)]
    names = {ref.name for found in maps for name in buffers & found.keys() for ref in found[name].refs()}
    for name, parameter in reference.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def _positions_by_row(
    positions: Any,
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The reference's positions and their excess over tokens, of each row as if it were alone."""
    made, first = [], 0
    for row, kinds in enumerate(mm_token_type_ids):
        images = int(((kinds == 1) & (torch.nn.functional.pad(kinds, (1, 0))[:-1] != 1)).sum())
        own = None if image_grid_thw is None or not images else image_grid_thw[first : first + images]
        mask = None if attention_mask is None else attention_mask[row : row + 1]
        made.append(positions(input_ids[row : row + 1], kinds[None], own, mask, **others))
        first += images
    return torch.cat([axes for axes, _ in made], 1), torch.cat([excess for _, excess in made])


def _names_of_stacks(model: LigerCausalLM) -> set[str]:
    """The tensors that hold all experts of a layer in one, by their names in checkpoints and in memory."""
    maps = [model.weight_map(layout) for layout in (model.layout, *model.architecture.layouts)]
    experts = [path for path, module in model.named_modules() if isinstance(module, Experts)]
    names: set[str] = set()
    for path in experts:
        for name, _ in model.get_submodule(path).named_parameters():
            for refs in (list(found[f"{path}.{name}"].refs()) for found in maps):
                names |= {ref.name for ref in refs if len(refs) == 1}
    return names


def _gradients(model: nn.Module, stacks: Set[str]) -> dict[str, Tensor]:
    return _by_expert({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, stacks)


def _by_expert(gradients: Mapping[str, Tensor], stacks: Set[str]) -> dict[str, Tensor]:
    """Compare stacked experts one by one: the norm of the stack would hide a fault in a rarely used
    expert.
    """
    found: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        found |= (
            {f"{name}[{e}]": own for e, own in enumerate(gradient)} if name in stacks else {name: gradient}
        )
    return found


def _gradients_as_named_in(
    expected: Mapping[str, Tensor], model: LigerCausalLM, stacks: Set[str]
) -> dict[str, Tensor]:
    """Name our gradients as the reference does in memory, which may differ from the files."""
    maps = [model.weight_map(layout) for layout in (model.layout, *model.architecture.layouts)]
    known = {name.partition("[")[0] for name in expected}
    names = max(maps, key=lambda found: len(checkpoint_shapes(found).keys() & known))
    tensors = model.saved_tensors()
    found: dict[str, Tensor] = {}
    for name, expr in names.items():
        gradient = tensors[name].grad
        if gradient is not None:  # as it is for a buffer
            found |= expr.write(gradient)
    return _by_expert(found, stacks)


def _summed_otherwise(reference: Any, call: Mapping[str, Any], one_order: bool) -> dict[str, Tensor]:
    """Compute the results again with sums in another order: with another attention, or with reversed rows.
    Rows with images cannot be reversed, and run in float64. Where sums have only `one_order`, as in recurrent
    layers, or float64 is not supported, as by conformers, each weight is replaced by the next larger or
    smaller number.
    """
    if one_order:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in reference.parameters():
                up = torch.rand(p.shape, generator=generator) < 0.5
                p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf)))
        return _results(reference, call)
    text = call.keys() == {"input_ids", "labels"}
    if reference._supports_sdpa:
        with contextlib.suppress(ValueError):  # a part does not support it
            reference.set_attn_implementation("sdpa")
            return _results(reference, call)
    if text:
        results = _results(reference, {name: x.flip(0) for name, x in call.items()})
        return {**results, "logits": results["logits"].flip(0)}
    return _results(
        reference.double(), {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    )


def _least_size(name: str, expected: Mapping[str, Tensor]) -> float:
    """Scale to which the error of a gradient that consists of rounding is compared; 0 for other gradients.
    Without positions, a key's bias shifts all scores of a query equally, so the terms of its gradient cancel.
    They are as large as those of the weight's gradient, whose inputs are of order one. The gradient of a
    factor of a matrix product is the inner product of the matrix and its gradient, whose terms may cancel.
    """
    if name.endswith("scale") and (matrix := expected.get(f"{name.removesuffix('scale')}fn")) is not None:
        return matrix.double().norm().item()
    weight = expected.get(f"{name.removesuffix('bias')}weight") if name.endswith(".bias") else None
    if weight is None or weight.dim() < 2:
        return 0.0
    terms = weight.double().norm().item() / weight[0].numel() ** 0.5
    return terms if expected[name].double().norm().item() < 2**-16 * terms else 0.0


def relative_distance(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """|found - expected| / max(|expected|, least), in float64; |found| where nothing was expected."""
    found, expected = found.double(), expected.double()
    error, size = (found - expected).norm().item(), max(expected.norm().item(), least)
    return error / size if size else error
