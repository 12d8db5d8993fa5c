"""The training run: data in, steps of AdamW, metrics and checkpoints out.

A step reads world * gradient_accumulation * batch_size rows and minimises the mean loss over all their
labels:

    loss = sum over every label of the step / number of labels of the step

or over pairs, or answers, depending on the objective (training/objectives). The number is known before the
first micro-batch, so that micro-batches and ranks are weighted by their labels, and k micro-batches, or k
ranks, give the gradient of one large batch.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.checkpoints.shards import local_tensor
from liger_models.convert.errors import ConfigError, TrainingError
from liger_models.layers.experts.load_balance import forget_load, update_correction_bias
from liger_models.models.float8 import keep_float8_weights
from liger_models.models.loading import from_hub
from liger_models.training.best import BEST_FILE
from liger_models.training.callbacks import Callback
from liger_models.training.checkpoints import state as states
from liger_models.training.checkpoints.run_folder import BEST, checkpoints, locked
from liger_models.training.checkpoints.saving import write
from liger_models.training.checkpoints.state import Progress, Trained
from liger_models.training.config import TrainConfig
from liger_models.training.inputs import with_adapter
from liger_models.training.observing.curves import plot_losses
from liger_models.training.observing.display import Display
from liger_models.training.observing.metrics import (
    Speeds,
    finite_or_none,
    peak_memory,
    read_metrics,
)
from liger_models.training.observing.profiling import StepProfiler
from liger_models.training.observing.trackers import numbers_of
from liger_models.training.processes.signals import Signals
from liger_models.training.processes.watch import Watch
from liger_models.training.processes.world import World
from liger_models.training.random_numbers import random_states, restored_random_states
from liger_models.training.results import Outcome, TrainingInterrupted, TrainResult
from liger_models.training.run_parts import RunParts

MOST_SKIPPED = 10  # consecutive steps with a non-finite gradient: the run has diverged


def train_as(kind: type[Run], config: TrainConfig, callbacks: Iterable[Callback] = ()) -> TrainResult:
    """Run `config` to its end as a run of this kind; raises as `train` does (starting.py)."""
    config = with_adapter(config)
    output = local_path(config.output, ConfigError)
    # The first rank writes for all.
    lock = locked(output) if World.is_main() else contextlib.nullcontext()
    shares = config.sharding, config.sequence_parallel, config.expert_parallel, config.expert_comm_backend
    with (
        lock,
        World(config.device, *shares, adapters=config.lora is not None) as world,
        restored_random_states(world.device),
        Watch(world, config.hang_timeout) as watch,
        kind(config, world, watch, callbacks) as run,
    ):
        result = run.train()
        watch.mark("the end of the run")
        return result


class Run(RunParts):
    """One run in one process: its steps, evaluations and saves."""

    def train(self) -> TrainResult:
        config, world = self.config, self.world
        speeds = Speeds(world.size * self.peak, self.objective.metrics)
        profile = config.profile if world.main else 0
        with (
            Signals() as signals,
            Display(world.main, self.total, self.progress.step, config.log_every) as display,
            StepProfiler(self.output / "profile", profile) as profiler,
        ):
            evaluated: dict[str, Any] = {}  # the latest record with an evaluation
            if self.evaluation and not self.resumed and (before := self.evaluate(display)):
                evaluated = {"step": 0, "tokens": 0, **before}
                self._record(evaluated)
            while (step := self.progress.step) < self.total and not self._stops_early():
                started = time.perf_counter()
                rate = self.learning_rate.rate(step)
                with profiler.step():
                    outcome = self.step(rate, signals)
                if outcome is None:
                    raise self._interrupted(signals)
                counts = outcome.data.counts
                flops = self.objective.flops(self.flops, counts)
                record: dict[str, Any] = {
                    "step": self.progress.step,
                    "tokens": self.progress.tokens,
                    "loss": finite_or_none(outcome.loss),
                    **outcome.metrics,
                    "lr": rate,
                    "grad_norm": finite_or_none(outcome.norm),
                    **speeds.add(counts.inputs, flops, time.perf_counter() - started),
                    "filled": counts.inputs / (self.rows_per_step * config.seq_len),
                    "memory": peak_memory(world.device),
                }
                if config.not_finite == "skip":
                    record["skipped"] = int(not outcome.finite)
                if self.adapters or config.freeze or config.train_only:
                    record["trainable_parameters"] = sum(p.numel() for p in self.parameters)
                if self.evaluation and self._due(config.eval_every):
                    record |= self.evaluate(display)
                    evaluated = record
                self._record(record)
                if self.best.improves(self.progress.step, record) and config.keep_best:
                    self._save_best()
                display.step(self.progress.step, speeds.line(record, evaluated))
                if outcome.stop:
                    self.saver.wait()  # may raise the actual error
                    raise self._interrupted(signals)
                # The last step's state is not worth more than the others': the final export follows.
                if config.save_every and self.progress.step % config.save_every == 0:
                    self.save(meanwhile=True)
        if step < self.total:
            reason = "a callback stopped it" if self.callbacks.stop else self.best
            world.say(f"stopped early after step {step} of {self.total}: {reason}")
        return self._finish()

    def step(self, rate: float, signals: Signals) -> Outcome | None:
        """Take one optimizer step, or skip it if its gradient is not finite. Returns None if a signal
        interrupted it.

        An interrupted step has no effect: weights, data position and random states are unchanged, so it is
        repeated in full.
        """
        config, world = self.config, self.world
        number = self.progress.step + 1
        self.watch.mark(f"step {number}, reading its data")
        data, put_back = next(self.steps), random_states(world.device)
        sums = self.tally.zeros()
        self.objective.begin_step(self.model, ((batch, True) for batch in data.batches), world.device)
        with keep_float8_weights(self.model) if self.keeps_float8_weights else contextlib.nullcontext():
            for k, batch in enumerate(data.batches):
                if signals.received is not None and world.size == 1:  # ranks agree at the end of a step
                    self.optimizer.zero_grad()
                    put_back()
                    return None
                last = k == config.gradient_accumulation - 1
                self.watch.mark(f"step {number}, micro-batch {k + 1}")
                with world.micro_batch(self.wrapped, last):
                    # Ranks' gradients are averaged, but the sum of their shares is wanted. Ranks that share a
                    # row have one share, whose gradient is their mean.
                    share = self.objective.share(self.wrapped, batch.to(world.device), data.counts)
                    (share.loss * world.data_size).backward()
                sums += self.tally.of(share)
        stop = sums.new_full((1,), float(signals.received is not None or self.saver.failed))
        sums = world.sum(torch.cat([sums, stop]))
        norm = self.optimizer.clip_grad_norm(config.clip or math.inf)
        # The only synchronisation of a step, which must precede the update: a NaN in the weights and both
        # moments cannot be undone.
        self.watch.mark(f"step {number}, its end")
        *numbers, stopped, size = torch.cat([sums, norm.to(sums)[None]]).tolist()
        loss, metrics = self.tally.means(numbers)
        outcome = Outcome(loss, size, stopped > 0, data, metrics)
        if outcome.finite:
            if not data.images:  # a process that only follows others has zeros, not None
                for parameter in self.encoder_parameters:
                    parameter.grad = None
            self._update(rate)
        else:
            self._skip(outcome)
        tokens = self.progress.tokens + data.counts.inputs
        self.progress = Progress(self.progress.step + 1, tokens, data.position)
        return outcome

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.config.bias_update_rate and not self.adapters:  # adapters leave the base model unchanged
            update_correction_bias(self.model, self.config.bias_update_rate)
        self.skipped = 0

    def _skip(self, outcome: Outcome) -> None:
        """Skip a step with a non-finite gradient: weights and optimizer do not change.

        Raises:
            TrainingError: skipping was not requested, or too many steps in a row.
        """
        self.skipped += 1
        if self.config.not_finite == "stop" or self.skipped == MOST_SKIPPED:
            raise self._not_finite(outcome.loss, outcome.norm)
        self.optimizer.zero_grad()
        forget_load(self.model)
        self.world.say(
            f"step {self.progress.step + 1} is skipped: its loss is {outcome.loss} and its gradient's norm "
            f"{outcome.norm}"
        )

    def evaluate(self, display: Display | None = None) -> dict[str, float | None]:
        """Metrics on the held-out data, if any, with the prefix eval_; also answers the sample prompts."""
        return self.evaluation(self.model, self.progress.step, display)

    def save(self, *, keep: int | None = None, meanwhile: bool = False) -> None:
        """Save the state, and delete all but the newest `keep` checkpoints (default: the setting); with
        `meanwhile`, the run may continue during the write.
        """
        self.watch.suspend_deadline(f"saving checkpoint-{self.progress.step}")
        self.saver.wait()  # it may delete files that are read here
        self.callbacks.written(self.saver)
        if not self._weights_are_finite():
            raise TrainingError(
                f"step {self.progress.step}: the weights are no longer finite and are not saved; "
                f"{self._retry()}"
            )
        contents = states.describe_state(
            self.output,
            self._trained(),
            self.model,
            self.optimizer,
            self.progress,
            config=self.config.to_dict(),
            data=self.data,
            stream=self.stream_state(),
            tokenizer=self.tokenizer.folder,
            keep=self.config.keep if keep is None else keep,
        )
        # Adapters are small, and written by PEFT.
        self.saver.save(contents, meanwhile=meanwhile and not self.adapters)
        self.callbacks.writing(contents.target)
        # The source checkpoint may be deleted when newer ones exist: copy its auxiliary files from here,
        # which is in place before the next save.
        if not self.adapters:
            self.tokenizer.folder = contents.target
            if self.model.source_folder:
                self.model.source_folder = contents.target

    def _save_best(self) -> None:
        """Write the model to output/best, with its step."""
        self.watch.suspend_deadline(f"saving the best model of step {self.progress.step}")
        notes = {BEST_FILE: self.best.text()}
        best = states.describe_export(self.output / BEST, self._trained(), self.tokenizer.folder, notes)
        self.saver.save(best, meanwhile=not self.adapters)  # adapters are small
        self.callbacks.writing(best.target)

    def _stops_early(self) -> bool:
        return self.callbacks.stop or 0 < self.config.patience <= self.best.since

    def _trained(self) -> Trained:
        return Trained(self.adapters.write) if self.adapters else Trained.of_model(self.model)

    def _weights_are_finite(self) -> bool:
        """Weights that overflowed must not be resumed from, nor replace a good checkpoint."""
        own = [tensor for p in self.parameters if (tensor := local_tensor(p.detach())).numel()]
        largest = torch._foreach_norm(own, math.inf)
        finite = bool(torch.stack([value.float() for value in largest]).isfinite().all())
        return not self.world.any(not finite)

    def _retry(self) -> str:
        last = states.newest_checkpoint(self.output)
        begin = f"resume from {last}" if last else "start again"
        return f"{begin} with {self._remedies()}"

    def _remedies(self) -> str:
        clip = "a smaller --clip" if self.config.clip else "a --clip above 0"
        return f"a lower --lr, a longer --warmup or {clip}"

    def _due(self, every: int) -> bool:
        return self.progress.step == self.total or bool(every and self.progress.step % every == 0)

    def _record(self, record: dict[str, Any]) -> None:
        if self.world.main:
            self.metrics.write(record)
            for tracker in self.trackers:
                tracker.write(record["step"], numbers_of(record))
        self.callbacks.recorded(record, self.saver)

    def _finish(self) -> TrainResult:
        final = self.output / "final"
        records: list[dict[str, Any]] = []
        self.watch.suspend_deadline("writing what was trained")
        self._export(final)
        if self.adapters and self.config.merge:
            self._merge(self.output / "merged")
        if self.world.main:
            records = list(read_metrics(self.metrics.jsonl))
            objective = self.objective
            title = f"{self.config.model}, {self.config.objective}"
            plot_losses(records, self.output / "loss.png", objective.unit, objective.metrics, title)
        self.callbacks.written(self.saver)
        self.world.barrier()
        best = self.output / BEST if self.config.keep_best and self.best.step else None
        return TrainResult(final, self.progress.step, records, self.output, checkpoints(self.output), best)

    def _merge(self, target: Path) -> None:
        """Write the model with its adapters merged. If it is sharded, the first process reads it again, into
        host memory.
        """
        assert self.adapters is not None
        if self.world.shard == "none":
            self.adapters.merge()
            self.adapters = None
            self._export(target)
            return

        def write_merged() -> None:
            base, dtype = self.config.model, self.model.dtype
            options: dict[str, Any] = {"dropout": self.config.dropout, "text_only": self.config.text_only}
            model = from_hub(self.output / "final", base=base, dtype=dtype, device="cpu", **options)
            write(states.describe_export(target, Trained.of_model(model), self.tokenizer.folder))

        self.saver.wait()
        self.world.once(write_merged)
        self.callbacks.writing(target)

    def _export(self, target: Path) -> None:
        self.saver.wait()
        self.saver.save(states.describe_export(target, self._trained(), self.tokenizer.folder))
        self.callbacks.writing(target)

    def _interrupted(self, signals: Signals) -> TrainingInterrupted:
        self.save()
        self.callbacks.written(self.saver)
        where = self.output / f"checkpoint-{self.progress.step}"
        return TrainingInterrupted(
            f"stopped after step {self.progress.step} of {self.total}; the state is in {where}. "
            "Repeat the command with --resume to continue.",
            signals.received or signal.SIGINT,  # another rank's signal is reported as SIGINT
        )

    def _not_finite(self, loss: float, norm: float) -> TrainingError:
        self.optimizer.zero_grad()
        step = self.progress.step
        skipped = f" ({self.skipped} steps in a row)" if self.skipped > 1 else ""
        if not self._weights_are_finite():
            return TrainingError(
                f"step {step + 1}: the loss is {loss}, the gradient's norm {norm}, and the weights of the "
                f"previous step are not finite either: they are not saved; {self._retry()}"
            )
        # This state may diverge again: keep the earlier ones, whatever `keep` is.
        self.save(keep=0)
        return TrainingError(
            f"step {step + 1}: the loss is {loss} and the gradient's norm {norm}, which must be finite"
            f"{skipped}. The state before this step is saved in {self.output / f'checkpoint-{step}'}; resume "
            f"from an earlier checkpoint with {self._remedies()}"
        )


__all__ = ["TrainConfig", "TrainResult", "TrainingInterrupted", "train_as"]
