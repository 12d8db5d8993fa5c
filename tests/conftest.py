"""GPU tests are skipped where there is no GPU; Triton's interpreter can run the kernels instead.

The interpreter must be asked for before Triton is first imported, hence here. It changes nothing by itself:
kernels run in it only inside `liger_models.kernels._dispatch.interpret()`, all else runs the plain twins.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def interpreted():
    """Run the kernels in Triton's interpreter, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("on this machine the kernels are compiled: the gpu tests run them")
    from liger_models.kernels._dispatch import interpret

    with interpret():
        yield
