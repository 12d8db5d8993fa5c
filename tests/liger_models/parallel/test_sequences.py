"""Ranks that split sequences, and exchange heads or pass states, train like one process."""

from __future__ import annotations

import functools
import runpy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rounding import FACTOR, LARGEST_ROUNDING, ORDERS, OtherOrder

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import DataError
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.sequences.sequence_parallel import Slice, divide_sequences

RANK = Path(__file__).with_name("sequence_rank.py")
run = runpy.run_path(str(RANK))["run"]


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 131, shape, generator=torch.Generator().manual_seed(shape[-1]))


def packed() -> dict[str, Any]:
    """Five documents in 37 tokens: the ranks have 19 and 18, and the third document spans both."""
    ids = ids_of(1, 37)
    labels = ids.clone()
    labels[0, 3:9] = -100
    bounds = torch.tensor([0, 2, 11, 28, 29, 37])
    return {"input_ids": ids, "labels": labels, "cu_seqlens": bounds}


def padded() -> dict[str, Any]:
    """Rows of 13, 5 and 9 tokens, padded on either side: 27 tokens, and the second row spans both ranks."""
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, 5:] = mask[2, :4] = 0
    ids = ids_of(3, 13)
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def rows() -> dict[str, Any]:
    """Rows of equal length, one label on the second rank, and the label count of a larger step as divisor."""
    ids = ids_of(3, 11)
    labels = ids.clone()
    labels[1, 6:] = labels[2, :-1] = -100
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": 40}


def one(tokens: int) -> dict[str, Any]:
    """One document, over all ranks."""
    ids = ids_of(1, tokens)
    return {"input_ids": ids, "labels": ids}


# One family for each kind of attention and recurrent layer, and batches of each kind.
CASES: dict[str, dict[str, Any]] = {
    "GQA, documents": {"family": "llama", "batch": packed()},
    "one head of keys, padding": {"family": "llama", "num_key_value_heads": 1, "batch": padded()},
    "three heads of keys for two ranks": {
        **{"family": "llama", "num_attention_heads": 6, "num_key_value_heads": 3},
        **{"hidden_size": 96, "batch": packed()},
    },
    "windows and caps": {"family": "gemma2", "batch": rows()},
    "sinks, experts, windows": {"family": "gpt_oss", "batch": packed()},
    "learned positions, documents": {"family": "gpt2", "batch": packed()},
    "scores by distance, documents": {"family": "bloom", "batch": packed()},
    "gates by channel": {"family": "afmoe", "batch": packed()},
    "a router's loss": {"family": "qwen3_moe", "output_router_logits": True, "batch": padded()},
    "latents, correction bias": {"family": "deepseek_v3", "batch": packed()},
    "chosen blocks of keys": {"family": "minimax_m3_vl_text", "batch": packed()},
    "keys of other layers, own inputs": {"family": "gemma4_text", "batch": padded()},
    "chunks, queries that grow": {"family": "llama4_text", "batch": packed()},
    "norms over all heads": {"family": "olmo2", "batch": rows()},
    "states, documents": {"family": "qwen3_next", "batch": packed()},
    "state space, documents": {"family": "mamba2", "n_groups": 2, "batch": packed()},
    "decays by channel": {"family": "bailing_hybrid", "batch": packed()},
    "gated convolutions, gates of heads": {"family": "lfm3", "batch": packed()},
    "gated recurrence, documents": {"family": "recurrent_gemma", "batch": packed()},
    "selective scan, experts": {"family": "jamba", "batch": packed()},
    "selective scan, padding": {"family": "falcon_mamba", "level": "checkpoint", "batch": padded()},
    "attention and state space, padding": {"family": "falcon_h1", "mamba_n_groups": 2, "batch": padded()},
    "states, level offload": {"family": "qwen3_5_text", "level": "offload", "batch": padded()},
    "states passed, groups that do not divide": {"family": "mamba2", "batch": packed()},
    "states passed, parallelize": {
        **{"family": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 3},
        **{"wrapper": "parallelize", "batch": padded()},
    },
    **{f"level {level}": {"family": "gemma2", "level": level, "batch": packed()} for level in LEVELS},
    "level auto": {"family": "llama", "level": "auto", "batch": packed()},
    **{f"experts, {level}": {"family": "gpt_oss", "level": level, "batch": rows()} for level in LEVELS[2:]},
    "DDP": {"family": "llama", "tie_word_embeddings": True, "wrapper": "ddp", "batch": packed()},
    "adapters, documents": {"family": "llama", "adapters": True, "batch": packed()},
    "parallelize, states": {"family": "qwen3_5_text", "wrapper": "parallelize", "batch": packed()},
    "parallelize, weights that layers share": {
        **{"family": "zamba2", "mamba_ngroups": 2, "wrapper": "parallelize", "level": "checkpoint"},
        "batch": packed(),
    },
    "parallelize": {
        "family": "llama",
        "tie_word_embeddings": True,
        "wrapper": "parallelize",
        "batch": packed(),
    },
    "parallelize, checkpoint": {
        "family": "gpt_oss",
        "wrapper": "parallelize",
        "level": "checkpoint",
        "batch": packed(),
    },
}


