"""Reading a Hugging Face config.json so that no key is overlooked.

A spec is built by taking keys from the config. When it is complete, `finish()` demands that every key was
either taken or cannot change the mathematics: a key that nobody asked for is an error that names it,
because a setting that is quietly ignored gives a model that is quietly wrong.

    c = HFConfig.load("folder")
    hidden_size = c.take("hidden_size")
    head_dim = c.take("head_dim", None)        # absent or null: the default
    rope = c.take_rope()                       # old and new spelling, one form
    c.finish()
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from liger_models.convert.errors import ConfigError

REQUIRED: Any = object()


class HFConfig:
    """The raw config.json of a model, and a record of which of its keys were taken.

    Attributes:
        raw: the dict as read, never changed.
        model_type: the value of `model_type`.
        name: where the config came from, for messages.
    """

    def __init__(self, raw: dict[str, Any], name: str, ignore_config_keys: tuple[str, ...] = ()):
        self.raw = raw
        self.name = name
        self._ignored = frozenset(ignore_config_keys)
        self._defaults: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._taken_rope_layers: set[str] = set()
        self.model_type: str = self.take("model_type")

    @classmethod
    def load(
        cls, path_or_dict: str | Path | Mapping[str, Any], *, ignore_config_keys: tuple[str, ...] = ()
    ) -> "HFConfig":
        """Reads a folder that holds config.json, a JSON file, or a dict.

        Raises:
            ConfigError: the file is missing or is not a JSON object, or `model_type` is missing.
        """
        if isinstance(path_or_dict, Mapping):
            return cls(copy.deepcopy(dict(path_or_dict)), "config", ignore_config_keys)
        path = Path(path_or_dict)
        if path.is_dir():
            path = path / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror or error}); expected the config.json of a model"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: is not valid JSON ({error})") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
        return cls(raw, str(path), ignore_config_keys)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Gives values to keys that this file leaves out and the family's reference then fills in.

        A key that is present and null stays null.
        """
        self._defaults.update(defaults)

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of `key`; `default`, where one is given, if the key is absent or null.

        Raises:
            ConfigError: no default was given and the key is absent or null.
        """
        return self.take_one_of(key, default=default)

    def take_one_of(self, *keys: str, default: Any = REQUIRED) -> Any:
        """The value of whichever of `keys`, several names of one setting, is present; else as `take`.

        Raises:
            ConfigError: two of them are present and differ, or none is and no default was given.
        """
        self._taken.update(keys)
        present = {key: self.raw[key] for key in keys if key in self.raw}
        stated = present or {key: self._defaults[key] for key in keys if key in self._defaults}
        found = {key: value for key, value in stated.items() if value is not None}
        if not found:
            if default is REQUIRED:
                state = "null" if any(key in self.raw for key in keys) else "missing"
                names = " or ".join(repr(key) for key in keys)
                raise ConfigError(
                    f"{self.name}: the key {names} is {state}, and this model cannot be built without it; "
                    "take the value from the model's original config.json"
                )
            return default
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise ConfigError(f"{self.name}: {found} name one setting but differ; keep one of them")
        return values[0]

    def take_rope(
        self,
        layer_type: str | None = None,
        *,
        default_theta: float = 10000.0,
        head_dim_default_partial: float = 1.0,
    ) -> dict[str, Any]:
        """The rotary settings, from the old spelling, the new one, or both if they agree.

        Old: `rope_theta`, `rope_scaling`, `partial_rotary_factor` at the top level. New: one dict
        `rope_parameters`, which may be nested by layer type. The result has `rope_type`, `rope_theta`,
        `partial_rotary_factor` and every parameter of its type, defaults filled in, lists as tuples, so that
        two spellings of one model compare equal.

        Args:
            layer_type: for families whose layers rotate differently (`"full_attention"`,
                `"sliding_attention"`). In the old spelling a sliding layer has no scaling and takes
                `rope_local_base_freq` as its theta.
            default_theta: the family's theta where the config names none.
            head_dim_default_partial: the family's share of the head that is rotated where the config names
                none.

        Raises:
            ConfigError: an unknown rope type, an unknown, missing or mistyped parameter, or spellings that
                disagree.
        """
        return _read_rope(self, layer_type, default_theta, head_dim_default_partial)

    def finish(self) -> None:
        """Checks that nothing was overlooked.

        Raises:
            ConfigError: names every key that was not taken and might change the mathematics.
        """
        left_over = [key for key in self.raw if key not in self._taken and not self._is_harmless(key)]
        rope = self.raw.get("rope_parameters")
        if self._taken_rope_layers and _is_nested(rope):
            layers = {layer for layer, settings in rope.items() if settings is not None}
            left_over += [f"rope_parameters.{layer}" for layer in sorted(layers - self._taken_rope_layers)]
            left_over = [key for key in left_over if key not in self._ignored]
        if not left_over:
            return
        reasons = [f"  {key}: {_abbreviate(self._value(key))}{_why(key)}" for key in left_over]
        raise ConfigError(
            f"{self.name}: the model type {self.model_type!r} does not know these keys, and each may change "
            "what the model computes:\n"
            + "\n".join(reasons)
            + "\nIf you are sure that they do not matter, pass "
            f"ignore_config_keys={tuple(left_over)!r}"
        )

    def _is_harmless(self, key: str) -> bool:
        value = self.raw[key]
        if value is None or value is False or key.startswith("_") or key in self._ignored:
            return True
        if key in _NEUTRAL_VALUE:
            return value == _NEUTRAL_VALUE[key]
        return key in _NO_EFFECT

    def _value(self, dotted_key: str) -> Any:
        value: Any = self.raw
        for part in [dotted_key] if dotted_key in self.raw else dotted_key.split("."):
            value = value[part]
        return value


class ModelConfig:
    """The config of a model as its user sees it: the keys of config.json as attributes that may be set.

    Other libraries read and set attributes of `model.config` (`use_cache`, `hidden_size`) and call the
    methods below. Changing a size here does not rebuild the model.
    """

    def __init__(self, raw: Mapping[str, Any]):
        self.__dict__.update(copy.deepcopy(dict(raw)))

    def to_dict(self) -> dict[str, Any]:
        """A copy of the keys and values."""
        return copy.deepcopy(self.__dict__)

    def to_json_string(self) -> str:
        """The keys and values as JSON."""
        return json.dumps(self.__dict__, indent=2, sort_keys=True, default=str) + "\n"

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ModelConfig":
        """The config of the language model: the nested `text_config` where there is one, else this one."""
        nested = self.__dict__.get("text_config")
        if not isinstance(nested, dict):
            return self
        text = ModelConfig({})
        text.__dict__ = nested  # shared, so that what is set on it is seen here
        return text

    def __repr__(self) -> str:
        return f"ModelConfig({self.__dict__!r})"


def export_config(raw: Mapping[str, Any], *, dtype: str, source: bool) -> dict[str, Any]:
    """The config.json to write beside exported weights.

    One that was read from a checkpoint (`source`) goes out as it came in, except that a stated dtype
    follows the weights. One made from nothing bears the old and the new spelling of dtype and of rotary
    settings, because readers of the new one ignore the old one silently, and the other way round.

    Args:
        dtype: name of the weights' dtype as in config.json, such as `"bfloat16"`.
    """
    out = copy.deepcopy(dict(raw))
    for key in ("torch_dtype", "dtype"):
        if key in out or not source:
            out[key] = dtype
    return out if source else {**out, **_both_rope_spellings(out)}


# ------------------------------------------------------------------------------- rotary settings

_RopeFields = dict[str, tuple[type, ...]]
_NUMBER: tuple[type, ...] = (int, float)
_LIST: tuple[type, ...] = (list, tuple)

# Of every type: the parameters it needs, and those it may have with their defaults. Names and defaults are
# those of the published configs; a default of None means that a formula of the rope type fills it in.
_ROPE_TYPES: dict[str, tuple[_RopeFields, dict[str, Any]]] = {
    "default": ({}, {}),
    "linear": ({"factor": _NUMBER}, {}),
    "dynamic": ({"factor": _NUMBER, "original_max_position_embeddings": (int,)}, {}),
    "yarn": (
        {"factor": _NUMBER, "original_max_position_embeddings": (int,)},
        {
            "attention_factor": None,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": None,
            "mscale_all_dim": None,
            "truncate": True,
        },
    ),
    "longrope": (
        {
            "factor": _NUMBER,
            "original_max_position_embeddings": (int,),
            "short_factor": _LIST,
            "long_factor": _LIST,
        },
        {"attention_factor": None},
    ),
    "llama3": (
        {
            "factor": _NUMBER,
            "original_max_position_embeddings": (int,),
            "low_freq_factor": _NUMBER,
            "high_freq_factor": _NUMBER,
        },
        {},
    ),
}
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}
_THETA_KEYS = ("rope_theta", "rotary_emb_base")
_PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")


def _read_rope(
    c: HFConfig, layer_type: str | None, default_theta: float, default_partial: float
) -> dict[str, Any]:
    theta = c.take_one_of(*_THETA_KEYS, default=None)
    partial = c.take_one_of(*_PARTIAL_KEYS, default=None)
    scaling = c.take("rope_scaling", None)
    new = c.take("rope_parameters", None)
    if layer_type is not None:
        local_theta = c.take("rope_local_base_freq", None)
        c._taken_rope_layers.add(layer_type)
        if layer_type == "sliding_attention":
            theta = theta if local_theta is None else local_theta
            scaling = None

    for key, value in (("rope_scaling", scaling), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{c.name}: {key} must be an object or null, found {value!r}")
    if _is_nested(new):
        if layer_type is None:
            raise ConfigError(
                f"{c.name}: rope_parameters is nested by layer type ({', '.join(new)}), but every layer of a "
                f"{c.model_type!r} model rotates alike; expected one flat object"
            )
        if new.get(layer_type) is None:
            raise ConfigError(f"{c.name}: rope_parameters has no entry for the layer type {layer_type!r}")
        new = new[layer_type]

    defaults = {
        "rope_theta": default_theta if theta is None else theta,
        "partial_rotary_factor": default_partial if partial is None else partial,
    }
    if not new:
        return _normalise_rope(c, "rope_scaling", scaling or {}, defaults)

    result = _normalise_rope(c, "rope_parameters", new, defaults)
    stated = {}
    if theta is not None:
        stated["rope_theta"] = float(theta)
    if partial is not None:
        stated["partial_rotary_factor"] = float(partial)
    if "rope_scaling" in c.raw:
        inherited = {**_pick(result, defaults), **stated}
        stated = _normalise_rope(c, "rope_scaling", scaling or {}, inherited)
    differing = sorted(key for key in stated if stated[key] != result.get(key))
    if differing:
        pairs = ", ".join(f"{key} is {stated[key]!r} and {result.get(key)!r}" for key in differing)
        raise ConfigError(
            f"{c.name}: the old spelling (rope_theta, rope_scaling) and the new one (rope_parameters) "
            f"describe two models: {pairs}; "
            "remove the one that is wrong"
        )
    return result


def _normalise_rope(
    c: HFConfig, where: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """One flat dict of rotary settings, complete and checked. `defaults`: what stands outside `settings`."""
    rest = {key: value for key, value in settings.items() if value is not None}
    names = {rest.pop(key) for key in ("rope_type", "type") if key in rest} or {"default"}
    types = {_ROPE_ALIASES.get(name, name) for name in names}
    if len(types) > 1:
        raise ConfigError(f"{c.name}: {where} names two rope types, {' and '.join(sorted(map(str, names)))}")
    rope_type = types.pop()
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(
            f"{c.name}: {where} has the unknown rope type {rope_type!r}; known are "
            f"{', '.join(sorted(_ROPE_TYPES))}"
        )
    required, optional = _ROPE_TYPES[rope_type]

    out: dict[str, Any] = {"rope_type": rope_type}
    for key, default in defaults.items():
        out[key] = float(_checked(c, where, key, rest.pop(key, default), _NUMBER))
    if "mrope_section" in rest:
        out["mrope_section"] = tuple(_checked(c, where, "mrope_section", rest.pop("mrope_section"), _LIST))
    if "original_max_position_embeddings" in required:
        rest["original_max_position_embeddings"] = _original_length(c, where, rope_type, rest)
    if rope_type in ("longrope", "yarn") and "factor" not in rest:
        # Both papers define the factor as this ratio, and some released configs state only the two lengths.
        rest["factor"] = c.take("max_position_embeddings") / rest["original_max_position_embeddings"]

    for key, kinds in required.items():
        if key not in rest:
            raise ConfigError(f"{c.name}: {where} of type {rope_type!r} lacks {key!r}")
        out[key] = _plain(_checked(c, where, key, rest.pop(key), kinds))
    for key, default in optional.items():
        value = rest.pop(key, default)
        if value is not None:
            value = _plain(_checked(c, where, key, value, (bool,) if isinstance(default, bool) else _NUMBER))
        out[key] = value
    unknown = sorted(set(rest) - _ROPE_NO_EFFECT)
    if unknown:
        raise ConfigError(
            f"{c.name}: {where} of type {rope_type!r} has the unknown key{'s' * (len(unknown) > 1)} "
            f"{', '.join(map(repr, unknown))}; known are {', '.join([*required, *optional, *defaults])}"
        )
    return out


_ROPE_NO_EFFECT = frozenset({"finetuned"})


def _original_length(c: HFConfig, where: str, rope_type: str, rest: Mapping[str, Any]) -> Any:
    """The context length before scaling: stated at the top level, or inside, or equal to the model's own."""
    inside = rest.get("original_max_position_embeddings")
    if rope_type == "dynamic":  # scaling begins where the model's own range ends, whatever else is stated
        length = c.take("max_position_embeddings")
        if inside not in (None, length):
            raise ConfigError(
                f"{c.name}: {where} of type 'dynamic' has original_max_position_embeddings {inside}, but "
                f"this type scales beyond max_position_embeddings, {length}; remove it"
            )
        return length
    top = c.take("original_max_position_embeddings", None)
    if top is not None:
        return top
    return c.take("max_position_embeddings") if inside is None else inside


