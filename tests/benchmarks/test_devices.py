"""Kernels compile for GPUs that are not here, within their limits."""

import argparse

import pytest

pytest.importorskip("triton")

from benchmarks import devices
from benchmarks.compiled.launches import waits_first

GOOD = {"case": "norms", "kernel": "_forward_kernel", "shared": 16, "threads": 128, "tensor_memory": 0}
GOOD |= {"registers": 32, "spilled": 0, "starts_too_early": False, "plain_products": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        # Those that start before the previous kernel ends: they must wait before they touch memory.
        pytest.param(
            ["norms, 4096", "q/k norm, Qwen 3 8B"], ["sm_90", "sm_100", "sm_120"], id="early starts"
        ),
        pytest.param(["norms, 4096"], ["sm_80", "gfx942"], id="norms elsewhere"),
        # The larger operations for the GPU with the least shared memory.
        pytest.param(["attention, heads of 96", "cross entropy, Gemma 2"], ["sm_120"], id="products"),
    ],
)
def test_kernels_fit_four_gpus_at_real_sizes(words, gpus, tmp_path):
    """A few operations; `python -m benchmarks devices` compiles all for twelve GPUs."""
    options = {"only": words, "gpu": gpus, "cache": str(tmp_path / "cache")}
    args = argparse.Namespace(spills=64, jobs=2, verbose=False, out=str(tmp_path), **options)
    assert devices.run(args) == 0


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"shared": 99 * 1024 + 1}, "takes 101377 bytes of shared memory"),
        ({"threads": 2048}, "has 2048 threads"),
        ({"tensor_memory": 513}, "takes 513 columns"),
        ({"spilled": 65}, "spills 65 bytes"),
        ({"plain_products": True}, "without the matrix units"),
        ({"starts_too_early": True}, "before it waits"),
        ({"error": "CompilationError: at 5:4"}, "does not compile: CompilationError"),
        ({"raises": "AttributeError: warp_size"}, "raises: AttributeError"),
    ],
)
def test_a_launch_outside_the_limits_is_a_fault(changed, fault):
    found = devices.fault_of(GOOD | changed, "sm_120", 64)
    assert found is None if fault is None else fault in found


def test_a_known_spill_is_allowed_where_it_is_known_and_no_further(monkeypatch):
    monkeypatch.setattr(devices, "KNOWN_SPILLS", (("sm_9* sm_100", "_forward*", "norms*", 100, "a reason"),))
    spilling = GOOD | {"spilled": 100}
    assert devices.fault_of(spilling, "sm_90", 64) is None
    assert devices.fault_of(spilling, "sm_80", 64) is not None
    assert devices.fault_of(spilling | {"spilled": 101}, "sm_90", 64) is not None
    assert devices.fault_of(spilling | {"kernel": "other"}, "sm_90", 64) is not None


def test_waiting_must_come_before_memory_and_branches():
    def ptx(before):
        head = ".visible .entry k(\n.param .u64 .ptr .global .align 1 p\n)\n{\n$L__func_begin0:\n"
        head += "\tld.param.b64 \t%rd1, [p];\n"
        return f"{head}{before}\tgriddepcontrol.wait;\n\tld.global.b32 \t%r1, [%rd1];\n"

    assert waits_first(ptx(""))
    for before in (
        "\tld.global.v4.b32 \t{%r1}, [%rd1];\n",
        "\tcp.async.cg.shared.global [%r1], [%rd2], 16;\n",
    ):
        assert not waits_first(ptx(before))
    for before in ("\t@%p1 bra $L__BB0_2;\n", "\tred.global.add.f32 [%rd1], %f1;\n", "$L__BB0_1:\n"):
        assert not waits_first(ptx(before))
    assert not waits_first(ptx("").replace("griddepcontrol.wait;", ""))
