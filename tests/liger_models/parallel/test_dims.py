"""Invalid sizes of parallelism are refused with an error that says what was expected."""

from __future__ import annotations

import pytest
from torch import nn

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError
from liger_models.parallel import ParallelDims


def test_the_remaining_processes_shard_the_parameters():
    assert ParallelDims().resolve(8) == ParallelDims(1, 8)
    dims = ParallelDims(data_replicate=2, sequence=2, experts=4).resolve(16)
    assert (dims.data_shard, dims.shards) == (4, 8)


@pytest.mark.parametrize(
    ("sizes", "processes", "complaint"),
    [
        ({"data_shard": 3}, 8, "is 3, but there are 8 processes"),
        ({"data_replicate": 3}, 8, "expected a multiple of 3"),
        ({"data_replicate": 16}, 8, "expected a multiple of 16"),
        ({"experts": 3}, 8, "experts=3 must divide data_shard . sequence, which is 8"),
        ({"data_replicate": 4, "experts": 4}, 8, "which is 2"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_are_refused(sizes, processes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ParallelDims(**sizes).resolve(processes)


@pytest.mark.parametrize("name", ["data_replicate", "data_shard", "sequence", "experts"])
@pytest.mark.parametrize("size", [0, -2, 2.0, True, "2"])
def test_invalid_sizes_are_refused(name, size):
    with pytest.raises(ConfigError, match=f"{name} is {size!r}"):
        ParallelDims(**{name: size})


def test_without_a_process_group_the_error_says_how_to_start_one():
    model = liger_models.from_config(find_architecture("llama").tiny)
    with pytest.raises(ConfigError, match="start the program with torchrun"):
        liger_models.parallelize(model)


def test_a_model_of_another_library_is_refused():
    with pytest.raises(TypeError, match=r"found a torch\.nn\.modules\.linear\.Linear; shard transf"):
        liger_models.parallelize(nn.Linear(2, 2))
