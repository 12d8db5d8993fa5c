"""The table of architectures: which function turns a config into a spec, by `model_type`.

    @register("llama", reference="LlamaForCausalLM")
    def llama(c: HFConfig) -> ModelSpec: ...

    for_tests("llama", tiny={...})

`from_hub`, the command line and the tests look families up here: every test of conversion and parity runs
over this table.
"""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from liger_models.architectures.registry.bidirectional import bidirectional
from liger_models.architectures.registry.mtp import MTP, spec_with_mtp
from liger_models.architectures.registry.multimodal import MULTIMODAL
from liger_models.architectures.registry.ternary import KEY, asks_for_rounding, with_rounding
from liger_models.architectures.registry.unsupported import MISSING
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import ROPE_KEYS
from liger_models.convert.errors import ConfigError, UnsupportedModelError, abbreviate
from liger_models.layers.specs import ModelSpec


def _nothing(config: HFConfig) -> tuple[str, ...]:
    return ()


def _as_described(spec: ModelSpec, names: Collection[str] | None) -> ModelSpec:
    return spec


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    Attributes:
        model_type: the name in config.json.
        build: turns a config into a spec; takes every key that the family knows.
        reference: the class of the reference implementation in transformers.
        reference_of: the family whose class that is, if it is another one's.
        vision, audio: whether its models accept images, and whether they accept sounds.
        defaults: the reference's values of keys missing from config.json.
        layouts: differences of the family's checkpoints from the canonical form: the usual layout first, the
            one with the names of transformers' own modules last.
        says_transposed: the reference declares to PEFT that its experts are [experts, inputs, outputs].
        carried: from a config, patterns (with `*`) of unread checkpoint tensors that an export copies.
        as_stored: turns the spec of a config into that of a checkpoint with tensors of the given names (None:
            there is none), for families whose checkpoints may leave out parts that compute the identity.
        masks_of_generation: the reference's forward pass masks images otherwise than its own generation does,
            which the family follows.
        images_by_document: its positions number the images of each document, where the reference numbers
            those of all rows of a batch.
        sounds_by_document: its sounds are encoded and projected by document, where the reference lets those
            of all rows of a batch, and their padding, change one another's features.
        mtp: modules for multi-token prediction in its checkpoints, which models have on request.
        fixed: accepted keys with the only supported value of each.
        rope_keys: older names of `rope_theta` and `partial_rotary_factor`.
        other_names: further names that its configs may have for keys, each with the key: {"num_layers":
            "num_hidden_layers"}.
        unread: keys without effect, mostly because the reference does not read them, each with a reason.
        tiny: a config small enough for tests, with the family's traits switched on, as changes of `TINY`.
            `...` removes a key.
        variants: further configs for tests, as changes of `tiny`, by name.
        skip: cases that tests skip, such as "rope:yarn", each with the reason.
        module_names: the layout with the names of transformers' own modules, where it is not the last.

    A multimodal family has the config of its language model under "text_config", also in `tiny`.
    """

    model_type: str
    build: Callable[[HFConfig], ModelSpec]
    reference: str
    reference_of: str | None = None
    vision: bool = False
    audio: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = (Layout(),)
    carried: Callable[[HFConfig], tuple[str, ...]] = _nothing
    as_stored: Callable[[ModelSpec, Collection[str] | None], ModelSpec] = _as_described
    mtp: MTP | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    rope_keys: tuple[str, str] = ROPE_KEYS
    other_names: Mapping[str, str] = field(default_factory=dict)
    says_transposed: bool = False
    masks_of_generation: bool = False
    images_by_document: bool = False
    sounds_by_document: bool = False
    tiny: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    module_names: Layout | None = None

    @property
    def modules_layout(self) -> Layout:
        """The layout with the names of transformers' own modules."""
        return self.module_names or self.layouts[-1]

    @property
    def multimodal(self) -> bool:
        """Whether its models have encoders."""
        return self.vision or self.audio

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by name, since models hold their architecture and its functions may not be picklable."""
        if _ARCHITECTURES.get(self.model_type) is self:
            return find_architecture, (self.model_type,)
        return super().__reduce_ex__(protocol)

    def spec(self, config: HFConfig) -> ModelSpec:
        """The spec of a config. Every key of the config must be read.

        Raises:
            ConfigError: a key is missing, unknown, or has an unsupported value.
        """
        config.rope_keys, config.other_names = self.rope_keys, self.other_names
        config.fill(self.defaults)
        config.take_only(**self.fixed)
        for key in self.unread:
            config.take(key, None)
        config.take("is_causal", None)
        # In the references null counts as false.
        causal = "is_causal" in self.unread or config.raw.get("is_causal", True)
        spec = self.build(config)
        if asks_for_rounding(config.raw):
            spec = with_rounding(spec, config.take(KEY), self.layouts, config.name)
        config.finish()
        spec = spec if causal else bidirectional(spec, config.name)
        if (spec.vision or spec.audio) is not None and spec.is_bidirectional:
            raise ConfigError(
                f"{config.name}: models with images or sounds do not support bidirectional attention"
            )
        return spec


TINY: Mapping[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 3e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""Settings shared by the tiny configs of most families."""

# Names that some checkpoints use for exactly a family's models; exports keep them.
ALIASES: Mapping[str, str] = {
    "kimi_k2": "deepseek_v3",
    # Whole models, whose other parts are carried through.
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
}

_ARCHITECTURES: dict[str, Architecture] = {}


