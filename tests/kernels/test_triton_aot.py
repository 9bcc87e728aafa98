"""Triton kernels compiled for GPUs that are not here: no spills, and shared memory that fits."""

import json
import re
import subprocess
import sys

import pytest
import triton

from benchmarks.kernels_aot import Case, cases, quick_cases
from prefixcache_kernels.triton_backend.aot import TARGETS, Compiled

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="nothing is compiled")

_QUICK = quick_cases()
_REST = [case for case in cases(list(TARGETS.values())) if case not in _QUICK]
_SPILLS_ALLOWED = 16
"""Bytes a thread, in float32 only, which serves correctness: its dots run without tensor cores."""


def _fits(case: Case) -> Compiled:
    made = case.compile()
    allowed = _SPILLS_ALLOWED if case.dtype == "fp32" else 0
    assert made.spills <= allowed, f"{case.name}: {made.spills} bytes spilled"
    assert made.shared <= case.target.shared_kib * 1024, f"{case.name}: {made.shared} bytes shared"
    return made


@pytest.mark.parametrize("case", _QUICK, ids=lambda case: case.name)
def test_attention_compiles_without_spills_for_each_target(case: Case) -> None:
    made = _fits(case)
    if case.target.backend == "cuda":
        wide = "wgmma" if case.target.name == "sm_90" else "tcgen05|mma.sync"
        assert re.search(wide, made.assembly), "products run on tensor cores"
        assert "cp.async.cg.shared.global" in made.assembly, "K and V are loaded 16 bytes at a time"
    # KN-01: what is loaded from the table is widened before it meets a stride.
    assert re.search(r"arith\.extsi .*tensor<\d+xi32.*> to tensor<\d+xi64", made.ttir)
    assert "fma.rn.f32" in made.assembly or case.target.backend == "hip", "explicit fma is kept"


@pytest.mark.slow
@pytest.mark.parametrize("case", _REST, ids=lambda case: case.name)
def test_every_kernel_compiles_without_spills_for_each_target(case: Case) -> None:
    _fits(case)


@pytest.mark.slow
def test_the_table_is_printed_as_markdown_and_json() -> None:
    command = [sys.executable, "-m", "benchmarks.kernels_aot", "--quick", "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len([line for line in lines if line.startswith("| paged_attention")]) == len(_QUICK)
    figures = json.loads(lines[-1])
    assert figures["compiled"] == len(_QUICK)
    assert figures["missed"] == []
