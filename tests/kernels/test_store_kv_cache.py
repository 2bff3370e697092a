"""store_kv_cache: the reference against a loop, the Triton kernel too, the checks, the machine code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels import store_kv_cache as public_store_kv_cache
from quantkit_kernels.dispatch import choose_store_kv_cache

Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def interpreted() -> Store:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels.triton_store_kv_cache import store_kv_cache

    return store_kv_cache


def make_case(
    tokens: int, heads: int, head_dim: int, value_dim: int, kv_block_size: int, dtype: torch.dtype, *, is_joint: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random tokens (as the transposed views that attention gets), caches full of NaN, slots with padding."""
    generator = torch.Generator().manual_seed(tokens * 1000 + head_dim)
    key = torch.randn(heads, tokens, head_dim, generator=generator).to(dtype).transpose(0, 1)
    value = torch.randn(heads, tokens, value_dim, generator=generator).to(dtype).transpose(0, 1)
    blocks = tokens // kv_block_size + 3
    if is_joint:  # keys and values of a slot side by side in one buffer: the caches are strided views
        buffer = torch.full((blocks, kv_block_size, heads * (head_dim + value_dim)), float("nan"), dtype=dtype)
        key_cache = buffer[..., : heads * head_dim].unflatten(-1, (heads, head_dim))
        value_cache = buffer[..., heads * head_dim :].unflatten(-1, (heads, value_dim))
    else:
        key_cache = torch.full((blocks, kv_block_size, heads, head_dim), float("nan"), dtype=dtype)
        value_cache = torch.full((blocks, kv_block_size, heads, value_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(blocks * kv_block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    return key, value, key_cache, value_cache, slots


def expected(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot != -1:
            block, offset = divmod(slot, key_cache.shape[1])
            key_cache[block, offset] = key[token]
            value_cache[block, offset] = value[token]
    return key_cache, value_cache


@pytest.mark.parametrize("body", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "value_dim", "kv_block_size"),
    [(1, 1, 16, 16, 16), (7, 3, 64, 64, 5), (13, 2, 80, 48, 16), (3, 5, 1, 3, 1)],
)
def test_tokens_land_in_their_slots_and_nothing_else_changes(
    body: str, dtype: torch.dtype, is_joint: bool, tokens: int, heads: int, head_dim: int, value_dim: int,
    kv_block_size: int,
) -> None:  # fmt: skip
    store = reference.store_kv_cache if body == "reference" else interpreted()
    case = make_case(tokens, heads, head_dim, value_dim, kv_block_size, dtype, is_joint=is_joint)
    wanted = expected(*case)
    store(*case)
    for cache, want in zip(case[2:4], wanted, strict=True):
        assert torch.equal(cache.isnan(), want.isnan())  # a copy: exact, and untouched slots are still NaN
        assert torch.equal(cache.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("body", ["reference", "triton"])
def test_no_token_and_only_padding_are_legal(body: str) -> None:
    store = reference.store_kv_cache if body == "reference" else interpreted()
    key, value, key_cache, value_cache, slots = make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False)
    store(key[:0], value[:0], key_cache, value_cache, slots[:0])
    store(key, value, key_cache, value_cache, torch.full_like(slots, -1))
    assert key_cache.isnan().all()
    assert value_cache.isnan().all()


def test_a_slot_outside_the_cache_is_an_error_on_the_cpu() -> None:
    key, value, key_cache, value_cache, slots = make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False)
    slots[0] = key_cache.shape[0] * 8
    with pytest.raises(IndexError):
        reference.store_kv_cache(key, value, key_cache, value_cache, slots)


def change(index: int, function: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], None]:
    def apply(case: list[Tensor]) -> None:
        case[index] = function(case[index])

    return apply


@pytest.mark.parametrize("body", ["reference", "triton", "public"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(0, lambda t: t.unsqueeze(0)), r"key has 4 dimensions, allowed is 3"),
        (change(2, lambda t: t[0]), r"key_cache has 3 dimensions, allowed is 4"),
        (change(3, lambda t: t[..., :8]), r"value_cache ends in \[2, 8\], allowed is what value has: \[2, 16\]"),
        (change(0, lambda t: t.double()), r"key is torch.float64 .* one of torch.float32, torch.bfloat16"),
        (change(2, lambda t: t.bfloat16()), r"key is torch.float32 and key_cache torch.bfloat16, allowed is the same"),
        (change(2, lambda t: t.transpose(1, 3).contiguous().transpose(1, 3)), r"along head_dim, allowed is 1"),
        (change(1, lambda t: t[:3]), r"may differ in head_dim only"),
        (change(4, lambda t: t.int()), r"slot_mapping is torch.int32 \[4\], allowed is torch.int64 \[4\]"),
        (change(4, lambda t: t[:2]), r"slot_mapping is torch.int64 \[2\], allowed is torch.int64 \[4\]"),
        (change(4, lambda t: t.to("meta")), r"allowed is one device"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_allowed_values(
    body: str, spoil: Callable[[list[Tensor]], None], message: str
) -> None:
    bodies: dict[str, Store] = {"reference": reference.store_kv_cache, "public": public_store_kv_cache}
    store = bodies.get(body) or interpreted()
    case = list(make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False))
    spoil(case)
    with pytest.raises(ValueError, match=message):
        store(*case)


def test_the_launcher_refuses_what_the_kernel_cannot_read() -> None:
    store = interpreted()
    key, value, key_cache, value_cache, slots = make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False)
    with pytest.raises(ValueError, match="slot_mapping has the stride 2, allowed is 1"):
        store(key, value, key_cache, value_cache, slots.repeat_interleave(2)[::2])
    wide = torch.zeros(1, 1, 2048)
    with pytest.raises(ValueError, match="head_dim=2048, allowed is up to 1024"):
        store(wide, wide, wide.unsqueeze(0), wide.unsqueeze(0), slots[:1])


def test_the_choice_says_why() -> None:
    choice = choose_store_kv_cache(torch.device("cpu"))
    assert (choice.operation, choice.body) == ("store_kv_cache", "reference")
    assert str(choice) == "store_kv_cache: reference (tensors are on cpu, Triton kernels need cuda)"


COMPILE = """
import json, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quantkit_kernels.triton_store_kv_cache import _store_kv_cache_kernel as kernel

cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
cubin = Path(sys.argv[1])
constants = {"HEAD_DIM_K": 80, "HEAD_DIM_V": 64, "BLOCK_D": 128}
found = {}
for capability in (80, 90, 100):
    for dtype in ("bf16", "fp32"):
        pointers = {name: "*" + dtype for name in ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr")}
        signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
        signature |= {**pointers, "slot_mapping_ptr": "*i64"}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        cubin.write_bytes(compiled.asm["cubin"])
        dump = [
            subprocess.run([cuobjdump, flag, cubin], check=True, capture_output=True, text=True).stdout
            for flag in ("-sass", "-res-usage")
        ]
        found[f"{capability} {dtype}"] = {"ptx": compiled.asm["ptx"], "sass": dump[0], "usage": dump[1]}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_without_spilling(tmp_path: Path) -> None:
    """In a process of its own: this one may run Triton's interpreter, which replaces the compiler."""
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 6
    for target, code in found.items():
        assert f".target sm_{target.split()[0]}" in code["ptx"]
        assert "STG" in code["sass"], target  # it stores to global memory ...
        assert not any(opcode in code["sass"] for opcode in ("STL", "LDL")), target  # ... nothing to local memory
        assert "LOCAL:0" in code["usage"], target
