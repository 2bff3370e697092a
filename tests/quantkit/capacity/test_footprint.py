"""Bytes of weights and cache: worked examples, the pipeline's own plan, the engine's own shapes, real GGUF files."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.capacity.kv_footprint import (
    KV_DTYPES,
    QUANTKIT,
    VLLM,
    block_waste,
    read_bytes,
    sequence_bytes,
    token_bytes,
    waste,
)
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.read_facts import read_facts
from quantkit.capacity.weight_schemes import (
    PER_CHANNEL,
    SCHEME_BY_NAME,
    SchemeDoesNotFitError,
    WeightScheme,
    matrix_bytes,
    model_bytes,
    step_ratio,
    stored_scheme,
)
from quantkit.plan import make_plan
from quantkit.recipe import parse_recipe
from quantkit.serve.kv_cache import kv_block_bytes
from quantkit.serve.models.loader import load_model
from quantkit.source import open_source

SIXTEEN_BITS, FP8, INT8 = KV_DTYPES["16-bit"], KV_DTYPES["fp8"], KV_DTYPES["int8"]


def test_the_widely_copied_example_is_42_9_gb_and_not_21_5(plain_facts: Callable[..., ModelFacts]) -> None:
    facts = plain_facts(1, layers=80, kv_heads=8, head_dim=128)
    assert 32 * sequence_bytes(facts, 4096, SIXTEEN_BITS) == 42_949_672_960
    assert 32 * sequence_bytes(facts, 4096, FP8) == 42_949_672_960 // 2


def test_a_request_of_2048_tokens_is_1_07_gb_and_37_fit_into_40_gb(plain_facts: Callable[..., ModelFacts]) -> None:
    facts = plain_facts(1, layers=32, kv_heads=32, head_dim=128)
    request = sequence_bytes(facts, 2048, SIXTEEN_BITS)
    assert request == pytest.approx(1.07e9, rel=0.005)
    assert int(40e9 // request) == 37


def test_13b_in_80_gb(plain_facts: Callable[..., ModelFacts]) -> None:
    facts = plain_facts(13_000_000_000, layers=40, kv_heads=40, head_dim=128)
    four = WeightScheme("4 bits without scales", 4)
    request = sequence_bytes(facts, 4096, SIXTEEN_BITS)
    assert (model_bytes(facts, SCHEME_BY_NAME["16-bit"]) + 16 * request) / 1e9 == pytest.approx(79.69, abs=0.005)
    assert (model_bytes(facts, four) + 16 * request) / 1e9 == pytest.approx(60.19, abs=0.005)
    assert int((80e9 - model_bytes(facts, four)) // request) == 21


def test_waste_and_steps() -> None:
    assert waste(120, 2048) == pytest.approx(0.941, abs=0.0005)
    assert block_waste(120, 16) == 0.0625
    assert step_ratio(4, 8) == 17.0


def test_blocks_are_whole(plain_facts: Callable[..., ModelFacts]) -> None:
    facts = plain_facts(1, layers=2, kv_heads=1, head_dim=8)
    a_token = token_bytes(facts, SIXTEEN_BITS)
    assert a_token == 2 * 2 * 2 * 8
    assert sequence_bytes(facts, 1, SIXTEEN_BITS) == 16 * a_token
    assert sequence_bytes(facts, 17, SIXTEEN_BITS, QUANTKIT) == 32 * a_token


def test_int8_has_a_scale_for_each_head_of_a_token(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("llama-3-8b")
    assert token_bytes(facts, SIXTEEN_BITS) == 2 * 2 * 32 * 8 * 128
    assert token_bytes(facts, INT8) == 2 * 32 * 8 * (128 + 4)


def test_windows_bound_the_cache_of_engines_that_free_blocks(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("gemma-3-1b")
    layer = 2 * 2 * 256
    assert sequence_bytes(facts, 32768, SIXTEEN_BITS, VLLM) == layer * (4 * 32768 + 22 * (512 + 16))
    assert sequence_bytes(facts, 32768, SIXTEEN_BITS, QUANTKIT) == layer * 26 * 32768
    assert read_bytes(facts, 32768, SIXTEEN_BITS) == layer * (4 * 32768 + 22 * 512)


def test_mla_keeps_one_latent(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("deepseek-v3")
    assert token_bytes(facts, SIXTEEN_BITS, VLLM) == 61 * (512 + 64) * 2  # 70,272 bytes, as DeepSeek counts it
    assert token_bytes(facts, SIXTEEN_BITS, QUANTKIT) == 61 * 128 * (192 + 128) * 2
    assert token_bytes(facts, SIXTEEN_BITS, VLLM, tp=8) == token_bytes(facts, SIXTEEN_BITS, VLLM)


def test_heads_are_split_until_one_is_left(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("llama-3-8b")
    whole = token_bytes(facts, SIXTEEN_BITS)
    assert [whole // token_bytes(facts, SIXTEEN_BITS, tp=tp) for tp in (2, 8, 16)] == [2, 8, 8]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "mixtral"])
def test_the_cache_is_what_our_engine_allocates(family: str, tiny_models: Callable[[str], Path]) -> None:
    """The engine learns its shapes by running the model; planning reads them off config.json."""
    folder = tiny_models(family)
    loaded = load_model(open_source(folder), torch.bfloat16)
    facts = read_facts(str(folder))
    assert [layer.width for layer in facts.kv_layers] == [shape.width for shape in loaded.shapes]
    block = kv_block_bytes(loaded.shapes, QUANTKIT.block_size, torch.bfloat16)
    assert sequence_bytes(facts, QUANTKIT.block_size, SIXTEEN_BITS, QUANTKIT) == block


@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 32), ("W4A16", 64), ("W4A16", "channel")])
def test_weights_are_what_the_pipeline_would_write(
    scheme: str, group_size: int | str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", dtype=torch.bfloat16)
    text = (
        f"version: 1\nmodel: {folder}\nquantization:\n  scheme: {scheme}\n  group_size: {group_size}\n"
        f"  algorithm: {{name: rtn}}\noutputs: [{{format: compressed-tensors, path: {tmp_path / 'out'}}}]\n"
    )
    plan = make_plan(parse_recipe(text))
    facts = read_facts(str(folder))
    planned = WeightScheme("", 4, PER_CHANNEL if group_size == "channel" else int(group_size))
    shapes = 16 * len(plan.layers)  # weight_shape, two int64 a layer, which no engine keeps
    assert model_bytes(facts, planned) == plan.bytes_after - shapes


def test_zero_points_are_packed_like_codes() -> None:
    symmetric, asymmetric = SCHEME_BY_NAME["W4A16 g128"], SCHEME_BY_NAME["W4A16_ASYM g128"]
    assert matrix_bytes(256, 512, asymmetric) - matrix_bytes(256, 512, symmetric) == 4 * 256 * 4 // 8


def test_a_group_size_that_does_not_divide_is_named(real_facts: Callable[..., ModelFacts]) -> None:
    with pytest.raises(SchemeDoesNotFitError, match="groups of 128 do not divide 64 columns of q_proj"):
        model_bytes(real_facts("llama-3-8b", hidden_size=64), SCHEME_BY_NAME["W4A16 g128"])


@pytest.mark.parametrize(
    ("name", "scheme", "gigabytes"),
    [  # sizes of published files, whose metadata is below 0.01 GB
        ("llama-3-8b", "Q8_0", 8.54),
        ("llama-3-8b", "Q6_K", 6.60),
        ("llama-3-8b", "Q5_K_M", 5.73),
        ("llama-3-8b", "Q4_K_M", 4.92),
        ("llama-3-8b", "Q4_0", 4.66),
        ("llama-3-70b", "Q4_K_M", 42.52),
        ("llama-3-70b", "Q5_K_M", 49.95),
    ],
)
def test_gguf_types_are_as_large_as_published_files(
    name: str, scheme: str, gigabytes: float, real_facts: Callable[..., ModelFacts]
) -> None:
    assert model_bytes(real_facts(name), SCHEME_BY_NAME[scheme]) / 1e9 == pytest.approx(gigabytes, abs=0.013)


def test_a_stored_scheme_is_read_off_the_checkpoint(
    write_rtn_checkpoint: Callable[..., Path], tiny_llama_folder: Path, tmp_path: Path, smollm2_gguf: Path
) -> None:
    packed = stored_scheme(read_facts(str(write_rtn_checkpoint(tiny_llama_folder, tmp_path / "packed"))))
    assert packed is not None
    assert (packed.bits, packed.group_size, packed.compute) == (4, 32, "16-bit")
    facts = read_facts(str(tmp_path / "packed"))
    assert model_bytes(facts, packed) == pytest.approx(facts.stored_bytes, abs=len(facts.weights))
    gguf = read_facts(str(smollm2_gguf))
    scheme = stored_scheme(gguf)
    assert scheme is not None
    assert model_bytes(gguf, scheme) == gguf.stored_bytes
    assert stored_scheme(read_facts(str(tiny_llama_folder))) is None
    assert math.isclose(scheme.bits, 8 * gguf.stored_bytes / gguf.parameters)
