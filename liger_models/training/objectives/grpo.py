"""GRPO: answers sampled from the model itself, and judged by functions (losses/grpo_loss.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.convert.errors import ConfigError
from liger_models.losses import (
    PolicyOptions,
    SharedPrompts,
    group_advantages,
    grpo_loss,
    shared_prompts,
    without_adapters,
)
from liger_models.training.data import Counts
from liger_models.training.objectives.objective import Objective, Share, checked
from liger_models.training.observing.flops import StepFlops

Rewards = Callable[[list[Any], list[str], list[dict[str, Any]]], Tensor]
_BY_TOKENS = ("dapo", "cispo", "bnpo")


class Samples(NamedTuple):
    """Sampled answers of a micro-batch, with the values that the loss needs."""

    packed: SharedPrompts  # the prompts, each once, with their answers
    advantages: Tensor  # [answers]
    old: Tensor | None  # [answers, longest]: log-probabilities before the first of several updates
    reference: Tensor | None  # [answers, longest]
    divisor: float  # of the step's mean
    metrics: dict[str, tuple[Tensor, float]]


@dataclass
class GRPO(Objective):
    """Policy gradients on groups of answers to the same prompt.

    reward: functions, as FILE.py:NAME, joined by +; rewards are added. loss_type: grpo, dapo, dr_grpo, bnpo,
    cispo, gspo or gmpo. group_size: answers to each prompt. updates: steps on the same answers. beta: weight
    of the KL term, against `reference`, a model, or with LoRA the model without adapters.
    """

    metrics: ClassVar[tuple[str, ...]] = ("reward", "reward_std", "length", "unfinished", "clipped", "kl")
    unit: ClassVar[str] = "of the policy"
    above_zero: ClassVar[tuple[str, ...]] = ("temperature", "clip_low", "clip_high")
    samples: ClassVar[bool] = True

    reward: str = ""
    loss_type: str = "dapo"
    group_size: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    updates: int = 1
    clip_low: float = 0.2
    clip_high: float | None = None
    beta: float = 0.0
    reference: str | None = None
    options: PolicyOptions = field(init=False, repr=False)
    teacher: Any = field(default=None, init=False, repr=False)
    # Set by the run:
    judge: Rewards | None = field(default=None, init=False, repr=False)
    tokenizer: Any = field(default=None, init=False, repr=False)
    on_samples: Callable[[list[dict[str, Any]]], None] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward:
            raise ConfigError("grpo needs a reward; pass --reward FILE.py:FUNCTION")
        for name, least in (("group_size", 2), ("max_new_tokens", 1), ("updates", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if not 0 <= self.beta < math.inf:
            raise ConfigError(f"beta is {self.beta}; expected 0 or more")

        def parse() -> None:
            if self.loss_type not in (*_BY_TOKENS, "grpo", "dr_grpo", "gspo", "gmpo"):
                names = ", ".join(("grpo", "gspo", "gmpo", "dr_grpo", *_BY_TOKENS))
                raise ValueError(f"unknown loss_type {self.loss_type!r}; choose from {names}")
            sequence = self.loss_type == "gspo"
            high = 5.0 if self.clip_high is None and self.loss_type == "cispo" else self.clip_high
            self.options = PolicyOptions(
                "grpo" if sequence else self.loss_type,
                level="sequence" if sequence else "token",
                low=self.clip_low,
                high=high,
                beta=self.beta,
                length=self.max_new_tokens if self.loss_type == "dr_grpo" else None,
            )

        checked(parse, "grpo")

    def prepare(self, load: Callable[[str], nn.Module]) -> None:
        self.teacher = load(self.reference) if self.reference and self.beta else None

    @torch.no_grad()
    def begin_step(self, model: Any, batches: Iterable[tuple[Any, bool]], device: torch.device) -> None:
        """Sample and judge the answers of a step, unless an earlier update has done so."""
        found = [batch for batch, _ in batches]
        if found[0].samples is not None:
            return
        answers = [self._sample(model, batch, device) for batch in found]
        prompts = [prompt for batch in found for prompt in batch.prompts for _ in range(self.group_size)]
        flat = [answer for part in answers for answer in part]
        texts = [self.tokenizer.decode(answer) for answer in flat]
        assert self.judge is not None
        by_function = self.judge([p.said for p in prompts], texts, [p.columns for p in prompts])
        rewards = by_function.sum(1)
        # Dr. GRPO does not divide by the standard deviation.
        scale = "none" if self.loss_type == "dr_grpo" else "group"
        advantages = group_advantages(rewards, self.group_size, scale)
        if self.on_samples is not None:
            rows = zip(
                prompts, texts, by_function.tolist(), rewards.tolist(), advantages.tolist(), strict=True
            )
            names = ("prompt", "completion", "rewards", "reward", "advantage")
            self.on_samples([dict(zip(names, (p.said, *row), strict=True)) for p, *row in rows])
        tokens = sum(map(len, flat))
        divisor = max(1, tokens if self.loss_type in _BY_TOKENS else len(flat))
        first = 0
        for batch, mine in zip(found, answers, strict=True):
            last = first + len(mine)
            batch.lengths += torch.tensor([len(answer) for answer in mine])
            part = rewards[first:last]
            spread = part.view(-1, self.group_size).std(1)
            cut = sum(not answer or answer[-1] not in self._ends(model) for answer in mine)
            metrics = {
                "reward": (part.sum(), float(len(part))),
                "reward_std": (spread.sum(), float(len(spread))),
                "length": (torch.tensor(float(sum(map(len, mine)))), float(len(mine))),
                "unfinished": (torch.tensor(float(cut)), float(len(mine))),
            }
            packed = shared_prompts(
                (p.ids, mine[k * self.group_size :][: self.group_size]) for k, p in enumerate(batch.prompts)
            ).to(device)
            old = self._scores(model, packed) if self.updates > 1 else None
            weight = divisor, metrics
            batch.samples = Samples(
                packed, advantages[first:last].to(device), old, self._reference(model, packed), *weight
            )
            first = last

    def share(self, model: nn.Module, batch: Any, counts: Counts) -> Share:
        samples: Samples = batch.samples
        packed = samples.packed
        log_probs = self._scores(model, packed)
        result = grpo_loss(
            log_probs,
            samples.advantages,
            packed.counted,
            self.options,
            old_log_probs=samples.old,
            reference=samples.reference,
            num_items=samples.divisor,
        )
        tokens = float(packed.counted.sum())
        metrics: dict[str, tuple[Tensor, Tensor | float]] = dict(samples.metrics)
        metrics["clipped"] = (result.clipped * tokens, tokens)
        if result.kl is not None:
            metrics["kl"] = (result.kl * tokens, tokens)
        return Share(result.loss, metrics)

    def flops(self, model: StepFlops, counts: Counts) -> int:
        return model.of(counts.lengths, int(counts.lengths.sum()))

    def _scores(self, model: Any, packed: SharedPrompts) -> Tensor:
        return packed.rows(model.score(**packed, temperature=self.temperature).log_probs)

    def _reference(self, model: Any, packed: SharedPrompts) -> Tensor | None:
        if not self.beta:
            return None
        if self.teacher is not None:
            return self._scores(self.teacher, packed)
        with without_adapters(model):
            return self._scores(model, packed)

    def _ends(self, model: Any) -> set[int]:
        return set(self.tokenizer.ends(model.special_id("eos_token_id")))

    def _sample(self, model: Any, batch: Any, device: torch.device) -> list[list[int]]:
        """Answers to the prompts of a micro-batch, group after group, with the token that ends each."""
        ids = [prompt.ids for prompt in batch.prompts for _ in range(self.group_size)]
        longest, ends = max(map(len, ids)), self._ends(model)
        padded = torch.tensor([[0] * (longest - len(one)) + one for one in ids], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in ids], device=device)
        out = model.generate(
            padded, self.max_new_tokens, self.temperature, attention_mask=mask, eos_token_id=sorted(ends)
        )
        return [_up_to(answer, ends) for answer in out[:, longest:].tolist()]


def _up_to(answer: Sequence[int], ends: set[int]) -> list[int]:
    stop = next((n + 1 for n, token in enumerate(answer) if token in ends), len(answer))
    return list(answer[:stop])
