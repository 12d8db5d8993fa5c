"""Multi-token prediction modules of DeepSeek's, Ling's and Qwen's checkpoints (layers/model/mtp.py).

A module's layer has the full attention of the decoder, and the experts or MLP of its last layer. Families
differ in the number of modules and in their names. Source: vLLM's deepseek_mtp.py, qwen3_next_mtp.py and
qwen3_5_mtp.py, and SGLang's bailing_moe_nextn.py.
"""

from __future__ import annotations

from dataclasses import replace

from liger_models.architectures.registry.mtp import MTP
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec, MTPSpec


def after_the_layers(c: HFConfig, decoder: ModelSpec) -> MTPSpec:
    """Modules numbered like layers that follow the last one (DeepSeek-V3, GLM-4.5, Ling)."""
    key = "num_nextn_predict_layers"
    count = c.take_one_of(key, "num_mtp_layers", default=1)
    return _modules(c, decoder, key, count, most=64, first=len(decoder.blocks))


def one_apart(c: HFConfig, decoder: ModelSpec) -> MTPSpec:
    """One module outside of the layers (Qwen3-Next, Qwen3.5)."""
    text = c.with_raw(c.raw.get("text_config") or c.raw)
    if text.take_flag("mtp_use_dedicated_embeddings", False):
        raise ConfigError(
            f"{c.name}: mtp_use_dedicated_embeddings is true, but modules with an embedding of their own are "
            "not supported; load the model without mtp"
        )
    key = "mtp_num_hidden_layers"
    count = text.take_one_of(key, "num_nextn_predict_layers", default=1)
    return _modules(c, decoder, key, count, most=1, first=0)


def _modules(c: HFConfig, decoder: ModelSpec, key: str, count: object, most: int, first: int) -> MTPSpec:
    if type(count) is not int or not 1 <= count <= most:
        raise ConfigError(
            f"{c.name}: {key} is {count!r}, but mtp needs {f'1 to {most}' if most > 1 else 'exactly 1'}; "
            "load the model without mtp"
        )
    full = [block.mixer for block in decoder.blocks if block.recurrent is None]
    full = [mixer for mixer in full if getattr(mixer, "keys_of", None) is None]  # no keys of other layers
    if not full:
        raise ConfigError(
            f"{c.name}: no layer has full attention, but mtp needs its sizes; load the model without mtp"
        )
    return MTPSpec((replace(decoder.blocks[-1], mixer=full[-1]),) * count, decoder.last_norm, first)


_IN_LAYERS = ((".block.", "."), (".lm_head.", ".shared_head.head."))
_HEAD_NORM = (".shared_head_norm.", ".shared_head.norm.")

DEEPSEEK = MTP(after_the_layers, (Layout((*_IN_LAYERS, _HEAD_NORM), root="model.layers."),))

LING = MTP(
    after_the_layers,
    tuple(
        Layout((*_IN_LAYERS, norm), root="model.layers.")
        for norm in ((".shared_head_norm.", ".final_layernorm."), _HEAD_NORM)
    ),
)

_APART = (
    ("mtp.0.block.", "mtp.layers.0."),
    ("mtp.0.eh_proj.", "mtp.fc."),
    ("mtp.0.enorm.", "mtp.pre_fc_norm_embedding."),
    ("mtp.0.hnorm.", "mtp.pre_fc_norm_hidden."),
    ("mtp.0.shared_head_norm.", "mtp.norm."),
    ("mtp.0.", "mtp."),
)
QWEN = MTP(one_apart, (Layout(_APART, root="mtp."),))
