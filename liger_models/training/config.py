"""Settings of a training run, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from liger_models.convert.errors import ConfigError
from liger_models.kernels.optimizer.adamw import WEIGHTS
from liger_models.layers.attention.backends import BACKENDS
from liger_models.layers.experts.expert_parallel import EXPERT_COMM_BACKENDS, ExpertCommBackend
from liger_models.layers.projections.float8 import RECIPES
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.models.quantization import METHODS
from liger_models.optim.adamw import MOMENTS
from liger_models.optim.library import LIBRARY_WEIGHTS, MUON, OPTIMIZERS
from liger_models.presets import PRESETS
from liger_models.training.adapters.lora_settings import check_adapters
from liger_models.training.best import HIGHER_IS_BETTER
from liger_models.training.data import TRAIN_ON
from liger_models.training.defaults import find_defaults
from liger_models.training.learning_rate import SCHEDULES
from liger_models.training.objectives import OBJECTIVES, make_objective
from liger_models.training.processes.world import SHARDS

DTYPES = ("auto", "float32", "bfloat16")
NOT_FINITE = ("stop", "skip")
_KINDS: dict[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "int": ((int, float), "a number"),
    "float": ((int, float), "a number"),
}
_CHOICES: dict[str, Iterable[str]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "dtype": DTYPES,
    "weights": WEIGHTS,
    "moments": MOMENTS,
    "optimizer_memory": ("device", "host"),
    "weights_memory": ("device", "host"),
    "attention": BACKENDS,
    "activation_memory": (*LEVELS, "auto"),
    "float8": RECIPES,
    "quantize": METHODS,
    "keep_best": HIGHER_IS_BETTER,
    "not_finite": NOT_FINITE,
    "shard": SHARDS,
    "expert_comm_backend": EXPERT_COMM_BACKENDS,
    "train_on": TRAIN_ON,
}
_ONE_OR_MORE = (
    *("seq_len", "batch_size", "gradient_accumulation", "shuffle_buffer", "log_every"),
    *("sequence_parallel", "expert_parallel"),
)
_ZERO_OR_MORE = (
    *("warmup", "decay", "min_lr", "weight_decay", "clip", "eval_every", "eval_tokens", "eval_steps"),
    *("save_every", "keep", "profile", "patience"),
)


@dataclass(frozen=True)
class TrainConfig:
    """The settings of `train`; the command line has an option for each.

    model              hub id, folder with a Hugging Face checkpoint, or the name of a preset (random weights)
    data               files, folders, patterns, data sets of the hub or corpora, optionally with weights
                       (docs/data.md)
    columns            names of the data's columns where they are not those of the fields, as in
                       "prompt=question,completion=answer"
    split              split of the hub data sets in `data` that name none: "train[:90%]", "train+test"
    streaming          read, tokenize and pack `data` as they come, block by block; requires steps
    shuffle_buffer     records of a block of streamed data, within which documents are shuffled
    data_cache         folder of tokenized data; default: liger_models/data in the user's cache folder
    verify_data        verify the digests of tokenized data before training on them
    output             folder of metrics, checkpoint-N folders and the final export
    objective          training objective: sft, dpo, orpo, simpo, kto, reward, distill, grpo
                       (docs/post_training.md)
    objective_options  fields of its class in training/objectives, by name: {"beta": 0.1}
    eval_data          held-out data, in the form of `data`; or else
    eval_fraction      fraction of the tokens of `data` to hold out, in whole documents chosen by the seed
    eval_tokens        maximum tokens of each evaluation, from the first held-out rows; 0: all
    eval_steps         maximum batches of each evaluation, of each process; 0: all
    sample_prompts     .txt or .jsonl file of prompts, or the text of one, that the model answers at each
                       evaluation, into output/samples.jsonl
    tokenizer          folder with tokenizer.json; default: the model's own
    seq_len            tokens per packed row, and the maximum context of a document
    batch_size         rows per micro-batch, of each process
    gradient_accumulation   micro-batches per step
    truncate           cut prompt/completion and chat examples at seq_len instead of refusing longer ones
    train_on           answers of a conversation to learn: "all"; only the "last"; or "each" in its own
                       example, rendered as at inference (docs/data.md)
    steps, epochs      length of the run: exactly one of the two
    optimizer          adamw, or adamw_8bit, muon, muon_heads, adafactor or sgd (docs/optimizer.md)
    lr, schedule       peak learning rate (default: by objective, training/defaults.py), and its schedule:
                       cosine, linear, wsd or constant (training/learning_rate.py)
    warmup, decay      steps of linear warmup, and of the decay of "wsd"; below 1: a fraction of the run
    min_lr             final learning rate
    weight_decay       of matrices only (default: training/defaults.py)
    clip               maximum norm of the gradient; 0: no clipping
    dtype              of trained and saved weights; auto: the checkpoint's (a preset: bfloat16 on a GPU)
    weights            update of bfloat16 weights: master (the default) or plain, and with adamw compensated
                       or stochastic, too (see liger_models.optim.AdamW)
    moments            dtype of AdamW's moments; auto: that of the weights
    optimizer_memory   location of AdamW's state: "device", or "host", from where each step streams it through
                       the GPU, with the same bits (see liger_models/optim/host_state.py)
    weights_memory     with lora: location of the frozen weights: "device", or "host", from where they are
                       copied to the GPU a layer ahead of their use (see layers/recompute/host_weights.py)
    bias_update_rate   step size of the correction bias that balances experts, in models that have one;
                       0: constant (see liger_models.update_correction_bias)
    activation_memory  activations saved for the backward pass; "auto": as many as fit into
    memory_budget      bytes of a GPU, such as 120GiB, or a fraction of the free memory (0.8); default 0.95,
                       or 0.9 if the model is sharded
    text_only          train only the language model of a multimodal checkpoint
    freeze             patterns of checkpoint names, such as "embed_tokens" and "layers.0-15", whose weights
                       are frozen and get no adapters; or parts of a vision-language model: "vision",
                       "projector", "language" (see the model's `freeze`)
    train_only         such patterns: all other weights are frozen
    add_tokens         special tokens to add to the tokenizer, with rows in the embedding and the head, which
                       are trained, with lora too; tokens that the tokenizer has already change nothing
    dropout            0.0: train without the config's dropout; None: with it
    lora               train only low-rank adapters: "r=16,alpha=32,targets=all-linear,dropout=0.0", with
                       "dora", "rslora" or "experts", too, any subset of these, or "" (see
                       training/lora.py)
    adapter            folder or hub id of a low-rank adapter of `model` to train further, with its own
                       settings; `train` sets it, and `model` to the base model, if `model` is an adapter
    quantize           with lora: quantise the base weights to "nf4" or "int8" (see models/quantization.py)
    keep_quantised     with lora: keep the weights of a quantised checkpoint in its own bits
    float8             run linear layers in float8, on GPUs that can: "rowwise", "tensorwise" or
                       "rowwise_with_gw_hp" (docs/float8.md)
    cuda_graphs        record the layers of steps as CUDA graphs and replay them (docs/training.md)
    merge              with lora: also write the merged model to output/merged
    eval_every, save_every  in steps; 0: evaluate only at both ends, save only when interrupted
    keep               number of checkpoint-N folders to keep; 0: all
    keep_best          "eval_loss", "eval_accuracy" or "eval_margin": also write the model to output/best
                       after each evaluation that improves it
    patience           stop after this many evaluations in a row without improving keep_best, or eval_loss;
                       0: never
    not_finite         for a step with a non-finite loss or gradient: "stop", or "skip" it, up to nine in a
                       row
    log                trackers that also receive the metrics, separated by commas: tensorboard, wandb,
                       trackio, mlflow (training/observing/trackers.py)
    log_every          steps between lines on stderr, where it is not a terminal
    profile            number of steps to profile, after the first three, into output/profile; 0: none
    shard              how several processes share the model: "full" (each has a shard of it), "hybrid" (each
                       node has all of it) or "none" (each has all of it); default: full, and none with lora
                       or optimizer_memory host; adapters are whole in each process
    sequence_parallel  number of processes that share each row, with a slice of its tokens each, and exchange
                       heads for attention, for very long rows (layers/sequences/sequence_parallel.py)
    expert_parallel    number of processes that share the experts of each layer; requires shard full or
                       hybrid (layers/experts/expert_parallel.py)
    expert_comm_backend  what sends tokens between them: "standard" (torch) or "deepep" (package deep_ep)
    hang_timeout       seconds in which each process must make progress; otherwise all exit and name it
    resume             None: a new run; "auto": from the newest checkpoint in `output`, if any; or a folder
    """

    model: str
    data: tuple[str, ...]
    output: str
    objective: str = "sft"
    objective_options: dict[str, Any] = field(default_factory=dict)
    eval_data: tuple[str, ...] = ()
    eval_fraction: float = 0.0
    eval_tokens: int = 0
    eval_steps: int = 0
    sample_prompts: str | None = None
    columns: str | None = None
    split: str | None = None
    streaming: bool = False
    shuffle_buffer: int = 10_000
    data_cache: str | None = None
    verify_data: bool = False
    tokenizer: str | None = None
    seq_len: int = 2048
    batch_size: int = 1
    gradient_accumulation: int = 1
    truncate: bool = False
    train_on: str = TRAIN_ON[0]
    steps: int | None = None
    epochs: float | None = None
    optimizer: str = OPTIMIZERS[0]
    lr: float = None  # type: ignore[assignment]  # never None after __post_init__
    schedule: str = "cosine"
    warmup: float = 0
    decay: float = 0.2
    min_lr: float = 0.0
    weight_decay: float = None  # type: ignore[assignment]
    clip: float = 1.0
    dtype: str = "auto"
    weights: str = None  # type: ignore[assignment]
    moments: str = "auto"
    optimizer_memory: str = "device"
    weights_memory: str = "device"
    bias_update_rate: float = 0.001
    device: str = "auto"
    activation_memory: str = "lean"
    memory_budget: str | None = None
    attention: str = "auto"
    text_only: bool = False
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    add_tokens: tuple[str, ...] = ()
    dropout: float | None = None
    lora: str | None = None
    adapter: str | None = None
    quantize: str | None = None
    keep_quantised: bool = False
    float8: str | None = None
    cuda_graphs: bool = False
    merge: bool = False
    eval_every: int = 0
    save_every: int = 500
    keep: int = 2
    keep_best: str | None = None
    patience: int = 0
    seed: int = 0
    not_finite: str = "stop"
    log: str | None = None
    log_every: int = 10
    profile: int = 0
    shard: str | None = None
    sequence_parallel: int = 1
    expert_parallel: int = 1
    expert_comm_backend: ExpertCommBackend = "standard"
    hang_timeout: float = 600.0
    resume: str | None = None

    defaulted: ClassVar[tuple[str, ...]] = ()  # settings with a default of training/defaults.py

    def __post_init__(self) -> None:
        self._write_paths_as_text()
        self._check_kinds()
        self._fill_defaults()
        self._check_data()
        self._check_numbers()
        if self.optimizer != "adamw":
            self._check_library_optimizer()
        self._check_weights()
        check_adapters(self)
        if self.streaming:
            self._check_streaming()
        self._check_objective()

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    def _write_paths_as_text(self) -> None:
        kinds = {f.name: str(f.type).removesuffix(" | None") for f in fields(self)}
        for name, value in tuple(vars(self).items()):  # `final` of another run is a Path
            if isinstance(value, Path) or (kinds.get(name) == "str" and isinstance(value, PathLike)):
                object.__setattr__(self, name, str(value))
            elif isinstance(value, tuple):
                object.__setattr__(self, name, tuple(str(v) if isinstance(v, Path) else v for v in value))

    def _check_kinds(self) -> None:
        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type).removesuffix(" | None")
            if kind in _KINDS and not (value is None and f.default is None):
                kinds, expected = _KINDS[kind]
                self._check(f.name, isinstance(value, kinds) and not isinstance(value, bool), expected)
        for name, choices in _CHOICES.items():
            none = getattr(self, name) is None and getattr(type(self), name) is None
            self._check(name, none or getattr(self, name) in choices, f"one of {', '.join(choices)}")
        for name in ("freeze", "train_only", "add_tokens"):
            self._check(name, not isinstance(getattr(self, name), str), "a tuple of texts")

    def _fill_defaults(self) -> None:
        rates = find_defaults(
            self.objective,
            self.optimizer,
            fresh=self.model in PRESETS and not Path(self.model).exists(),
            adapters=self.lora is not None or self.adapter is not None,
        )
        object.__setattr__(self, "defaulted", tuple(n for n in rates._fields if getattr(self, n) is None))
        for name in self.defaulted:
            object.__setattr__(self, name, getattr(rates, name))
        if self.lr is None:
            raise ConfigError(f"optimizer {self.optimizer} has no default learning rate; pass lr")

    def _check_data(self) -> None:
        is_text = isinstance(self.data, str)
        self._check("data", bool(self.data) and not is_text, "at least one file, as a tuple")
        self._check("eval_data", not isinstance(self.eval_data, str), "a tuple of files")
        self._check("eval_fraction", 0 <= self.eval_fraction < 1, "a number from 0 up to, not including, 1")
        if self.eval_data and self.eval_fraction:
            raise ConfigError("got both eval_data and eval_fraction; pass one of them")
        if self.keep_best or self.patience:
            judged = "eval_data or eval_fraction" if not (self.eval_data or self.eval_fraction) else ""
            judged = judged or ("eval_every" if self.patience and not self.eval_every else "")
            if judged:
                raise ConfigError(f"keep_best and patience judge evaluations; pass {judged}, too")

    def _check_numbers(self) -> None:
        for name in _ONE_OR_MORE:
            self._check(name, getattr(self, name) >= 1, "a whole number of 1 or more")
        for name in _ZERO_OR_MORE:
            self._check(name, getattr(self, name) >= 0, "0 or more")
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else f"steps={self.steps} and epochs={self.epochs}"
            raise ConfigError(f"the length of the run: found {found}; pass exactly one of steps and epochs")
        self._check("steps", self.steps is None or self.steps >= 1, "1 or more")
        endless = self.epochs is not None and not 0 < self.epochs < float("inf")
        self._check("epochs", not endless, "more than 0, and not endless")
        assert self.lr is not None
        self._check("lr", 0 < self.lr < float("inf"), "a number above 0")
        for name in ("warmup", "decay"):
            number = getattr(self, name)
            self._check(
                name, number < 1 or number == int(number), "a whole number of steps, or a share below 1"
            )
        self._check("min_lr", self.min_lr <= self.lr, f"at most lr, which is {self.lr:g}")
        self._check("bias_update_rate", 0 <= self.bias_update_rate < float("inf"), "a number of 0 or more")
        self._check("hang_timeout", self.hang_timeout > 0, "seconds, more than 0")
        self._check("seed", abs(self.seed) < 2**63, "a 64-bit integer")

    def _check_weights(self) -> None:
        """Check where weights and activations are."""
        if self.memory_budget is not None and self.activation_memory != "auto":
            raise ConfigError("memory_budget requires activation_memory 'auto'")
        self._check("dropout", self.dropout in (None, 0.0), "0, or None for the model config's")
        if self.expert_parallel > 1 and self.sharding == "none":
            raise ConfigError(
                f"expert_parallel is {self.expert_parallel}, but with this shard each process has the whole "
                "model: expected shard 'full' or 'hybrid'"
            )
        if self.cuda_graphs and (self.weights_memory == "host" or self.activation_memory == "offload"):
            raise ConfigError("cuda_graphs needs weights_memory 'device', and another level than 'offload'")

    def _check_objective(self) -> None:
        make_objective(self.objective, self.objective_options)
        if self.train_on != TRAIN_ON[0] and OBJECTIVES[self.objective].form is not None:
            raise ConfigError(
                f"train_on is {self.train_on!r}, but objective {self.objective} compares or judges answers; "
                "omit it"
            )
        if self.objective_options.get("mtp") and self.sequence_parallel > 1:
            raise ConfigError(
                f"sequence_parallel is {self.sequence_parallel}, but mtp needs the next token, which may be "
                "in another process; omit one of them"
            )
        if self.objective != "sft" and self.sequence_parallel > 1:
            raise ConfigError(
                f"sequence_parallel is {self.sequence_parallel}, but only objective sft supports it; found "
                f"{self.objective}; omit it"
            )

    def _check_streaming(self) -> None:
        reference = OBJECTIVES[self.objective].needs_reference
        for problem, reason in (
            (self.steps is None, "needs steps: how many records an epoch has is unknown"),
            (self.eval_fraction, "cannot hold out an eval_fraction; pass eval_data, such as another split"),
            (
                reference,
                f"does not serve objective {self.objective}, whose reference scores all data before the run; "
                "omit streaming, or choose orpo or simpo",
            ),
            (self.objective == "grpo", "does not serve objective grpo; omit it"),
        ):
            if problem:
                raise ConfigError(f"streaming {reason}")

    def _check_library_optimizer(self) -> None:
        """Refuse settings that only AdamW has, and adapters under Muon."""
        only = f"with optimizer {self.optimizer}; or optimizer adamw"
        self._check("weights", self.weights in LIBRARY_WEIGHTS, f"one of {', '.join(LIBRARY_WEIGHTS)} {only}")
        self._check("moments", self.moments == "auto", f"auto {only}")
        self._check("optimizer_memory", self.optimizer_memory == "device", f"device {only}")
        if self.optimizer in MUON and (self.lora is not None or self.adapter is not None):
            raise ConfigError(
                f"optimizer {self.optimizer} orthogonalises the updates of whole matrices, but low-rank "
                "adapters are factors of one; choose another optimizer"
            )

    def changed(self, **changes: Any) -> TrainConfig:
        """A copy with other settings, and with their defaults where this one has defaults."""
        return replace(self, **{**dict.fromkeys(self.defaulted), **changes})

    @property
    def sharding(self) -> str:
        """How several processes share the model."""
        return self.shard or ("none" if self.lora is not None else "full")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Differences from `other`, a `to_dict` that went through JSON: {name: (its value, this one's)}. A
        setting that it lacks, of an older version, has its default.
        """

        def plain(value: Any) -> Any:
            return list(value) if isinstance(value, tuple) else value

        other = {f.name: plain(f.default) for f in fields(self) if f.default is not MISSING} | other
        mine = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        return {name: (other.get(name), value) for name, value in mine.items() if other.get(name) != value}
