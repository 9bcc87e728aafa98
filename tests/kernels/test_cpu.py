"""The compiled CPU kernels: weights in their own format, the build and its fallback, refusals."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from prefixcache.model.attention import plan_step
from prefixcache_kernels import Heads, Weight, select_kernels
from prefixcache_kernels.cpu.backend import CpuKernels, CpuLinear
from prefixcache_kernels.cpu.build import BuildError, build, openmp_runtime
from prefixcache_kernels.cpu.library import Library
from prefixcache_kernels.torch_backend import TorchKernels
from tests.kernels.backends import CPU, kernels_of, rows_step

FORMATS = ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_1")


def _weight(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    """A matrix as a loader would hand it over, quantised by gguf."""
    values = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)
    if kind in ("F32", "BF16", "F16"):
        types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        dense = torch.from_numpy(values).to(types[kind]).float()
        return Weight(lambda: dense, kind, (outputs, inputs))
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    restored = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    return Weight(lambda: restored, kind, (outputs, inputs), raw)


def _linear(*weights: Weight) -> CpuLinear:
    layer = kernels_of("cpu").linear(weights, None)
    assert isinstance(layer, CpuLinear)
    return layer


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("outputs", [96, 37])
def test_weights_in_their_own_format_give_the_bits_of_dense_ones(kind: str, outputs: int) -> None:
    weight = _weight(kind, outputs, 320)
    layer, dense = _linear(weight), _linear(Weight(weight.dense, "F32", weight.shape))
    x = torch.randn(40, 320, generator=torch.Generator().manual_seed(1))
    for rows in (1, 3, 8, 9, 40):
        assert torch.equal(layer(x[:rows]), dense(x[:rows]))
    ids = torch.tensor([0, outputs - 1, 5, 5])
    assert torch.equal(layer.rows(ids), weight.dense()[ids])


def test_memory_is_that_of_the_format() -> None:
    weight = _weight("Q4_1", 64, 320)
    assert weight.raw is not None
    assert sum(tiles.nbytes for tiles in _linear(weight).tiles) == weight.raw.nbytes


def test_parts_of_different_formats_lie_side_by_side() -> None:
    weights = [_weight("Q4_1", 64, 64), _weight("Q4_1", 32, 64, 1), _weight("Q8_0", 40, 64, 2)]
    layer = kernels_of("cpu").linear(weights, torch.arange(136.0))
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([_linear(weight)(x) for weight in weights], 1) + torch.arange(136.0)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x[:2]), expected[:2])


def test_exp_is_accurate_to_a_few_units_in_the_last_place() -> None:
    """Seen through SiLU with up = 1: x / (1 + e^-x)."""
    x = torch.linspace(-80, 80, 20001)
    rows = torch.stack((x, torch.ones_like(x)), 1)
    out = kernels_of("cpu").silu_mul(rows).squeeze(1).double()
    expected = x.double() / (1 + torch.exp(-x.double()))
    relative = ((out - expected).abs() / expected.abs().clamp_min(1e-30)).max()
    assert relative < 4e-7


def test_auto_is_the_compiled_backend_and_torch_where_it_does_not_serve() -> None:
    assert isinstance(select_kernels("auto", CPU, torch.float32), CpuKernels)
    assert isinstance(select_kernels("auto", CPU, torch.bfloat16), TorchKernels)
    with pytest.raises(ValueError, match=r"serves float32 on the CPU, not torch\.bfloat16"):
        select_kernels("cpu", CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="backend 'gpu': one of 'auto'"):
        select_kernels("gpu", CPU, torch.float32)


def test_batch_invariance_is_promised_on_the_cpu_and_refused_where_it_cannot_be() -> None:
    for name in ("cpu", "torch"):
        assert select_kernels(name, CPU, torch.float32, batch_invariant=True).same_bits
        assert select_kernels(name, CPU, torch.float32).same_bits
    gpu = torch.device("cuda")
    assert not select_kernels("torch", gpu, torch.bfloat16).same_bits
    with pytest.raises(ValueError, match="'torch': gives no batch-invariant results on cuda"):
        select_kernels("torch", gpu, torch.bfloat16, batch_invariant=True)


def test_without_a_compiler_auto_falls_back_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path))
    assert isinstance(select_kernels("auto", CPU, torch.float32), TorchKernels)
    assert "no-such-compiler cannot be run" in caplog.text
    with pytest.raises(BuildError, match="no-such-compiler cannot be run"):
        select_kernels("cpu", CPU, torch.float32)


def test_a_failing_compiler_is_quoted_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho disk on fire >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="disk on fire"):
        build(tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_library_is_compiled_once_for_its_sources_and_flags(tmp_path: Path) -> None:
    first = build(tmp_path, ["-O0"])
    written = first.stat().st_mtime_ns
    assert build(tmp_path, ["-O0"]) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    """In a process of its own, so that no other library has loaded a runtime before."""
    code = (
        "import torch, re\n"
        "from prefixcache_kernels import select_kernels\n"
        "select_kernels('cpu', torch.device('cpu'), torch.float32)\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(len(set(re.findall(r'/\\S*/lib[gi]omp\\S*', maps))))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.split() == ["1"]
    assert openmp_runtime().name.startswith("lib")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2"]])
def test_narrower_processors_compute_the_same_within_rounding(
    tmp_path: Path, flags: list[str]
) -> None:
    narrow, wide = CpuKernels(Library(build(tmp_path, flags))), kernels_of("cpu")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 320, generator=generator)
    for kind in FORMATS:
        weight = _weight(kind, 75, 320)
        layer, expected = narrow.linear([weight], None), wide.linear([weight], None)
        torch.testing.assert_close(layer(x), expected(x), rtol=1e-5, atol=1e-4)
        assert torch.equal(layer(x[:1]), layer(x)[:1])
    heads, size = Heads(6, 2, 20), 8
    work = plan_step(rows_step([(30, 150), (1, 150)], [list(range(19))] * 2, size), size, [None], 5)
    qkv = torch.randn(31, 10 * 20, generator=generator)
    outs = []
    for kernels in (narrow, wide):
        caches = [torch.ones(19, 2, 20, size), torch.ones(19, 2, size, 20)]
        plan = kernels.prepare(
            work, heads, torch.randn(150, 20, generator=generator.manual_seed(4))
        )
        q = kernels.rope_write_kv(qkv.clone(), plan, *caches, None)
        outs.append(kernels.paged_attention(q, *caches, plan, None))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_wrong_inputs_are_refused_by_name() -> None:
    kernels = kernels_of("cpu")
    layer = _linear(_weight("Q8_0", 32, 64))
    heads, size = Heads(4, 2, 8), 16
    plan = kernels.prepare(
        plan_step(rows_step([(3, 3)], [[0]], size), size, [None]), heads, torch.zeros(8, 8)
    )
    keys, values = torch.zeros(1, 2, 8, size), torch.zeros(1, 2, size, 8)
    rows = torch.zeros(3, 64)
    for call, message in (
        (lambda: layer(torch.zeros(3, 63)), "x: shape"),
        (lambda: layer(torch.zeros(3, 64, dtype=torch.float64)), "x: must be contiguous float32"),
        (lambda: layer(torch.zeros(64, 3).T), "x: must be contiguous float32"),
        (lambda: kernels.rms_norm(rows, torch.ones(63), 1e-5), "weight: shape"),
        (lambda: kernels.add_rms_norm(rows, rows[:2], rows[0], 1e-5), "residual: shape"),
        (lambda: kernels.rope_write_kv(rows[:2], plan, keys, values, None), "qkv: shape"),
        (lambda: kernels.rope_write_kv(rows, plan, keys.half(), values, None), "k_cache: must be"),
        (lambda: kernels.paged_attention(rows, keys, values, plan, None), "q: float32"),
        (
            lambda: kernels.paged_attention(rows[:, :32], keys, values.mT, plan, None),
            "v_cache: must be",
        ),
        (
            lambda: kernels.paged_attention(
                rows[:, :32], torch.zeros(1, 2, size, 8).mT, values, plan, None
            ),
            "k_cache: the last dimension",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
