"""The compiled CPU kernels: weights in their own format, the build and its fallback, refusals."""

import os
import re
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
    with pytest.raises(
        ValueError,
        match="attention_backend 'cpu': serves float32 on the CPU, not bfloat16 on cpu; choose",
    ):
        select_kernels("cpu", CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="attention_backend 'gpu': one of 'auto'"):
        select_kernels("gpu", CPU, torch.float32)


def test_batch_invariance_is_promised_on_the_cpu_and_refused_where_it_cannot_be() -> None:
    for name in ("cpu", "torch"):
        assert select_kernels(name, CPU, torch.float32, batch_invariant=True).same_bits
        assert select_kernels(name, CPU, torch.float32).same_bits
    gpu = torch.device("cuda")
    assert not select_kernels("torch", gpu, torch.bfloat16).same_bits
    with pytest.raises(
        ValueError, match="batch_invariant: attention_backend 'torch' gives no such results on cuda"
    ):
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


@pytest.mark.parametrize("how", ["no compiler", "no directory", "no home"])
def test_a_start_that_cannot_compile_says_what_to_do(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "file"))  # for root nothing is read-only
    expected = r"cannot write .* set PREFIXCACHE_HOME to a directory that can be written"
    if how == "no compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        expected = r"no C\+\+ compiler found: install g\+\+, or name one in \$CXX"
    elif how == "no home":
        monkeypatch.delenv("PREFIXCACHE_HOME")
        monkeypatch.setattr(Path, "home", _no_home)
        expected = "no home; set PREFIXCACHE_HOME to a directory"
    assert isinstance(select_kernels("auto", CPU, torch.float32), TorchKernels)
    assert re.search(f"using torch's, which are slower: .*{expected}", caplog.text)
    with pytest.raises(BuildError, match=f"attention_backend 'cpu': .*{expected}"):
        select_kernels("cpu", CPU, torch.float32)
    with pytest.raises(BuildError, match=f"activation_quantization 'int8' needs .*{expected}"):
        select_kernels("auto", CPU, torch.float32, activation_quantization="int8")


def _no_home() -> Path:
    raise RuntimeError("no home")


def test_a_library_that_was_cut_short_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, the lack of its last page would end the process."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || eval "date +%N > \\${$#}"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for kept in (0, 3, -1):
        path = build(tmp_path / "kernels")
        whole = path.read_bytes()
        assert build(tmp_path / "kernels").read_bytes() == whole
        path.write_bytes(whole[:kept])
        assert len(build(tmp_path / "kernels").read_bytes()) == len(whole)


@pytest.mark.slow
def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    code = "from prefixcache_kernels.cpu.build import build; print(build(extra_flags=['-O0']))"
    environment = {**os.environ, "PREFIXCACHE_HOME": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    first, second = (Path(process.communicate()[0].decode().strip()) for process in running)
    assert first == second
    assert list((tmp_path / "kernels").iterdir()) == [first]
    assert Library(first).attention_pairs > 0


def test_a_failing_compiler_is_quoted_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho disk on fire >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", f"{broken} ")
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
