"""Runs that learn from their own samples: prompts in, answers judged by functions, steps of GRPO.

A reward function is called with the keywords `prompts` and `completions`, lists of the same length, and a
list for each further column of the records. It returns a number for each completion (None: no reward):

    def reward(prompts, completions, answer, **others):
        return [float(a in c) for c, a in zip(completions, answer)]
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import ConfigError, DataError
from liger_models.layers.attention.backends import WITH_TREES
from liger_models.layers.sequences.tree import check_tree
from liger_models.training.data import describe
from liger_models.training.data.prompts import Prompts
from liger_models.training.inputs import read_spec
from liger_models.training.learning_rate import LearningRate
from liger_models.training.loop import Run
from liger_models.training.objectives import make_objective
from liger_models.training.objectives.grpo import GRPO

COMPLETIONS = "completions.jsonl"


class SamplingRun(Run):
    """A run of GRPO in one process. Each step's answers are added to OUTPUT/completions.jsonl."""

    documents: Any

    def _read_inputs(
        self, checkpoint: Path | None, resumed: dict[str, Any] | None, opened: ExitStack
    ) -> None:
        config = self.config
        objective = make_objective(config.objective, config.objective_options)
        assert isinstance(objective, GRPO)
        if self.world.size > 1:
            raise ConfigError(
                "objective grpo runs in one process; on several GPUs use TRL with our models (docs/grpo.md)"
            )
        if config.eval_data or config.eval_fraction:
            raise ConfigError(
                "objective grpo has no held-out data: its rewards are measured on its own samples"
            )
        if config.sample_prompts:
            raise ConfigError(f"objective grpo writes its samples to {COMPLETIONS}; omit sample_prompts")
        if config.truncate or config.train_on != "all":
            raise ConfigError(
                "objective grpo reads prompts, which truncate and train_on do not affect; omit them"
            )
        if objective.beta and not objective.reference and config.lora is None:
            raise ConfigError(
                "beta needs a model for its KL term: pass --reference MODEL, or train with --lora"
            )
        self.rewards = [load_reward(name) for name in objective.reward.split("+")]
        spec = read_spec(config, self.tokenizer, checkpoint)
        try:
            check_tree(spec, None)
        except DataError as error:
            raise ConfigError(f"objective grpo computes a prompt once for its answers: {error}") from error
        if config.attention not in ("auto", *WITH_TREES):
            raise ConfigError(
                f"attention is {config.attention!r}; objective grpo takes auto, {', '.join(WITH_TREES)}"
            )
        room = config.seq_len - objective.max_new_tokens
        if spec.position_limit is not None and config.seq_len > spec.position_limit:
            raise ConfigError(f"seq_len is {config.seq_len}; the model has {spec.position_limit} positions")
        options: dict[str, Any] = {"longest": room, "columns": config.columns, "split": config.split}
        self.documents = Prompts(config.data, self.tokenizer, **options)
        self.held_out = self.samples = None
        self.world.say(f"data: {describe(self.documents.counts)}")

    def _note_special_tokens(self) -> None:
        """Do nothing: the tokens that will be sampled are unknown."""

    def _make_objective(self, checkpoint: Path | None) -> None:
        super()._make_objective(checkpoint)
        objective: Any = self.objective
        objective.tokenizer, objective.on_samples = self.tokenizer, self._write_samples
        objective.judge = lambda *about: judge(self.rewards, *about)

    def _read_steps(self, opened: ExitStack) -> None:
        config, objective = self.config, self.objective
        assert isinstance(objective, GRPO)
        size, accumulation = config.batch_size, config.gradient_accumulation
        group, updates = objective.group_size, objective.updates
        self.steps: Any = self.documents.steps(
            self.progress.position, config.seed, size, accumulation, group, updates
        )
        self.rows_per_step = size * accumulation * group
        epochs = math.ceil((config.epochs or 0) * len(self.documents) / (size * accumulation)) * updates
        self.total = config.steps or epochs
        self.learning_rate = LearningRate(
            config.schedule, config.lr, self.total, config.warmup, config.decay, config.min_lr
        )

    def _open_outputs(self, checkpoint: Path | None, *rest: Any) -> None:
        super()._open_outputs(checkpoint, *rest)
        path = self.output / COMPLETIONS
        if not path.exists():
            return
        before = self.progress.step if checkpoint else 0  # later samples are drawn again
        kept = [line for line in path.read_text("utf-8").splitlines(True) if _step_of(line) <= before]
        path.write_text("".join(kept), "utf-8")

    def _announce(self, checkpoint: Path | None) -> None:
        self.world.say(
            f"model: {self.size:,} parameters on {self.world.device}; {self.total:,} steps of "
            f"{self.rows_per_step} answers"
        )
        if checkpoint:
            self.world.say(f"resumed from {checkpoint}, step {self.progress.step}")

    def _write_samples(self, samples: list[dict[str, Any]]) -> None:
        with (self.output / COMPLETIONS).open("a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"step": self.progress.step + 1, **sample}, default=str) + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut by a kill
        return math.inf


def load_reward(name: str) -> Callable[..., Any]:
    """Load FUNCTION from FILE.py, given as FILE.py:FUNCTION. The file's code runs.

    Raises:
        ConfigError: there is no such file or function, or the file fails.
    """
    file, _, function = name.rpartition(":")
    path = local_path(file, ConfigError)
    if not file or not path.is_file():
        raise ConfigError(f"reward is {name!r}; expected FILE.py:FUNCTION with a file that exists")
    spec = importlib.util.spec_from_file_location(f"liger_models_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward is {name!r}; expected a Python file, FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any code
        raise ConfigError(f"reward file {path} fails ({type(error).__name__}: {error})") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"reward file {path} has no function {function!r}")
    return found


def judge(
    functions: list[Callable[..., Any]],
    prompts: list[Any],
    completions: list[str],
    columns: list[dict[str, Any]],
) -> Tensor:
    """Rewards [answers, functions] float32, nan for None.

    Raises:
        ConfigError: a function fails, or returns something else than a number for each completion.
    """
    names = sorted({name for row in columns for name in row})
    others = {name: [row.get(name) for row in columns] for name in names}
    found = []
    for function in functions:
        name = getattr(function, "__name__", "reward")
        try:
            values = [
                math.nan if value is None else float(value)
                for value in function(prompts=prompts, completions=completions, **others)
            ]
        except Exception as error:  # any code
            raise ConfigError(f"the reward {name} fails ({type(error).__name__}: {error})") from error
        if len(values) != len(completions) or any(map(math.isinf, values)):
            raise ConfigError(
                f"the reward {name} returned {len(values)} values for {len(completions)} completions; "
                "expected a finite number or None for each"
            )
        found.append(torch.tensor(values))
    return torch.stack(found, 1)
