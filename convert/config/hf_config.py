"""Reading a Hugging Face config.json so that no key is overlooked.

A spec is built by taking keys from the config. At the end, `finish()` checks that every other key is known
not to affect the model's computation: an unknown key is an error that names it, because silently ignoring a
setting silently gives a wrong model.

    c = HFConfig.load("folder")
    hidden_size = c.take("hidden_size")
    head_dim = c.take("head_dim", None)        # absent or null: the default
    rope = c.take_rope()                       # old and new spelling, one form
    c.finish()
"""

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from liger_models.convert.config.rope_config import ROPE_KEYS, is_finite, is_nested, read_rope
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.convert.json_file import read_json

REQUIRED: Any = object()


class HFConfig:
    """The raw config.json of a model, and a record of the keys taken.

    Attributes:
        raw: the dict as read, never changed.
        model_type: the value of `model_type`.
        name: origin of the config, for messages.
        most_layers: upper bound of the number of layers. The number of tensors in the checkpoint, if there is
            one, since each layer has at least one.
        complete: the object that the config comes from fills in every default (transformers'), so a missing
            rotary setting was lost on the way.
        rope_keys: the family's names of `rope_theta` and `partial_rotary_factor` in the older spelling.
        other_names: further names that the family has for keys, each with the key: taking that takes all.
    """

    most_layers = 10_000
    complete = False
    rope_keys = ROPE_KEYS
    other_names: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        raw: dict[str, Any],
        name: str,
        ignore_config_keys: tuple[str, ...] = (),
        dropout: float | None = None,
    ):
        if dropout not in (None, 0.0):
            raise ConfigError(f"dropout is {dropout!r}; expected 0.0, or None for what the config says")
        self.raw = raw
        self.name = name
        self._dropout = dropout
        self._ignored = frozenset(ignore_config_keys)
        self._defaults: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._taken_rope_layers: set[str] = set()
        self._parts: dict[str, HFConfig] = {}
        self.model_type: str = self.take("model_type")
        self._checked("model_type", self.model_type, isinstance(self.model_type, str), "a name")

    @classmethod
    def load(
        cls,
        path_or_dict: str | Path | Mapping[str, Any],
        *,
        ignore_config_keys: tuple[str, ...] = (),
        dropout: float | None = None,
    ) -> "HFConfig":
        """Reads a folder that holds config.json, a JSON file, or a dict.

        Args:
            path_or_dict: the folder, file or dict.
            ignore_config_keys: keys that are known not to matter.
            dropout: 0.0 to disable dropout, whatever the config says; None: the config's, which `finish`
                refuses unless it is 0.

        Raises:
            ConfigError: the file is missing, is not a JSON object or has a duplicate key, or `model_type` is
                missing.
        """
        if isinstance(path_or_dict, Mapping):
            return cls(copy.deepcopy(dict(path_or_dict)), "config", ignore_config_keys, dropout)
        path = Path(path_or_dict)
        if path.is_dir():
            path = path / "config.json"
        raw = read_json(path, ConfigError)
        return cls(raw, str(path), ignore_config_keys, dropout)

    def with_raw(self, raw: Mapping[str, Any]) -> "HFConfig":
        """Another config of the same origin, with no key taken."""
        other = HFConfig(copy.deepcopy(dict(raw)), self.name, tuple(self._ignored), self._dropout)
        other.complete, other.rope_keys = self.complete, self.rope_keys
        other.other_names = self.other_names
        return other

    def part(self, key: str) -> "HFConfig":
        """The config under `key`, whose keys `finish` checks, too.

        Raises:
            ConfigError: the key is missing.
        """
        if key in self._parts:
            return self._parts[key]
        raw = self.take(key)
        self._checked(key, raw, isinstance(raw, Mapping), "an object")
        part = self.with_raw({"model_type": self.model_type, **raw})
        part.name = f"{self.name}, {key}"
        part.most_layers = self.most_layers
        self._parts[key] = part
        return part

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Set defaults for missing keys, as the family's reference does.

        A null stays null. `finish` checks default values that were not taken as if they were in the file: a
        reference may have dropout by default.
        """
        self._defaults.update(defaults)

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of `key`; `default`, where one is given, if the key is absent or null.

        Raises:
            ConfigError: no default was given and the key is absent or null.
        """
        return self.take_one_of(key, default=default)

    def take_count(self, key: str | tuple[str, ...], default: Any = REQUIRED, *, least: int = 1) -> Any:
        """Take a key (or one of several names of it) with a count: a whole number from `least` to 2^31 - 1.

        A count of layers is at most `most_layers`, since layers are created one by one.

        Raises:
            ConfigError: missing, or another value.
        """
        names = (key,) if isinstance(key, str) else key
        value, name = self.take_one_of(*names, default=default), " or ".join(names)
        good = type(value) is int and value >= least
        self._checked(name, value, good, f"a whole number of {least} or more")
        most = self.most_layers if name.endswith("layers") else 2**31 - 1
        return self._checked(name, value, value is None or value <= most, f"at most {most}")

    def take_layers(self, key: str, default: Any = REQUIRED, *, among: int | None = None) -> Any:
        """Take a key with a list of layer indices, starting at 0; with `among`, each must be below that
        number.

        Raises:
            ConfigError: missing, or another value.
        """
        value = self.take(key, default)
        good = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
        good = good and (among is None or all(i < among for i in value))
        layers = "layers" if among is None else f"the {among} layers"
        return self._checked(key, value, good, f"a list of numbers of {layers}")

    def take_number(self, key: str, default: Any = REQUIRED, *, positive: bool = False) -> Any:
        """Take a key with a finite number >= 0; > 0 if `positive`.

        Raises:
            ConfigError: missing, or another value.
        """
        value = self.take(key, default)
        good = is_finite(value) and (value > 0 if positive else value >= 0)
        expected = f"a finite number {'above 0' if positive else 'of 0 or more'}"
        if type(value) in (int, float) and value >= 2**63:
            expected += ", below 2^63"
        return self._checked(key, value, good, expected)

    def take_dropout(self, key: str) -> float:
        """Take a key with the probability of dropping an element in training; 0 if it is missing, or if
        dropout is disabled.

        Raises:
            ConfigError: not a number from 0 to below 1.
        """
        value = self.take(key, 0.0)
        self._checked(key, value, is_finite(value) and 0 <= value < 1, "a number from 0 to below 1")
        return 0.0 if self._dropout == 0 else float(value)

    def take_flag(self, key: str, default: bool) -> bool:
        """Take a key with a boolean.

        Raises:
            ConfigError: another value.
        """
        value = self.take(key, default)
        return self._checked(key, value, isinstance(value, bool), "true or false")

    def take_choice(self, key: str, *names: str) -> str:
        """Take a key with one of these names, the first if it is absent.

        Raises:
            ConfigError: another value.
        """
        value = self.take(key, names[0])
        return self._checked(key, value, value in names, " or ".join(map(repr, names)))

    def take_only(self, **values: Any) -> None:
        """Take keys with a single supported value each; they may be absent.

        Raises:
            ConfigError: another value.
        """
        for key, supported in values.items():
            if (found := self.take(key, supported)) != supported:
                raise ConfigError(
                    f"{self.name}: {key} must be {supported!r}, the only value supported, found {found!r}"
                )

    def _checked(self, key: str, value: Any, good: bool, expected: str) -> Any:
        if not good and value is not None:  # None: a default, since a null in the file counts as absent
            raise ConfigError(f"{self.name}: {key} must be {expected}, found {abbreviate(value)}")
        return value

    def take_one_of(self, *keys: str, default: Any = REQUIRED) -> Any:
        """Take the one of `keys`, alternative names of a setting, that is present; otherwise as `take`.

        Raises:
            ConfigError: two of them are present and differ, or none is and no default was given.
        """
        keys = (*keys, *(other for other, key in self.other_names.items() if key in keys))
        self._taken.update(keys)
        present = {key: self.raw[key] for key in keys if key in self.raw}
        stated = present or {key: self._defaults[key] for key in keys if key in self._defaults}
        found = {key: value for key, value in stated.items() if value is not None}
        if not found:
            if default is REQUIRED:
                state = "null" if any(key in self.raw for key in keys) else "missing"
                names = " or ".join(repr(key) for key in keys)
                raise ConfigError(
                    f"{self.name}: the key {names} is {state}, but the model needs it; take the "
                    "value from the model's original config.json"
                )
            return default
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            raise ConfigError(f"{self.name}: {found} name one setting but differ; keep one of them")
        return values[0]

    def take_rope(
        self,
        layer_type: str | None = None,
        *,
        default_theta: float = 10000.0,
        head_dim_default_partial: float = 1.0,
        default_scaling: Mapping[str, Any] | None = None,
        default_local_theta: float | None = None,
        extra: Collection[str] = (),
    ) -> dict[str, Any]:
        """The rotary settings, from the old spelling, the new one, or both if they agree.

        Old: `rope_theta`, `rope_scaling`, `partial_rotary_factor` at the top level. New: one dict
        `rope_parameters`, which may be nested by layer type. The result has `rope_type`, `rope_theta`,
        `partial_rotary_factor` and every parameter of its type, defaults filled in, lists as tuples, so that
        two spellings of one model compare equal.

        Args:
            layer_type: for families with different rotary settings per layer type (`"full_attention"`,
                `"sliding_attention"`). In the old spelling a sliding layer has no scaling and uses
                `rope_local_base_freq` as its theta.
            default_theta: the family's default theta.
            head_dim_default_partial: the family's default fraction of the head that is rotated.
            default_scaling: the family's settings if the config has neither `rope_scaling` nor
                `rope_parameters`.
            default_local_theta: default of `rope_local_base_freq`, for families whose sliding layers have
                their own theta.
            extra: additional numbers in the family's rotary settings. Those present are returned as a dict,
                "extra".

        Raises:
            ConfigError: an unknown rope type, an unknown, missing or mistyped parameter, or spellings that
                disagree.
        """
        if layer_type is not None:
            self._taken_rope_layers.add(layer_type)
        return read_rope(
            self,
            layer_type,
            default_theta,
            head_dim_default_partial,
            default_scaling or {},
            default_local_theta,
            extra,
        )

    @property
    def taken(self) -> frozenset[str]:
        """The keys that were taken, present or not."""
        return frozenset(self._taken)

    def finish(self) -> None:
        """Check that no key was overlooked.

        Raises:
            ConfigError: names every key that was not taken and might affect the model's computation.
        """
        for part in self._parts.values():
            part.finish()
        found = {**self._defaults, **self.raw}
        left_over = [key for key in found if key not in self._taken and not self._is_harmless(key)]
        rope = self.raw.get("rope_parameters")
        if self._taken_rope_layers and is_nested(rope):
            layers = {layer for layer, settings in rope.items() if settings is not None}
            left_over += [f"rope_parameters.{layer}" for layer in sorted(layers - self._taken_rope_layers)]
            left_over = [key for key in left_over if key not in self._ignored | self._taken]
        if not left_over:
            return
        reasons = [f"  {key}: {abbreviate(self._value(key))}{_why(key)}" for key in left_over]
        raise ConfigError(
            f"{self.name}: the model type {self.model_type!r} does not know these keys, and each may change "
            "what the model computes:\n"
            + "\n".join(reasons)
            + "\nIf you are sure that they do not matter, pass "
            f"ignore_config_keys={tuple(left_over)!r}"
        )

    def _is_harmless(self, key: str) -> bool:
        value = self._value(key)
        if value is None or value is False or key.startswith("_") or key in self._ignored:
            return True
        if key in _DROPOUTS and self._dropout == 0:
            return True
        if key in _NEUTRAL_VALUE:
            return value == _NEUTRAL_VALUE[key]
        return key in _NO_EFFECT

    def _value(self, dotted_key: str) -> Any:
        value: Any = {**self._defaults, **self.raw}
        for part in [dotted_key] if dotted_key in value else dotted_key.split("."):
            value = value[part]
        return value


