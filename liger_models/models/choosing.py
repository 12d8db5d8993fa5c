"""The choice of the model that a config describes, and of a checkpoint's tensors that it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from liger_models.architectures import Architecture, with_mtp
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.convert.quantised.recognition import dense_config
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.float8 import Float8Recipe
from liger_models.models import matching
from liger_models.models.base_model import LigerBaseModel, as_base, is_base, leave_out_heads
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.classifier import (
    LigerSequenceClassifier,
    as_classifier,
    labels_of,
    leave_out_head,
    with_labels,
)
from liger_models.models.devices import parse_device
from liger_models.models.matching import copies_in_modules, has_own_head
from liger_models.models.new_rows import ReaderWithNewRows
from liger_models.models.text_part import select_text, text_config_of
from liger_models.models.vocabulary import check_vocabulary, with_vocab_size

Projections = Literal["fused", "split"]


@dataclass(frozen=True)
class LoadOptions:
    """Options for building a model from a checkpoint or a config: the arguments that `from_hub` and
    `from_config` share. `from_hub` describes them.

    Raises:
        ConfigError: the device cannot be used, or there are no such projections.
    """

    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    attention: AttentionBackend = "auto"
    activation_memory: str | list[str] = "lean"
    memory_budget: float | str | None = None
    projections: Projections = "fused"
    shard: Callable[[LigerCausalLM], object] | None = None
    text_only: bool = False
    labels: int | None = None
    head: bool = True
    dropout: float | None = None
    float8: Float8Recipe | None = None
    mtp: bool = False
    ignore_config_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parse_device(self.device)
        if self.projections not in get_args(Projections):
            raise ConfigError(f"projections must be 'fused' or 'split', found {self.projections!r}")

    def read(self, config: Mapping[str, Any] | str | Path) -> HFConfig:
        read = HFConfig.load(config, ignore_config_keys=self.ignore_config_keys, dropout=self.dropout)
        return read.with_raw(dense_config(read.raw))  # in memory no weight is quantised


class Choice(NamedTuple):
    """The model that a config describes, and how the checkpoint's tensors differ from its own.

    Attributes:
        config: of the model: the text part's or the classifier's, as the options ask.
        left_out: the tensors of a multimodal checkpoint outside its text part; None of a whole checkpoint.
        fresh: the parameters that the checkpoint does not have.
        untied: the head is a tensor of its own, whatever the config says.
        kind: the class of the model.
        without_head: a language model's head was left out, so that the model is saved under a base model's
            names.
        names: of the checkpoint's tensors; None without a checkpoint.
    """

    config: HFConfig
    architecture: Architecture
    left_out: list[TensorInfo] | None = None
    fresh: tuple[str, ...] = ()
    untied: bool = False
    kind: type[LigerCausalLM] = LigerCausalLM
    without_head: bool = False
    names: Collection[str] | None = None


def choose(config: HFConfig, options: LoadOptions, reader: CheckpointReader | None = None) -> Choice:
    """The architecture of a config, and of a checkpoint the tensors to read."""
    read = text_config_of(config) if options.text_only else config
    architecture, labels = matching.architecture_of(read), options.labels or labels_of(read.raw)
    left_out, fresh, untied, without_head = None, False, False, False
    kind: type[LigerCausalLM] = LigerCausalLM
    if reader is not None and read is not config:
        read, left_out = select_text(config, read, reader)
    if options.mtp:
        if labels is not None or not options.head:
            raise ConfigError("mtp predicts tokens, but labels or head=False asks for a model that does not")
        architecture = with_mtp(architecture)
    if labels is not None:
        fresh = reader is not None and leave_out_head(reader, architecture)
        architecture, kind = as_classifier(architecture), LigerSequenceClassifier
        read = read.with_raw(with_labels(read.raw, labels, architecture.reference))
    elif not options.head or is_base(read, architecture, reader):
        without_head = reader is not None and not options.head and leave_out_heads(reader, architecture)
        architecture, kind = as_base(architecture), LigerBaseModel
        if not options.head:
            read = read.with_raw({**read.raw, "architectures": [architecture.reference]})
    if reader is not None:
        read.most_layers = min(read.most_layers, len(reader.tensors))
        untied = architecture.multimodal and has_own_head(architecture, reader)
    missing, names = ("lm_head.weight",) * fresh, None if reader is None else reader.tensors.keys()
    return Choice(read, architecture, left_out, missing, untied, kind, without_head, names)


def with_new_rows(choice: Choice, tokens: range, reader: ReaderWithNewRows) -> Choice:
    """The choice with a vocabulary that has new tokens, whose rows the reader makes."""
    config, architecture = choice.config, choice.architecture
    spec = architecture.spec(config)
    size = spec.vocab_size
    check_vocabulary(spec, max(size, tokens.stop))
    if taken := {kind: token for kind, token in spec.placeholders.items() if token in tokens}:
        kind, token = next(iter(taken.items()))
        raise ConfigError(f"new_tokens is {tokens}, but {kind} tokens have the id {token} in this model")
    if tokens.step != 1 or not 0 < tokens.start <= size:
        raise ConfigError(f"new_tokens is {tokens}; expected a range that begins at 1 to {size}")
    if tokens.stop > size:
        choice = choice._replace(config=config.with_raw(with_vocab_size(config.raw, tokens.stop)))
    tables = ("embed_tokens", "lm_head") if labels_of(config.raw) is None else ("embed_tokens",)
    names = [f"{table}.{kind}" for table in tables for kind in ("weight", "bias")]
    found = {layout.name(name) for name in names for layout in architecture.layouts}
    found |= {copy for copy, _ in copies_in_modules(spec, architecture)}
    for name in found & reader.tensors.keys():
        reader.renew(name, tokens)
    return choice
