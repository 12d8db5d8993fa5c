"""One rank of test_ranks.py: every loss under DDP, under FSDP2, and with adapters.

The scores are of this rank's pairs, in two micro-batches, the second of them packed. The folder has task.pt;
the results are gradients by wrapper and loss: of all losses with each wrapper, or of each loss with one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import liger_models
from liger_models import losses as of
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.losses.grpo_loss import TYPES

# Divisors of a loss: the tokens, pairs or chosen labels of the whole step.
Counts = dict[str, float | None]
Loss = Callable[[Tensor, Tensor, dict[str, Tensor], Counts], Tensor]


def by_token(log_probs: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (log_probs.sum(1) / given["counted"].sum(1)).chunk(2)


def likelihood(log_probs: Tensor, given: dict[str, Tensor], counts: Counts) -> Tensor:
    """Negative log-likelihood of the chosen answers' tokens, a mean over those of the whole step."""
    labels = given["counted"].chunk(2)[0].sum() if counts["chosen"] is None else counts["chosen"]
    return -log_probs.chunk(2)[0].sum() / labels


def dpo(log_probs, entropy, given, counts):
    both = *log_probs.sum(1).chunk(2), *given["reference"].sum(1).chunk(2)
    lengths = dict(zip(("chosen_lengths", "rejected_lengths"), given["counted"].sum(1).chunk(2), strict=True))
    types = {"sigmoid": 0.5, "ipo": 0.1, "exo_pair": 1.0, "apo_down": 1.0, "sigmoid_norm": 1.0, "sft": 0.3}
    nll = likelihood(log_probs, given, counts)
    options = {"loss_type": types, "label_smoothing": 0.1, "beta": 0.3, "nll": nll}
    return of.dpo_loss(*both, num_items=counts["pairs"], **lengths, **options).loss


def kto(log_probs, entropy, given, counts):
    sums = log_probs.sum(1), given["reference"].sum(1)
    return of.kto_loss(*sums, given["good"], given["kl"], num_items=counts["answers"]).loss


def rloo(log_probs, entropy, given, counts):
    old = given["old"].sum(1)
    return of.rloo_loss(log_probs.sum(1), given["advantages"], old, high=9.0, num_items=counts["answers"])


def policy(name: str, level: str = "token") -> Loss:
    by = "tokens" if name in ("bnpo", "dapo", "cispo", "vespo") else "answers"
    length = 5 if name == "dr_grpo" else None
    options = of.PolicyOptions(loss_type=name, level=level, beta=0.2, low=0.3, high=2.0, length=length)

    def loss(log_probs, entropy, given, counts):
        constants = {"old_log_probs": given["old"], "reference": given["reference"], "num_items": counts[by]}
        return of.grpo_loss(log_probs, given["advantages"], given["counted"], options, **constants).loss

    return loss


LOSSES: dict[str, Loss] = {
    "dpo": dpo,
    "orpo": lambda log_probs, entropy, given, counts: (
        of.orpo_loss(
            *by_token(log_probs, given), likelihood(log_probs, given, counts), num_items=counts["pairs"]
        ).loss
    ),
    "cpo": lambda log_probs, entropy, given, counts: (
        of.cpo_loss(
            *log_probs.sum(1).chunk(2), likelihood(log_probs, given, counts), num_items=counts["pairs"]
        ).loss
    ),
    "simpo": lambda log_probs, entropy, given, counts: (
        of.simpo_loss(
            *by_token(log_probs, given), likelihood(log_probs, given, counts), num_items=counts["pairs"]
        ).loss
    ),
    "kto": kto,
    "rloo": rloo,
    "reward": lambda log_probs, entropy, given, counts: (
        of.reward_loss(*log_probs.sum(1).chunk(2), centering=0.1, num_items=counts["pairs"]).loss
    ),
    "value": lambda log_probs, entropy, given, counts: of.value_loss(
        entropy, given["old"], given["counted"], given["reference"], num_items=counts["tokens"]
    ),
    "dft": lambda log_probs, entropy, given, counts: of.sft_loss(
        log_probs, given["counted"], dynamic=True, num_items=counts["tokens"]
    ),
    **{name: policy(name) for name in TYPES},
    "gspo": policy("grpo", "sequence"),
}


WRAPPERS = "ddp", "fsdp", "fsdp, adapters"


def losses_with(wrapper: str, every: bool) -> list[str]:
    """The names of the losses computed with a wrapper: all, or every third."""
    return list(LOSSES) if every else list(LOSSES)[WRAPPERS.index(wrapper) :: len(WRAPPERS)]


def of_pairs(given: dict[str, Tensor], pairs: Tensor) -> dict[str, Tensor]:
    """Select the rows [chosen, rejected] of some pairs."""
    rows = torch.cat([pairs, pairs + len(given["labels"]) // 2])
    return {name: values[rows] if values.dim() else values for name, values in given.items()}


def scores_of(model: Any, given: dict[str, Tensor], packed: bool) -> tuple[Tensor, Tensor]:
    """Compute log_probs and entropy, [rows, seq - 1], through the wrapper."""
    options = liger_models.ScoreOptions(entropy=True)
    mask = given["mask"].bool()
    if not packed:
        found = model(input_ids=given["ids"], labels=given["labels"], attention_mask=mask, score=options)
        return found.log_probs, found.entropy
    bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    ids, labels = given["ids"][mask][None], given["labels"][mask][None]
    found = model(input_ids=ids, labels=labels, cu_seqlens=bounds, score=options)
    width = mask.shape[1] - 1
    rows = [of.rows_of_documents(scores, bounds)[:, :width] for scores in (found.log_probs, found.entropy)]
    log_probs, entropy = (torch.nn.functional.pad(r, (0, width - r.shape[1])) for r in rows)
    return log_probs, entropy


def adapted(model: CausalLM) -> CausalLM:
    import peft

    torch.manual_seed(4)
    config = peft.LoraConfig(r=3, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def results(folder: Path, rank: int, ranks: int, which: str) -> dict[str, dict[str, dict[str, Tensor]]]:
    task = torch.load(folder / "task.pt", weights_only=False)
    mesh = init_device_mesh("cpu", (ranks,))
    given = dict(task["given"])
    strangers = task["strangers"][rank]  # by policy and reference; ranks have different numbers
    given["kl"] = of.kto_kl(*strangers)
    counts = {name: count / ranks for name, count in task["counts"].items()}
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for wrapper in WRAPPERS:
        model = CausalLM(task["spec"]).double()
        model.load_state_dict(task["state"])
        model = adapted(model) if "adapters" in wrapper else model
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if wrapper.startswith("ddp"):
            parallel: Any = DistributedDataParallel(model)
        else:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            parallel = fully_shard(model, mesh=mesh)
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found[wrapper] = {}
        for name in losses_with(wrapper, every=which == "every"):
            loss = LOSSES[name]
            for number, pairs in enumerate(task["pairs"][rank]):
                own = of_pairs(given, pairs)
                log_probs, entropy = scores_of(parallel, own, packed=number == 1)
                loss(log_probs, entropy, own, counts).backward()
            found[wrapper][name] = {key: whole(p.grad) for key, p in named.items()}
            parallel.zero_grad()
    return found
