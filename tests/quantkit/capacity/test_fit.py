"""What fits, and the settings that follow: they are accepted by our own engine's configuration."""

import json
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise

import pytest

from quantkit.capacity.devices import device_named, known_devices
from quantkit.capacity.fit import (
    DEFAULT_UTILIZATION,
    MAX_NUM_SEQS,
    MAX_UTILIZATION,
    Demand,
    activation_bytes,
    fit,
    longest_sequence,
    split_weight_bytes,
)
from quantkit.capacity.kv_footprint import KV_DTYPES, QUANTKIT, VLLM, sequence_bytes
from quantkit.capacity.launch_flags import engine_command, llama_command, vllm_command
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.problem import tp_problem
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME, model_bytes
from quantkit.cli.serve import serve_command
from quantkit.errors import UsageError
from quantkit.serve import EngineConfig

SIXTEEN, FOUR = SCHEME_BY_NAME["16-bit"], SCHEME_BY_NAME["W4A16 g128"]
KV = KV_DTYPES["16-bit"]


def test_70b_needs_two_h100_in_16_bits_and_one_in_4(real_facts: Callable[..., ModelFacts]) -> None:
    facts, h100 = real_facts("llama-3-70b"), device_named("H100-80GB")
    alone = fit(facts, SIXTEEN, h100, KV, VLLM, Demand())
    assert not alone.fits
    assert (alone.batch_p99, alone.kv_bytes, alone.max_model_len) == (0, 0, None)
    assert "weights, activations and overhead need" in str(alone.problem)
    assert not fit(facts, SIXTEEN, h100, KV, VLLM, Demand(tp=2)).batch_p50 > 4
    assert fit(facts, SIXTEEN, h100, KV, VLLM, Demand(tp=4)).fits
    assert fit(facts, FOUR, h100, KV, VLLM, Demand()).fits


def test_the_parts_of_a_fit_add_up(real_facts: Callable[..., ModelFacts]) -> None:
    facts, device = real_facts("llama-3-8b"), device_named("L40S")
    demand = Demand(context_p50=1000, context_p99=3000, concurrency=64)
    found = fit(facts, SIXTEEN, device, KV, VLLM, demand)
    parts = found.weight_bytes + found.activation_bytes + found.overhead_bytes + found.kv_bytes
    assert parts == pytest.approx(device.memory_bytes * found.utilization)
    assert found.weight_bytes == model_bytes(facts, SIXTEEN)
    assert found.activation_bytes == activation_bytes(facts, demand, 64)
    for tokens, batch in ((1000, found.batch_p50), (3000, found.batch_p99)):
        one = sequence_bytes(facts, tokens, KV, VLLM) + 4 * facts.vocab_size  # its cache and its logits
        room = found.kv_bytes + 64 * 4 * facts.vocab_size
        assert batch * one <= room < (batch + 1) * one
    assert found.max_model_len == 3008  # whole blocks of 16
    assert found.longest == 8192