# Four ranks, whose slices of `packed` begin within a document, at its last token, or at a border.
PASSED: dict[str, dict[str, Any]] = {
    "gated delta rule": {"family": "qwen3_5_text", "batch": packed()},
    "gated delta rule, one document": {"family": "qwen3_5_text", "level": "checkpoint", "batch": one(37)},
    "fewer tokens on a rank than a convolution needs": {
        # In float64: with so few tokens, gradients nearly cancel.
        **{"family": "qwen3_5_text", "linear_conv_kernel_dim": 4, "wide": True, "batch": one(9)},
    },
    "only output projections trained": {"family": "qwen3_5_text", "trained": "out_proj", "batch": packed()},
    "decays by channel": {"family": "kimi_linear", "level": "all", "batch": packed()},
    "state space": {"family": "mamba2", "level": "checkpoint", "batch": packed()},
    "state space, rows": {"family": "mamba2", "batch": rows()},
    "selective scan": {"family": "falcon_mamba", "batch": packed()},
    "gated convolutions": {"family": "lfm2", "batch": packed()},
    "gated recurrence": {"family": "recurrent_gemma", "batch": packed()},
}


# PEFT is optional.
CASES = {name: x for name, x in CASES.items() if not x.get("adapters") or find_spec("peft")}


def task_of(
    family: str,
    batch: Any,
    level: str = "lean",
    wrapper: str | None = None,
    adapters: bool = False,
    pass_states: bool = False,
    wide: bool = False,
    trained: str = "",
    **changes: Any,
):
    config = {**find_architecture(family).tiny, **changes}
    model = liger_models.from_config(config, projections="split" if adapters else "fused")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.3 * noise + ("norm" in name))
    return {
        **{"config": config, "state": model.state_dict(), "batch": batch},
        **{"level": level, "wrapper": wrapper, "adapters": adapters},
        **{"pass_states": pass_states, "wide": wide, "trained": trained},
    }


def needs(item, fixture):
    return item.path == Path(__file__) and fixture in item.fixturenames


def that_run(table, fixture, request):
    chosen = {item.callspec.params["case"] for item in request.session.items if needs(item, fixture)}
    return {name: case for name, case in table.items() if name in chosen}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Results of two ranks and of one process, for each case that runs."""
    return compared(that_run(CASES, "results", request), tmp_path_factory.mktemp("sequences"), 2)


@pytest.fixture(scope="module")
def passed(request, tmp_path_factory):
    """Results of four ranks that pass states, and of one process, for each case that runs."""
    passing = that_run(PASSED, "passed", request)
    cases = {name: {**case, "pass_states": True} for name, case in passing.items()}
    return compared(cases, tmp_path_factory.mktemp("passed"), 4)


def compared(cases, folder, ranks):
    tasks = [task_of(**case) for case in cases.values()]
    torch.save(tasks, folder / "task.pt")
    found = run_ranks(RANK, folder, ranks=ranks)
    alone = [OneProcess({**task, "wrapper": None}) for task in tasks]
    return {name: (*of_ranks, one) for name, *of_ranks, one in zip(cases, *found, alone, strict=True)}


class OneProcess:
    """Results of a case in one process, and the same with sums in other orders."""

    def __init__(self, task):
        self.task, self.results = task, run(**task)

    @functools.cache  # noqa: B019 - there are few
    def other(self, seed):
        with OtherOrder(seed):
            return run(**self.task)

    def assert_near(self, found, *names):
        """Assert that a result is off by 1e-5 of its largest element at most, or as rounding explains."""
        value, true = pick(found, names), pick(self.results, names)
        error, size = (value - true).abs().max().item(), true.abs().max().item()
        if not error <= 1e-5 * size:
            rounding = 0.0
            for seed in range(ORDERS):
                if not error <= FACTOR * rounding:
                    off = (pick(self.other(seed), names) - true).abs().max().item()
                    rounding = max(rounding, off)
            message = (
                f"{': '.join(names)}: {error / size:.1e}, with sums in another order {rounding / size:.1e}"
            )
            assert error <= FACTOR * rounding <= FACTOR * LARGEST_ROUNDING * size, message


def pick(results, names):
    for name in names:
        results = results[name]
    return results


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case, results):
    check_equal(*results[case])


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("case", PASSED)
def test_four_ranks_that_pass_states_equal_one_process(case, passed):
    check_equal(*passed[case])


def check_equal(*results):
    *of_ranks, one = results
    alone = one.results
    for found in of_ranks:
        # The same sums over tokens and heads, in two parts: a few roundings at the size of the largest
        # element, which propagate through three layers.
        torch.testing.assert_close(found["loss"], alone["loss"], rtol=1e-6, atol=0)
        one.assert_near(found, "logits")
        for kind in ("gradients", "scores", "gradients of scores"):
            assert found[kind].keys() == alone[kind].keys()
            for name in alone[kind]:
                one.assert_near(found, kind, name)
        for name, true in alone["biases"].items():
            assert torch.equal(found["biases"][name], true)  # loads are integers


@pytest.mark.parametrize(
    ("family", "ranks", "match"),
    [
        ("llama", 3, "layer 0 has 4 query heads, which 3 ranks"),
        ("phimoe", 2, "draws random numbers in training"),
    ],
)
def test_the_error_names_heads_that_ranks_cannot_share(family, ranks, match):
    model = liger_models.from_config(find_architecture(family).tiny)
    with pytest.raises(ValueError, match=match):
        divide_sequences(model, SimpleNamespace(size=lambda: ranks))


def test_models_that_cannot_split_their_batch_are_named():
    with pytest.raises(TypeError, match="a Linear does not support sequence parallelism"):
        divide_sequences(torch.nn.Linear(2, 2), SimpleNamespace(size=lambda: 2))


def test_a_batch_with_fewer_tokens_than_ranks_is_refused():
    with pytest.raises(DataError, match="a batch of 2 tokens cannot be divided over 3 ranks"):
        Slice(SimpleNamespace(size=lambda: 3, rank=lambda: 0), 2)
