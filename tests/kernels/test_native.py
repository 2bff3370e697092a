"""The compiled bodies: how they come to be, and what holds of all of them. Each is tested with its operation too."""

import ctypes
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_kernels import cpu_native, native_library, reference
from quantkit_kernels.cpu_native_int8 import NativeW8A8
from quantkit_kernels.cpu_native_linear import NativeHalf, NativeW4A16
from quantkit_kernels.dispatch import NATIVE, choose
from quantkit_kernels.native_library import NativeBuildError

CPU = torch.device("cpu")
blocker = native_library.native_blocker()
needs_native = pytest.mark.skipif(blocker is not None, reason=str(blocker))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def cache_folder(forgetful: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, and a source that takes no time to compile."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(native_library, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_native
def test_a_library_is_built_once_and_anew_for_another_source(cache_folder: Path) -> None:
    assert native_library.native_library().one() == 1
    (first,) = cache_folder.glob("quantkit/native/*.so")
    assert [path.name for path in first.parent.iterdir() if path != first] == ["lock"]  # nothing is left half-built
    written = first.stat().st_mtime_ns
    native_library.native_library.cache_clear()
    assert native_library.native_library().one() == 1
    assert first.stat().st_mtime_ns == written
    (native_library.SOURCES / "one.cpp").write_text('extern "C" int one() { return 2; }')
    native_library.native_library.cache_clear()
    assert native_library.native_library().one() == 2
    assert len(list(first.parent.glob("*.so"))) == 2
    for number in range(3, 8):
        (native_library.SOURCES / "one.cpp").write_text(f'extern "C" int one() {{ return {number}; }}')
        native_library.native_library.cache_clear()
        assert native_library.native_library().one() == number
    assert len(list(first.parent.glob("*.so"))) == native_library.MAX_LIBRARIES
    assert not first.exists()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda whole: whole[: len(whole) // 2],  # which would end a process that loads it
    "text": lambda _: b"no library",
    "a byte": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
}


@needs_native
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(cache_folder: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    library, _ = native_library._built()
    library.write_bytes(DAMAGES[damage](library.read_bytes()))
    left = library.with_name("build-that-was-killed")
    left.mkdir()
    native_library.native_library.cache_clear()
    assert native_library.native_library().one() == 1
    assert f"a library is built again, its content is not what was built: {library}" in caplog.text
    assert len(list(library.parent.glob("*.so"))) == 1
    assert not left.exists()


@needs_native
def test_a_library_that_does_not_load_is_built_again(
    cache_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and of another machine that shares the folder."""
    library, _ = native_library._built()
    load, asked = ctypes.CDLL, []

    def load_second(path: str) -> ctypes.CDLL:
        asked.append(path)
        if len(asked) == 1:
            raise OSError(f"{path}: version GLIBC_9 not found")
        return load(path)

    monkeypatch.setattr(native_library.ctypes, "CDLL", load_second)
    native_library.native_library.cache_clear()
    assert native_library.native_library().one() == 1
    assert f"a library is built again, it does not load: {library}" in caplog.text


def test_compilers_share_their_time_and_none_outlives_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(popen(command, **options))
        return started[-1]

    monkeypatch.setattr(native_library.subprocess, "Popen", start)
    monkeypatch.setattr(native_library, "MAX_SECONDS", 0.2)
    with pytest.raises(NativeBuildError, match=r"not ready after 0\.2 s"):
        native_library._run([["sleep", "60"]] * 2)
    with pytest.raises(FileNotFoundError):
        native_library._run([["sleep", "60"], ["no-such-compiler"]])
    assert [process.returncode for process in started] == [-9] * 3


@needs_native
def test_two_processes_build_it_once(cache_folder: Path) -> None:
    code = (
        "import logging, pathlib, sys; logging.basicConfig()\n"
        "from quantkit_kernels import native_library\n"
        "native_library.SOURCES = pathlib.Path(sys.argv[1])\n"
        "print(native_library.native_library().one())"
    )
    command = [sys.executable, "-c", code, str(native_library.SOURCES)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    found = [process.communicate() for process in processes]
    assert [output for output, _ in found] == ["1\n", "1\n"]
    assert sum(errors.count("compiled ") for _, errors in found) == 1


@needs_native
def test_what_does_not_compile_or_load_is_a_reason(cache_folder: Path) -> None:
    (native_library.SOURCES / "one.cpp").write_text("int one() { return nothing; }")
    why = str(native_library.native_blocker())
    assert why.startswith("no compiled bodies: g++ says ")
    assert "nothing" in why
    (native_library.SOURCES / "one.cpp").write_text('extern "C" int two(); extern "C" int one() { return two(); }')
    for function in (native_library.native_library, native_library.native_blocker):
        function.cache_clear()
    assert "undefined symbol: two" in str(native_library.native_blocker())


def test_without_a_compiler_torch_does_it_and_says_why(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_blocker", lambda: None)
    monkeypatch.setenv("PATH", "")
    why = "no compiled bodies: g++ is not on the path"
    assert native_library.native_blocker() == why
    assert str(choose("rms_norm", CPU)) == f"rms_norm: cpu (tensors are on cpu; {why})"
    assert str(choose("store_kv_cache", CPU)) == f"store_kv_cache: reference (tensors are on cpu; {why})"
    with pytest.raises(NativeBuildError, match="g\\+\\+ is not on the path"):
        native_library.native_library()


def test_a_folder_that_cannot_be_made_is_a_reason(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_blocker", lambda: None)
    monkeypatch.setattr(native_library.shutil, "which", lambda name: name)
    cache_folder.write_text("a file, where the folder should be")
    assert str(native_library.native_blocker()).startswith("no compiled bodies: ")


def test_it_can_be_switched_off(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    assert str(choose("silu_mul", CPU)) == "silu_mul: cpu (tensors are on cpu; QUANTKIT_NATIVE=0)"


@needs_native
@pytest.mark.parametrize("operation", NATIVE)
def test_a_body_has_the_signature_of_its_reference(operation: str) -> None:
    found, wanted = (inspect.signature(getattr(module, operation)) for module in (cpu_native, reference))
    assert list(found.parameters.values()) == list(wanted.parameters.values())
    assert choose(operation, CPU).function is getattr(cpu_native, operation)


@needs_native
def test_its_threads_are_those_of_torch() -> None:
    """One OpenMP library in the process: two would each keep threads that wait for work."""
    native_library.native_library()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    assert len({path for path in mapped if ".so" in path and "gomp" in path}) <= 1
    assert ctypes.CDLL(None).GOMP_parallel


WEIGHTS = [(33, 64, 32), (16, 256, 128), (100, 144, -1)]


@needs_native
@pytest.mark.parametrize("rows", [1, 3, 5, 6, 7, 40])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), WEIGHTS)
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_4_bit_products(is_symmetric: bool, out_features: int, in_features: int, group_size: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-8, 8, (out_features, in_features), generator=generator).to(torch.int8)
    words = reference.pack_int4(codes)
    groups = 1 if group_size == -1 else in_features // group_size
    scale = torch.rand(out_features, groups, generator=generator) + 0.1
    zero_point = None if is_symmetric else torch.randint(-8, 8, scale.shape, generator=generator).to(torch.int8)
    x = random(rows, in_features, seed=1)
    weight = NativeW4A16(words, scale, group_size, zero_point)
    wanted = reference.w4a16_gemm(x, words, scale, group_size, zero_point)
    torch.testing.assert_close(weight(x), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    narrow = x.bfloat16()
    wanted = reference.w4a16_gemm(narrow.float(), words, scale, group_size, zero_point)
    torch.testing.assert_close(weight(narrow).float(), wanted, rtol=2**-7, atol=1e-5 * float(wanted.abs().max()))
    assert torch.equal(weight(x[-1]), weight(x)[-1])  # to the last bit, whatever is beside a row


@needs_native
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 130])
@pytest.mark.parametrize(("out_features", "in_features"), [(16, 72), (33, 72), (100, 7), (20, 9000)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_16_bit_products(has_bias: bool, out_features: int, in_features: int, rows: int) -> None:
    weight = random(out_features, in_features).bfloat16()
    bias = random(out_features, seed=1).bfloat16() if has_bias else None
    x = random(rows, in_features, seed=2)
    prepared = NativeHalf(weight, bias)
    wanted = reference.linear(x, weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(prepared(x), wanted, rtol=1e-4, atol=1e-5 * in_features**0.5)
    assert torch.equal(prepared(x[-1:]), prepared(x)[-1:])
    assert torch.equal(prepared(x.bfloat16()), prepared(x.bfloat16().float()).bfloat16())


@needs_native
def test_float16_holds_whole_numbers_and_bfloat16_numbers_exactly() -> None:
    eye = torch.eye(64)
    powers = torch.exp2(torch.arange(-17, 15).float()).repeat(2)
    weights = (powers * random(16, 64).sign() * 1.9921875).bfloat16()
    codes = torch.randint(-128, 128, (16, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    for weight in (weights, codes):
        assert torch.equal(NativeHalf(weight)(eye), weight.float().t())
    with pytest.raises(ValueError, match="float16 does not hold weights up to 7e"):
        NativeHalf(torch.full((16, 16), 70000.0))
    with pytest.raises(ValueError, match=r"x is \[2, 63\], allowed is \[..., 64\]"):
        NativeHalf(weights)(eye[:2, :63])


@needs_native
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = random(64, 576), NativeHalf(random(640, 576, seed=1))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((weight(x), cpu_native.silu_mul(x), cpu_native.rms_norm(x, x[0], 1e-5)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def arguments_of(operation: str) -> dict[str, Any]:
    """Some that fit."""
    cache = torch.zeros(2, 8, 1, 8)
    return {
        "paged_attention": {
            "query": torch.ones(1, 1, 8), "key_cache": cache, "value_cache": cache.clone(),
            "block_tables": torch.zeros(1, 1).int(), "cu_seqlens": torch.tensor([0, 1]).int(),
            "context_lens": torch.tensor([3]).int(), "scale": 1.0, "max_query_len": 1, "max_context_len": 8,
        },
        "rms_norm": {
            "x": torch.ones(2, 16), "weight": torch.ones(16), "eps": 1e-5, "residual": torch.ones(2, 16),
        },
        "rotary_embedding": {
            "q": torch.ones(2, 2, 8), "k": torch.ones(2, 1, 8), "cos": torch.ones(2, 4), "sin": torch.ones(2, 4),
        },
        "silu_mul": {"x": torch.ones(2, 16)},
        "store_kv_cache": {
            "key": torch.ones(2, 1, 8), "value": torch.ones(2, 1, 8), "key_cache": cache, "value_cache": cache.clone(),
            "slot_mapping": torch.arange(2),
        },
    }[operation]  # fmt: skip


TENSORS = [(op, name) for op in NATIVE for name, value in arguments_of(op).items() if isinstance(value, Tensor)]


@needs_native
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_memory_that_cannot_be_read_is_refused(operation: str, name: str) -> None:
    body, arguments = getattr(cpu_native, operation), arguments_of(operation)
    body(**arguments)
    with pytest.raises(ValueError, match=r"is on (meta|cpu), allowed is"):
        body(**(arguments | {name: arguments[name].to("meta")}))


@needs_native
@pytest.mark.parametrize("operation", NATIVE)
def test_memory_of_another_device_is_refused(operation: str) -> None:
    on_meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in arguments_of(operation).items()}
    with pytest.raises(ValueError, match="is on meta, allowed is cpu, whose memory compiled bodies read"):
        getattr(cpu_native, operation)(**on_meta)


@needs_native
@pytest.mark.parametrize(("operation", "name"), [case for case in TENSORS if case[1] in ("x", "query", "q", "key")])
def test_a_gradient_is_refused_and_not_dropped(operation: str, name: str) -> None:
    body, arguments = getattr(cpu_native, operation), arguments_of(operation)
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires a gradient, which compiled bodies do not give"):
        body(**arguments)
    with torch.no_grad():
        body(**arguments)


@needs_native
def test_products_refuse_what_they_cannot_read() -> None:
    weight = NativeHalf(torch.ones(16, 64))
    with pytest.raises(ValueError, match="x is on meta, allowed is cpu"):
        weight(torch.ones(1, 64, device="meta"))
    with pytest.raises(ValueError, match="x requires a gradient"):
        weight(torch.ones(1, 64, requires_grad=True))
    with pytest.raises(ValueError, match=r"a weight of \[16, 0\] is empty"):
        NativeHalf(torch.ones(16, 0))
    with pytest.raises(ValueError, match=r"a weight of \[16, 0\] is empty"):
        NativeW8A8(torch.ones(16, 0, dtype=torch.int8), torch.ones(16, 1))


@needs_native
def test_a_bias_makes_another_weight() -> None:
    weight, x = NativeHalf(random(16, 64)), random(3, 64)
    before = weight(x)
    torch.testing.assert_close(weight.with_bias(torch.ones(16))(x), before + 1)
    assert torch.equal(weight(x), before)


@needs_native
def test_one_column_has_no_stride() -> None:
    arguments = arguments_of("paged_attention")
    arguments["block_tables"] = torch.zeros(1, 3).int().t()[:1]
    wanted = reference.paged_attention(**arguments)
    torch.testing.assert_close(cpu_native.paged_attention(**arguments), wanted)
    column, weight = torch.ones(3, 2)[:, :1], torch.ones(2)[:1]
    assert torch.equal(cpu_native.rms_norm(column, weight, 0.0), reference.rms_norm(column, weight, 0.0))


@needs_native
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_scales_that_are_not_contiguous_are_named(name: str) -> None:
    codes, scale = torch.zeros(2, 8, 2, 8, dtype=torch.int8), torch.zeros(2, 8, 2)
    scales = {"key_scale": scale, "value_scale": scale} | {name: torch.zeros(2, 16, 2)[:, ::2]}
    rows = torch.ones(2, 2, 8)
    with pytest.raises(ValueError, match=f"{name} has the strides .*, allowed is a contiguous tensor"):
        cpu_native.store_kv_cache(rows, rows, codes, codes.clone(), torch.arange(2), **scales)