def test_a_higher_demand_does_not_reduce_what_fits(real_facts: Callable[..., ModelFacts]) -> None:
    """SmolLM2-135M's shapes on an L4, whose 100000 rows of logits would fill the memory."""
    facts = real_facts(
        "llama-3-8b", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    found = [
        fit(facts, SIXTEEN, device_named("L4"), KV, VLLM, Demand(concurrency=wanted))
        for wanted in (1, 100, 400, 440, 443, 444, 3000, 100_000)
    ]
    for less, more in pairwise(found):
        assert (less.batch_p50, less.batch_p99, less.longest) <= (more.batch_p50, more.batch_p99, more.longest)
        assert less.max_num_seqs <= more.max_num_seqs
    # (0.95 x 24 GB - weights - 1.5 GB - 2048 tokens of a step) / (2048 tokens of 23040 bytes + 49152 logits of 4)
    fixed = 2 * facts.parameters + 1.5e9 + 2 * 2048 * (4 * 576 + 2 * 1536)
    assert found[-1].batch_p50 == int((22.8e9 - fixed) // (2048 * 23040 + 4 * 49152)) == 443
    assert found[-1].max_num_seqs == 443
    assert found[-1].kv_bytes >= 443 * 2048 * 23040
    assert [entry.fits for entry in found] == [True] * 5 + [False] * 3
    assert all(entry.runs for entry in found)


def test_more_sequences_than_usual_are_served_if_so_many_are_demanded(real_facts: Callable[..., ModelFacts]) -> None:
    facts, device = real_facts("qwen2.5-0.5b"), device_named("B200")
    usual, many = (fit(facts, SIXTEEN, device, KV, VLLM, Demand(concurrency=wanted)) for wanted in (None, 3000))
    assert (usual.max_num_seqs, many.max_num_seqs, many.fits) == (MAX_NUM_SEQS, 3000, True)
    assert (
        many.activation_bytes == 2 * 3000 * (4 * 896 + 2 * 4864) + 4 * 3000 * 151936
    )  # more rows than tokens of a step


def test_utilization_rises_only_as_far_as_needed_and_allowed(real_facts: Callable[..., ModelFacts]) -> None:
    facts, device = real_facts("llama-3-8b"), device_named("L40S")
    roomy = fit(facts, FOUR, device, KV, VLLM, Demand(concurrency=1))
    crowded = fit(facts, FOUR, device, KV, VLLM, Demand(concurrency=10_000))
    assert roomy.utilization == DEFAULT_UTILIZATION
    assert crowded.utilization == MAX_UTILIZATION
    assert "of 10000 sequences of 2048 tokens fit at once" in str(crowded.problem)


def test_an_8_bit_cache_holds_twice_as_much(real_facts: Callable[..., ModelFacts]) -> None:
    facts, device = real_facts("llama-3-8b"), device_named("H100-80GB")
    sixteen, eight = (fit(facts, SIXTEEN, device, KV_DTYPES[k], VLLM, Demand()).batch_p99 for k in ("16-bit", "fp8"))
    assert eight in (2 * sixteen, 2 * sixteen + 1)


def test_the_longest_sequence_is_where_one_more_token_does_not_fit(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("gemma-3-1b")
    longest = longest_sequence(facts, 50e6, KV, VLLM)
    assert 0 < longest < 32768
    assert sequence_bytes(facts, longest, KV, VLLM) <= 50e6 < sequence_bytes(facts, longest + 1, KV, VLLM)


def test_tensor_parallelism_splits_matrices_and_is_refused_where_it_cannot(
    real_facts: Callable[..., ModelFacts],
) -> None:
    facts = real_facts("llama-3-8b")
    norms = 2 * facts.of_role("other")
    assert split_weight_bytes(facts, SIXTEEN, 2) == (model_bytes(facts, SIXTEEN) - norms) / 2 + norms
    assert tp_problem(facts, FOUR, 8) is None
    assert "32 attention heads cannot be split over 3" in str(tp_problem(facts, FOUR, 3))
    nine = tp_problem(real_facts("llama-3-8b", num_attention_heads=9, num_key_value_heads=3, head_dim=64), FOUR, 2)
    assert nine is not None
    assert (nine.name, nine.fix) == ("heads-block-tp", "use --tp 1, 3 or 9")
    # 3 key/value heads: a third each on 3 devices, or each on two of 6
    twelve = real_facts("llama-3-8b", num_attention_heads=12, num_key_value_heads=3, head_dim=64)
    assert "the key/value heads of 12 attention heads cannot be split over 2" in str(tp_problem(twelve, SIXTEEN, 2))
    assert [tp for tp in range(1, 13) if tp_problem(twelve, SIXTEEN, tp) is None] == [1, 3, 6, 12]
    small = real_facts("qwen2.5-0.5b")  # 4864 = 38 groups of 128
    assert "groups of 128 do not divide 896 columns / 2 of o_proj" in str(tp_problem(small, FOUR, 2))
    assert tp_problem(small, SCHEME_BY_NAME["W4A16 g64"], 2) is None


def test_a_context_beyond_the_model_does_not_fit(real_facts: Callable[..., ModelFacts]) -> None:
    found = fit(
        real_facts("llama-3-8b"), FOUR, device_named("B200"), KV, VLLM, Demand(context_p50=2048, context_p99=9000)
    )
    assert "9000 tokens is more than the model's 8192" in str(found.problem)
    assert (found.runs, found.answer, found.batch_p50) == (False, "no", 0)
    assert found.to_dict()["fix"].startswith("demand at most 8192 tokens")


def test_a_device_without_fp8_says_so(real_facts: Callable[..., ModelFacts]) -> None:
    found = fit(real_facts("llama-3-8b"), SCHEME_BY_NAME["FP8"], device_named("A100-80GB"), KV, VLLM, Demand())
    assert str(found.problem) == "A100-80GB has no fp8 products"


def test_flags_name_what_was_computed(real_facts: Callable[..., ModelFacts]) -> None:
    facts, demand = real_facts("llama-3-8b"), Demand(concurrency=16, tp=2)
    found = fit(facts, FOUR, device_named("L4"), KV_DTYPES["fp8"], VLLM, demand)
    command = vllm_command("owner/name", found, demand, prefix_caching=True)
    assert command == (
        "vllm serve PATH/TO/CHECKPOINT --max-model-len 4096 --gpu-memory-utilization 0.90 --max-num-seqs 16 "
        "--max-num-batched-tokens 2048 --tensor-parallel-size 2 --kv-cache-dtype fp8 --enable-prefix-caching"
    )
    eight = fit(facts, SCHEME_BY_NAME["FP8"], device_named("L4"), KV, VLLM, Demand(concurrency=4))
    made_by_vllm = vllm_command("owner/name", eight, demand, prefix_caching=False)
    assert made_by_vllm is not None
    assert made_by_vllm.startswith("vllm serve owner/name ")
    assert "--quantization fp8" in made_by_vllm
    assert engine_command("owner/name", eight, demand) is None
    gguf = fit(facts, SCHEME_BY_NAME["Q4_K_M"], device_named("RTX-4090"), KV, VLLM, Demand(concurrency=2))
    assert vllm_command("owner/name", gguf, demand, prefix_caching=True) is None
    assert llama_command(gguf) == "llama-server -m MODEL-Q4_K_M.gguf -c 8192 --parallel 2 -ngl 999"


def test_our_engine_accepts_its_settings(real_facts: Callable[..., ModelFacts]) -> None:
    demand = Demand(concurrency=16)
    found = fit(real_facts("qwen2.5-0.5b"), SIXTEEN, device_named("L4"), KV, QUANTKIT, demand)
    command = engine_command("owner/name", found, demand)
    assert command is not None
    program, verb, *arguments = command.split()
    assert (program, verb) == ("quantkit", "serve")
    given = serve_command.make_context("serve", arguments).params
    config = EngineConfig(**{name: given[name] for name in given.keys() & EngineConfig.__slots__})
    assert (config.max_model_len, config.max_num_seqs, config.kv_block_size) == (4096, 16, 32)
    assert config.kv_cache_bytes == int(found.kv_bytes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_p50": 0}, "context_p50=0 is less than 1"),
        ({"context_p50": 10, "context_p99": 5}, "p99=5 is less than its p50=10"),
        ({"concurrency": 0}, "concurrency=0 is less than 1"),
        ({"tp": 0}, "tp=0 is less than 1"),
    ],
)
def test_impossible_demands(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Demand(**settings)


def test_an_unknown_device_is_answered_with_all_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        device_named("H100-80G")
    assert "did you mean H100-80GB?" in str(caught.value)
    assert all(name in str(caught.value) for name in known_devices())


def test_the_data_file_is_consistent() -> None:
    """8-bit products are as fast or twice as fast as each other and never slower than 16 bits; sources are named."""
    document = json.loads(files("quantkit.capacity").joinpath("devices.json").read_text(encoding="utf-8"))
    assert {"H100-80GB", "H200", "L40S", "L4", "A10G", "A100-40GB", "RTX-4090", "B200", "MI300X"} <= set(
        document["devices"]
    )
    for name, entry in document["devices"].items():
        assert entry["source"].startswith(("NVIDIA", "AMD")), name
        for kind, tflops in entry["tflops"].items():
            assert kind in ("16-bit", "fp8", "int8"), name
            ratio = tflops / entry["tflops"]["16-bit"]
            assert ratio in (1.0, pytest.approx(2, rel=0.02), pytest.approx(4, rel=0.01)), (name, kind)
        balance = entry["tflops"]["16-bit"] * 1e12 / (entry["bandwidth_gb_s"] * 1e9)
        assert 50 < balance < 500, name  # operations a byte