# ------------------------------------------------------------------- keys that cannot change the mathematics

# Of use to tokenizers, to text generation, to other tasks or to bookkeeping; never to the forward pass.
_NO_EFFECT_NAMES = """
    architectures auto_map dtype torch_dtype transformers_version name_or_path tokenizer_class
    unsloth_fixed unsloth_version attn_implementation keys_to_ignore_at_inference use_cache return_dict
    initializer_range gradient_checkpointing chunk_size_feed_forward torchscript use_bfloat16
    tf_legacy_loss pruned_heads bos_token_id eos_token_id unk_token_id sep_token_id
    cls_token_id mask_token_id decoder_start_token_id id2label label2id num_labels problem_type
    finetuning_task task_specific_params classifier_dropout output_attentions output_hidden_states
    output_scores return_dict_in_generate max_length max_new_tokens min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens prefix cache_implementation model_max_length
    num_nextn_predict_layers ep_size transformers.js_config is_llama_config max_sequence_length is_composition
    is_decoder neftune_noise_alpha language
"""
_NO_EFFECT = frozenset(_NO_EFFECT_NAMES.split())

_DROPOUT_NAMES = """
    attention_dropout attn_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout residual_dropout
    embedding_dropout attention_probs_dropout_prob hidden_dropout_prob dropout layerdrop layer_dropout
    projection_dropout activation_dropout encoder_layerdrop embed_dropout output_dropout
    mlp_dropout
"""
_DROPOUTS = _DROPOUT_NAMES.split()

_NOISES = ("router_jitter_noise", "input_jitter_noise")  # factors drawn in training

# Harmless at this one value.
_NEUTRAL_VALUE: dict[str, Any] = {**dict.fromkeys((*_DROPOUTS, *_NOISES), 0), "pretraining_tp": 1}


def _why(key: str) -> str:
    if key in _DROPOUTS:
        return " (this dropout is not supported; pass dropout=0.0, or --dropout 0, to go without any)"
    if key in _NOISES:
        return " (noise on the inputs of experts and routers is not supported; set it to 0)"
    if key == "pretraining_tp":
        return " (only 1 is supported: other values split the matrix products and round differently)"
    if key == "quantization_config":
        return " (only from_hub reads quantised weights; remove the key to make a model with dense ones)"
    return ""