def register(
    model_type: str,
    *,
    reference: str,
    reference_of: str | None = None,
    vision: bool = False,
    audio: bool = False,
    defaults: Mapping[str, Any] | None = None,
    layouts: tuple[Layout, ...] = (Layout(),),
    carried: Callable[[HFConfig], tuple[str, ...]] = _nothing,
    as_stored: Callable[[ModelSpec, Collection[str] | None], ModelSpec] = _as_described,
    mtp: MTP | None = None,
    fixed: Mapping[str, Any] | None = None,
    unread: Mapping[str, str] | None = None,
    rope_keys: tuple[str, str] = ROPE_KEYS,
    other_names: Mapping[str, str] | None = None,
    says_transposed: bool = False,
    masks_of_generation: bool = False,
    images_by_document: bool = False,
    sounds_by_document: bool = False,
) -> Callable[[Callable[[HFConfig], ModelSpec]], Callable[[HFConfig], ModelSpec]]:
    """Add the decorated function to the table. The arguments are fields of `Architecture`; test configs
    follow below the function (`for_tests`).
    """

    def enter(build: Callable[[HFConfig], ModelSpec]) -> Callable[[HFConfig], ModelSpec]:
        if model_type in _ARCHITECTURES:
            raise ValueError(f"the architecture {model_type!r} is registered twice")
        _ARCHITECTURES[model_type] = Architecture(
            model_type,
            build,
            reference,
            reference_of,
            vision,
            audio,
            defaults or {},
            layouts,
            carried,
            as_stored,
            mtp,
            fixed or {},
            unread or {},
            rope_keys,
            other_names or {},
            says_transposed,
            masks_of_generation,
            images_by_document,
            sounds_by_document,
        )
        return build

    return enter


def for_tests(
    model_type: str,
    *,
    tiny: Mapping[str, Any],
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    skip: Mapping[str, str] | None = None,
) -> None:
    """Set the test configs of a registered family: fields of `Architecture`."""
    family = _ARCHITECTURES[model_type]
    keys = {f"key:{key}": "has one value" for key in family.fixed}
    keys |= {f"key:{key}": reason for key, reason in family.unread.items()}
    _ARCHITECTURES[model_type] = replace(
        family, tiny=_whole_tiny(model_type, tiny), variants=variants or {}, skip=keys | dict(skip or {})
    )


def _whole_tiny(model_type: str, tiny: Mapping[str, Any]) -> dict[str, Any]:
    if "text_config" in tiny:
        return {"model_type": model_type, **tiny, "text_config": _with_common(tiny["text_config"])}
    return {"model_type": model_type, **_with_common(tiny)}


def _with_common(tiny: Mapping[str, Any]) -> dict[str, Any]:
    # transformers' configs write into the settings that they are given: no two families share any.
    settings = {**copy.deepcopy(TINY), **tiny}
    return {key: value for key, value in settings.items() if value is not ...}


def find_architecture(model_type: str) -> Architecture:
    """The architecture of a `model_type`.

    Raises:
        UnsupportedModelError: names the nearest supported types, or what the type needs that is missing.
    """
    model_type = ALIASES.get(model_type, model_type)
    if model_type in _ARCHITECTURES:
        return _ARCHITECTURES[model_type]
    if model_type in MULTIMODAL:
        family = MULTIMODAL[model_type]
        texts = " or ".join(sorted(set(family.texts.values()) & _ARCHITECTURES.keys()))
        raise UnsupportedModelError(
            f"the model type {model_type!r} is multimodal, and only its text part is supported: "
            f"from_hub(..., text_only=True), or --text-only, loads it as a {texts} model. The rest needs "
            f"{family.missing}, which liger_models does not have."
        )
    if model_type in MISSING:
        raise UnsupportedModelError(
            f"the model type {model_type!r} is known but not supported: it needs {MISSING[model_type]}, "
            "which liger_models does not have."
        )
    supported = sorted(_ARCHITECTURES)
    nearest = difflib.get_close_matches(model_type, supported, n=3, cutoff=0.6)
    hint = f" The nearest: {', '.join(nearest)}." if nearest else ""
    raise UnsupportedModelError(
        f"the model type {abbreviate(model_type)} is not supported.{hint} `liger-models list` shows the "
        f"{len(supported)} supported ones."
    )


def with_mtp(architecture: Architecture) -> Architecture:
    """The family with its modules for multi-token prediction as parts of its models.

    Raises:
        UnsupportedModelError: it has none.
    """
    if architecture.mtp is None:
        known = ", ".join(sorted(name for name, family in _ARCHITECTURES.items() if family.mtp is not None))
        raise UnsupportedModelError(
            f"mtp: models of the type {architecture.model_type!r} have no modules for multi-token prediction "
            f"that are supported; the types that have them are {known}. Load the model without mtp"
        )
    build = functools.partial(spec_with_mtp, architecture.build, architecture.mtp.spec)
    layouts = tuple(named for layout in architecture.layouts for named in architecture.mtp.layouts(layout))
    return replace(architecture, build=build, layouts=layouts, carried=_nothing)


def list_architectures(vision: bool = False, audio: bool = False) -> list[str]:
    """The supported `model_type`s in alphabetical order: of language models; with `vision` or `audio` of
    models that accept images or sounds, and with both of models that accept either.
    """
    return sorted(
        name
        for name, family in _ARCHITECTURES.items()
        if (vision and family.vision)
        or (audio and family.audio)
        or not (vision or audio or family.multimodal)
    )
