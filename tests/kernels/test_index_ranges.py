"""Overflows of offsets are found in TTIR, and nothing else."""

import pytest
from index_ranges import Ranges

# A program's rows start at `row * stride`, in `kind`; a loop adds `step` to a column.
KERNEL = """
#loc = loc("/a/kernels/norms/rows.py":1:0)
module {{
  tt.func public @rows(%x: !tt.ptr<f32> loc("x"(#loc)), %stride: i32 loc(#loc), %step: i32 loc(#loc)) {{
    %c0 = arith.constant 0 : i32 loc(#loc)
    %c1 = arith.constant 1 : i32 loc(#loc)
    %c9 = arith.constant 9 : i32 loc(#loc)
    %row = tt.get_program_id x : i32 loc(#loc)
    %wide_row = arith.extsi %row : i32 to i64 loc(#loc)
    %wide_stride = arith.extsi %stride : i32 to i64 loc(#loc)
    %narrow = arith.muli %row, %stride : i32 loc(#loc1)
    %wide = arith.muli %wide_row, %wide_stride : i64 loc(#loc1)
    %bits = arith.muli %row, %stride : i32 loc(#loc)
    %begin = tt.addptr %x, %{offset} : !tt.ptr<f32>, {kind} loc(#loc)
    %last:2 = scf.for %i = %c0 to %c9 step %c1 iter_args(%column = %c0, %sum = %c0) -> (i32, i32)  : i32 {{
      %at = tt.addptr %begin, %{inside} : !tt.ptr<f32>, i32 loc(#loc)
      %found = tt.load %at : !tt.ptr<f32> loc(#loc)
      %next = arith.addi %column, %step : i32 loc(#loc2)
      %more = arith.addi %sum, %bits : i32 loc(#loc)
      scf.yield %next, %more : i32, i32 loc(#loc)
    }} loc(#loc2)
    tt.return loc(#loc)
  }} loc(#loc)
}} loc(#loc)
#loc1 = loc("/a/kernels/norms/rows.py":7:4)
#loc2 = loc("/a/kernels/norms/rows.py":9:4)
"""


@pytest.mark.parametrize(
    ("offset", "inside", "grid", "stride", "step", "faults"),
    [
        ("wide", "column", 2**20, 4096, 1000, []),
        ("narrow", "column", 2**19, 4096, 1000, []),  # the last row starts at 2^31 - 4096
        ("narrow", "column", 2**19 + 1, 4096, 1000, ["norms/rows.py:7: arith.muli"]),
        ("wide", "column", 2**20, 4096, 2**31 // 9, []),
        ("wide", "column", 2**20, 4096, 2**31 // 9 + 1, ["norms/rows.py:9: arith.addi"]),
        ("wide", "column", 2**20, 4096, 2**31 // 8 + 1, ["norms/rows.py:9: carried by a loop"]),
        ("wide", "c0", 2**20, 4096, 2**31 // 9 + 1, []),  # no address
    ],
)
def test_what_overflows_on_its_way_to_an_address_is_found(offset, inside, grid, stride, step, faults):
    kind = "i32" if offset == "narrow" else "i64"
    kernel = KERNEL.format(offset=offset, kind=kind, inside=inside)
    found = Ranges(kernel, (grid, 1, 1), {"stride": stride, "step": step}, most=1 << 24).faults
    assert [fault.partition(" of ")[0] for fault in found] == faults
