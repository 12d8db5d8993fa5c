"""Parts of a run: inputs, model, objective, optimizer, data and outputs, opened in stages.

If a stage fails, everything that earlier ones opened is closed, as at the end of a run.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.classifier import LigerSequenceClassifier
from liger_models.models.float8 import copied_bytes, float8_summary
from liger_models.training.best import Best, check_best
from liger_models.training.callbacks import Callback, Callbacks
from liger_models.training.checkpoints import state as states
from liger_models.training.checkpoints.run_folder import BEST, abandon_after
from liger_models.training.checkpoints.saving import Saver
from liger_models.training.checkpoints.state import Progress
from liger_models.training.config import TrainConfig
from liger_models.training.data import BlockStream, Groups, Stream, ahead, read_steps
from liger_models.training.evaluating import Evaluation
from liger_models.training.inputs import (
    can_share_prompts,
    load_data,
    load_model,
    read_spec,
    tokenizer_folder,
)
from liger_models.training.learning_rate import LearningRate
from liger_models.training.objectives import OBJECTIVES, make_objective
from liger_models.training.observing.flops import measure_peak
from liger_models.training.observing.metrics import METRICS, Metrics, read_metrics
from liger_models.training.observing.rounding import describe_rounding
from liger_models.training.observing.samples import Samples, read_prompts
from liger_models.training.observing.trackers import open_trackers, parse_trackers
from liger_models.training.optimizer import build_optimizer
from liger_models.training.processes.watch import Watch
from liger_models.training.processes.world import World
from liger_models.training.random_numbers import seed_generators
from liger_models.training.reference import add_reference, load_second_model
from liger_models.training.results import Tally
from liger_models.training.resuming import check_resumed, find_checkpoint
from liger_models.training.settings_file import write_settings
from liger_models.training.text.added_tokens import write_with_tokens
from liger_models.training.text.tokenizer import TextTokenizer
from liger_models.training.trained_part import untrained_rows_warning

FEW_STEPS = 20  # fewer hardly train a model


class RunParts:
    """The parts of one run in one process, a context manager that closes them.

    Raises:
        ConfigError, DataError, CheckpointError, UnsupportedModelError: the settings or the inputs cannot be
            used. Nothing is left open.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        watch: Watch | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self.config, self.world = config, world
        self.watch = watch or Watch(world, config.hang_timeout)
        self.callbacks = Callbacks(callbacks, world, self.watch)
        self.output = local_path(config.output, ConfigError)
        trackers = parse_trackers(config.log)
        checkpoint, resumed = find_checkpoint(config, world, self.output)
        with ExitStack() as opened:
            self._read_tokenizer(checkpoint, opened)
            self._read_inputs(checkpoint, resumed, opened)
            opened.callback(self._forget_model)
            self._load_model(checkpoint)
            self._make_objective(checkpoint)
            self._make_optimizer()
            self._restore(checkpoint, resumed)
            self._read_steps(opened)
            self._find_best()
            self._join_processes(opened)
            if world.main:
                self._open_outputs(checkpoint, trackers, opened)
            self.peak = measure_peak(world.device, self.model.dtype)
            self._announce(checkpoint)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def _read_tokenizer(self, checkpoint: Path | None, opened: ExitStack) -> None:
        self.tokenizer = TextTokenizer(tokenizer_folder(self.config, checkpoint))
        if self.config.add_tokens:  # saving copies the files from the temporary folder
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="liger-models-tokenizer-")))
            self.tokenizer = write_with_tokens(self.tokenizer, self.config.add_tokens, folder)

    def _read_inputs(
        self, checkpoint: Path | None, resumed: dict[str, Any] | None, opened: ExitStack
    ) -> None:
        """Read the model's config and the data, and fail fast if they are unusable, before any device is
        touched.
        """
        spec = read_spec(self.config, self.tokenizer, checkpoint)
        self.samples = self._read_samples(spec)
        self.documents, self.held_out = load_data(
            self.config, self.world, spec, self.tokenizer, resumed, opened
        )

    def _read_samples(self, spec: ModelSpec) -> Samples | None:
        config, world = self.config, self.world
        if not config.sample_prompts:
            return None
        if OBJECTIVES[config.objective].rewards:
            raise ConfigError("objective reward trains a model that writes no text; omit sample_prompts")
        if world.shard != "none" or world.sequence > 1 or world.experts > 1:
            raise ConfigError(
                "sample_prompts are answered by one process, which needs the whole model; pass --shard none "
                "without --sequence-parallel and --expert-parallel, or omit it, and use `liger-models "
                "generate` on a checkpoint"
            )
        prompts = read_prompts(config.sample_prompts, self.tokenizer, spec.position_limit)
        return Samples(prompts, self.tokenizer, spec.position_limit, self.output)

    def _load_model(self, checkpoint: Path | None) -> None:
        # Fresh weights are the same in every rank.
        seed_generators(self.config.seed, self.world.device)
        loaded = load_model(self.config, self.world, self.tokenizer, checkpoint)
        if self.config.lora is None and (distance := describe_rounding(loaded.model)):
            self.world.say(distance)
        self.model, self.adapters, self.flops, self.size = loaded
        self._note_special_tokens()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.encoder_parameters = list(self.model.encoder_parameters())

    def _forget_model(self) -> None:
        """Drop the references to the model: one that outlives its process group sometimes waits forever."""
        for name in ("wrapped", "model"):
            vars(self).pop(name, None)

    def _make_objective(self, checkpoint: Path | None) -> None:
        config, world = self.config, self.world
        self.objective = make_objective(config.objective, config.objective_options)
        shares = self.objective.shares_prompts and can_share_prompts(self.model.spec, config)
        for documents in (self.documents, self.held_out):
            if isinstance(documents, Groups):
                documents.shares = shares
        self.tally = Tally(self.objective.metrics, world)
        self.evaluation = Evaluation(self.held_out, self.samples, self.objective, config, world, self.watch)
        self.objective.prepare(lambda name: load_second_model(config, world, self.tokenizer, name))
        if self.objective.needs_reference:
            self._add_reference(checkpoint)

    @property
    def keeps_float8_weights(self) -> bool:
        """Whether weights are cast to float8 once a step: for several micro-batches, and if their copies take
        no memory that the run was asked to save.
        """
        config = self.config
        saves = config.activation_memory == "auto" or config.weights_memory == "host"
        return bool(config.float8) and config.gradient_accumulation > 1 and not (saves or config.cuda_graphs)

    def _make_optimizer(self) -> None:
        config = self.config
        self.optimizer = build_optimizer(
            self.model,
            name=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            weights=config.weights,
            moments=config.moments,
            seed=config.seed,
            state_device="cpu" if config.optimizer_memory == "host" else None,
        )

    def _restore(self, checkpoint: Path | None, resumed: dict[str, Any] | None) -> None:
        """Restore weights, optimizer and progress from the checkpoint, or begin at step 0."""
        self.progress, self.resumed = Progress(), checkpoint is not None
        self.skipped = 0  # steps in a row
        self.data = self.documents.fingerprint()
        if checkpoint and resumed:
            check_resumed(self.config, self.world, checkpoint, resumed, self.data)
            self.progress = states.restore(checkpoint, resumed, self.model, self.optimizer)

    def _read_steps(self, opened: ExitStack) -> None:
        """Begin to read the rows of steps, in a thread that runs ahead."""
        config, world = self.config, self.world
        blocks = self.documents.blocks
        kind = Stream if blocks is None else BlockStream
        self.stream = kind(self.documents, config.seq_len, config.seed, self.progress.position)
        self.rows_per_step = world.data_size * config.gradient_accumulation * config.batch_size
        share = world.data_rank, world.data_size, world.device
        steps = read_steps(self.stream, config.batch_size, config.gradient_accumulation, *share)
        self.steps = ahead(steps)
        opened.callback(self.steps.close)
        if blocks is not None:
            opened.callback(blocks.closed.set)  # before the thread that may wait for a block is joined
        # Earlier steps may have had another size, with more or fewer processes.
        self.total = config.steps or self.progress.step + math.ceil(
            self.stream.rows_left(config.epochs or 0) / self.rows_per_step
        )
        self.learning_rate = LearningRate(
            config.schedule, config.lr, self.total, config.warmup, config.decay, config.min_lr
        )

    def stream_state(self) -> dict[str, Any] | None:
        """State of the reader of streamed data before the block of the run's position."""
        if self.documents.blocks is None:
            return None
        assert isinstance(self.stream, BlockStream)
        return self.stream.state(self.progress.position)

    def _find_best(self) -> None:
        """Restore the best evaluation so far from the checkpoint."""
        metric = self.config.keep_best or "eval_loss"
        if self.config.keep_best and self.held_out and metric[5:] not in ("loss", *self.objective.metrics):
            raise ConfigError(
                f"keep_best is {metric!r}, but objective {self.config.objective} has no such metric; "
                f"expected {' or '.join(f'eval_{name}' for name in ('loss', *self.objective.metrics))}"
            )

        def find() -> Best:
            earlier = read_metrics(self.output / METRICS) if self.resumed else ()
            best = Best(metric, [r for r in earlier if r["step"] <= self.progress.step])
            if self.config.keep_best and self.resumed and (aside := check_best(self.output, best)):
                self.world.say(f"{self.output / BEST} is of later or other steps and is set aside as {aside}")
            return best

        self.best = self.world.once(find)

    def _join_processes(self, opened: ExitStack) -> None:
        self.wrapped = self.world.wrap(self.model)
        self.saver = Saver(self.world)
        opened.callback(self.saver.close)
        self.world.barrier()  # every rank has found the checkpoint where it was

    def _open_outputs(self, checkpoint: Path | None, trackers: tuple[str, ...], opened: ExitStack) -> None:
        """Open the metrics and the trackers, and set aside what an earlier run wrote after the checkpoint."""
        for left in abandon_after(self.output, checkpoint) if checkpoint else ():
            self.world.say(
                f"output written after {checkpoint} is set aside as {left}; remove it if you do not need it"
            )
        self.output.mkdir(parents=True, exist_ok=True)
        write_settings(self.config, self.output)
        resumed_step = self.progress.step if checkpoint else None
        self.metrics = Metrics(self.output, resumed_step=resumed_step, extra=self.objective.metrics)
        if self.samples:
            self.samples.begin(resumed_step)
        settings = self.config.to_dict()
        self.trackers = [
            opened.enter_context(tracker)
            for tracker in open_trackers(trackers, self.output, settings, resumed_step)
        ]

    def _note_special_tokens(self) -> None:
        learned = self.documents.learned_tokens()
        if not isinstance(self.model, LigerSequenceClassifier):
            self.model.learned_ends = tuple(learned.ends())
            warning = untrained_rows_warning(self.model, learned, self.tokenizer)
            if warning and self.world.main:
                warnings.warn(warning, stacklevel=2)

    def _add_reference(self, checkpoint: Path | None) -> None:
        config, world = self.config, self.world
        resumed = checkpoint is not None and (not self.adapters or bool(config.adapter))

        def load() -> LigerCausalLM:
            return load_model(config, world, self.tokenizer, None).model

        parts = self.documents, self.held_out
        load_again = load if resumed else None
        add_reference(config, world, self.objective, parts, self.model, load_again, self.watch.mark)

    def _announce(self, checkpoint: Path | None) -> None:
        dtype = str(self.model.dtype).removeprefix("torch.")
        if self.adapters:
            trained = sum(p.numel() for p in self.parameters)
            self.world.say(f"adapters: {trained:,} parameters on {len(self.adapters.layers)} layers")
        elif self.config.freeze or self.config.train_only:
            trained = sum(p.numel() for p in self.parameters)
            self.world.say(f"trained: {trained:,} of {self.size:,} parameters ({trained / self.size:.1%})")
        if self.config.add_tokens:
            ids = ((token, self.tokenizer.backend.token_to_id(token)) for token in self.config.add_tokens)
            self.world.say(f"added tokens: {', '.join(f'{token} ({index})' for token, index in ids)}")
        rows = f"{self.rows_per_step} row{'' if self.rows_per_step == 1 else 's'}"
        self.world.say(
            f"model: {self.size:,} parameters, {self.config.quantize or dtype} on "
            f"{self.world.device}; {self.total:,} steps of {rows} of {self.config.seq_len} tokens"
        )
        if self.config.float8:
            copies = copied_bytes(self.model) if self.keeps_float8_weights else 0
            kept = f"; {copies / 2**30:.1f} GiB for weights cast once a step" if copies else ""
            self.world.say(f"float8: {self.config.float8} in {float8_summary(self.model)}{kept}")
        if self.config.epochs and self.total < FEW_STEPS:
            self.world.say(
                f"only {self.total} steps, which hardly train a model: more --epochs, a shorter --seq-len or "
                "fewer rows a step give more"
            )
        default = dict.fromkeys(self.config.defaulted, " (default)")
        self.world.say(
            f"optimizer: {self.config.optimizer}, learning rate {self.config.lr:g}{default.get('lr', '')}, "
            f"weight decay {self.config.weight_decay:g}{default.get('weight_decay', '')}"
        )
        self.world.say(f"packing: {self.stream.efficiency():.1%} of the tokens of a row are filled")
        if checkpoint:
            self.world.say(f"resumed from {checkpoint}, step {self.progress.step}")
        elif self.config.resume:
            self.world.say(f"no checkpoint in {self.output} yet: starting anew")