_EXPECTED = {_NUMBER: "a number", _LIST: "a list of numbers", (int,): "an integer", (bool,): "true or false"}


def _checked(c: HFConfig, where: str, key: str, value: Any, kinds: tuple[type, ...]) -> Any:
    right = isinstance(value, kinds) and (kinds == (bool,) or not isinstance(value, bool))
    numbers: Iterable[Any] = value if right and kinds is _LIST else [value]
    if not right or not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        expected = {
            _NUMBER: "a number",
            _LIST: "a list of numbers",
            (int,): "an integer",
            (bool,): "true or false",
        }
        raise ConfigError(f"{c.name}: {key} of {where} must be {expected[kinds]}, found {_abbreviate(value)}")
    if kinds in (_NUMBER, (int,)) and value < 0:
        raise ConfigError(f"{c.name}: {key} of {where} must not be negative, found {value}")
    return value


def _plain(value: Any) -> Any:
    return tuple(float(x) for x in value) if isinstance(value, (list, tuple)) else value


def _both_rope_spellings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that make `raw` readable for readers of either spelling; {} if it has no rotary settings."""
    new = raw.get("rope_parameters")
    if _is_nested(new):
        full, sliding = new.get("full_attention"), new.get("sliding_attention")
        old = _old_rope_spelling(full) if full else {}
        return {**old, "rope_local_base_freq": sliding["rope_theta"]} if sliding else old
    if new:
        return _old_rope_spelling(new)
    scaling = dict(raw.get("rope_scaling") or {})
    if "rope_theta" not in raw and not scaling:
        return {}
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type", "default"))
    return {"rope_parameters": {**scaling, **_pick(raw, ("rope_theta", "partial_rotary_factor"))}}


def _old_rope_spelling(new: Mapping[str, Any]) -> dict[str, Any]:
    outside = _pick(new, ("rope_theta", "partial_rotary_factor"))
    scaling = {key: value for key, value in new.items() if key not in outside}
    return {**outside, "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling}


def _is_nested(rope: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values())


def _pick(mapping: Mapping[str, Any], keys: Any) -> dict[str, Any]:
    return {key: mapping[key] for key in keys if key in mapping}


# ------------------------------------------------------------------- keys that cannot change the mathematics

# Of use to tokenizers, to text generation, to other tasks or to bookkeeping; never to the forward pass.
_NO_EFFECT_NAMES = """
    architectures auto_map dtype torch_dtype transformers_version name_or_path tokenizer_class
    unsloth_fixed unsloth_version attn_implementation keys_to_ignore_at_inference use_cache return_dict
    initializer_range gradient_checkpointing chunk_size_feed_forward torchscript use_bfloat16
    tf_legacy_loss pruned_heads bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
    cls_token_id mask_token_id decoder_start_token_id id2label label2id num_labels problem_type
    finetuning_task task_specific_params classifier_dropout output_attentions output_hidden_states
    output_scores return_dict_in_generate max_length max_new_tokens min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens prefix
"""
_NO_EFFECT = frozenset(_NO_EFFECT_NAMES.split())

_DROPOUT_NAMES = """
    attention_dropout attn_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout residual_dropout
    embedding_dropout attention_probs_dropout_prob hidden_dropout_prob dropout layerdrop layer_dropout
"""
_DROPOUTS = _DROPOUT_NAMES.split()

# Harmless at this one value.
_NEUTRAL_VALUE: dict[str, Any] = {**dict.fromkeys(_DROPOUTS, 0), "pretraining_tp": 1}


def _why(key: str) -> str:
    if key in _DROPOUTS:
        return " (dropout is not supported; set it to 0)"
    if key == "pretraining_tp":
        return " (only 1 is supported: other values split the matrix products and round differently)"
    if key == "quantization_config":
        return " (quantised checkpoints are not supported; use the original weights)"
    return ""


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
