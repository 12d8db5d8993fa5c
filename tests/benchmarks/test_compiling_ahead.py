"""Compilation before measurements."""

import multiprocessing
import os

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def ahead(benchmarks, monkeypatch):
    import benchmarks.ahead

    monkeypatch.setattr(benchmarks.ahead, "_FEWEST", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    return benchmarks.ahead


def test_compiling_calls_run_longest_first_and_eager_ones_not_at_all(ahead):
    work = [("rms_norm", (4, 8)), ("attention", (1, 8, 2, 1, 8)), ("relu2", (4, 8))]
    providers = ("ours", "eager", "torch.compile", "SDPA", "FlexAttention")
    jobs = ahead.jobs_of(work, providers)
    assert [(name, provider) for name, _, provider in jobs] == [
        ("attention", "FlexAttention"),
        ("rms_norm", "torch.compile"),
        ("relu2", "torch.compile"),
        ("rms_norm", "ours"),
        ("attention", "ours"),
        ("relu2", "ours"),
    ]


def test_jobs_run_in_processes_that_end_and_report_failures(ahead, forked_jobs):
    jobs = [("relu2", (4, 8), "ours"), ("softmax", (4,), "ours"), ("swiglu", (4,), "ours")]
    jobs.append(("relu2", (4, 8), "nobody's"))  # becomes a note when measured, not a failure
    said = ahead.compile_ahead(jobs, torch.float32, CPU)
    assert said.startswith("3 of 4 calls compiled in advance in ")
    assert "; 1 failed, the first with swiglu ours: ValueError" in said
    assert not multiprocessing.active_children()


def test_unfinished_compilations_are_left_for_later(ahead, forked_jobs, monkeypatch):
    monkeypatch.setattr(ahead, "_import_peers", lambda: None)  # meanwhile the call might be compiled
    said = ahead.compile_ahead([("relu2", (4, 8), "ours")], torch.float32, CPU, seconds=0.0)
    assert said.startswith("0 of 1 calls compiled in advance")
    assert not multiprocessing.active_children()


def test_the_processes_use_the_cache_keys_of_the_measuring_one(benchmarks):
    """pickle names torch's constants by the first module that has them, which differs in such a process."""
    assert not hasattr(benchmarks.__main__, "torch")


def test_a_run_of_few_calls_starts_no_processes(ahead, monkeypatch):
    monkeypatch.setattr(ahead, "_FEWEST", 16)
    jobs = [("relu2", (4, 8), "ours")]
    assert ahead.compile_ahead(jobs, torch.float32, CPU) == "nothing compiled in advance"
