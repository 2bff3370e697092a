"""Which recipe for which workload, and that what is written parses with the recipe parser of today."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from quantkit.capacity.advice import UNCERTAINTY, Advice, advise, advise_settings, rank, writable
from quantkit.capacity.devices import Device, MeasuredProducts, device_named
from quantkit.capacity.fit import Demand
from quantkit.capacity.kv_footprint import KV_DTYPES, QUANTKIT, VLLM
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.recipe_text import write_recipe
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME, model_bytes
from quantkit.capacity.workload import Workload
from quantkit.errors import UsageError
from quantkit.recipe import parse_recipe
from quantkit.recipe.calibration import Calibration

KV = KV_DTYPES["16-bit"]
CHAT = {"prompt_p50": 1000, "prompt_p99": 3000, "output_p50": 500, "output_p99": 1000}


def ranked(facts: ModelFacts, device: Device, **settings: object) -> list[Advice]:
    workload = Workload(**(CHAT | settings))  # type: ignore[arg-type]
    demand = Demand(workload.context_p50, workload.context_p99, workload.concurrency)
    layout = QUANTKIT if device.measured else VLLM
    return advise(facts, device, workload, KV, layout, demand, "owner/name")


def test_one_user_is_served_fastest_by_4_bits(real_facts: Callable[..., ModelFacts]) -> None:
    found = ranked(real_facts("llama-3-8b"), device_named("L4"))
    assert found[0].scheme == "W4A16 g128"
    assert "memory-bound at batch 1" in found[0].reason
    assert found[-1].scheme == "16-bit"


def test_long_prompts_and_short_answers_are_served_best_by_8_bit_products(
    real_facts: Callable[..., ModelFacts],
) -> None:
    found = ranked(
        real_facts("llama-3-8b"), device_named("A100-80GB"), prompt_p50=6000, prompt_p99=7000, output_p50=10,
        output_p99=10, goal="throughput",
    )  # fmt: skip
    assert found[0].scheme == "W8A8"
    assert "compute-bound" in found[0].reason


def test_quality_comes_before_speed_if_it_is_critical(real_facts: Callable[..., ModelFacts]) -> None:
    found = ranked(real_facts("llama-3-8b"), device_named("L4"), quality_critical=True)
    assert found[0].scheme in ("W8A8", "W8A16", "FP8")
    reason = {entry.scheme: entry.reason for entry in found}
    assert "rounded in steps 17 times smaller than those of 4 bits" in reason["W8A8"]
    assert "not written by quantkit: vLLM makes it at load (--quantization fp8)" in reason["FP8"]


def test_a_gain_within_the_uncertainty_does_not_outrank_quality(real_facts: Callable[..., ModelFacts]) -> None:
    """A small model on a large device waits for the engine, so 4 bits are hardly faster than 16."""
    found = ranked(real_facts("qwen2.5-0.5b"), device_named("B200"))
    seconds = {entry.scheme: entry.request_seconds for entry in found}
    assert 1 < seconds["16-bit"] / seconds["W4A16 g128"] < UNCERTAINTY
    assert [entry.scheme for entry in found] == ["16-bit", "W8A16", "W8A8", "FP8", "W4A16 g128"]


def test_ranks_between_gains_that_are_certain_and_those_that_are_not(real_facts: Callable[..., ModelFacts]) -> None:
    """Of 1.0, 1.2, 1.4 and 1.6 seconds the second is near the first; the others are near neither or each other."""
    entry = ranked(real_facts("llama-3-8b"), device_named("L4"))[0]
    names = {"W4A16 g128": 1.0, "W8A8": 1.2, "W8A16": 1.4, "16-bit": 1.6}
    entries = [replace(entry, scheme=name, request_seconds=seconds) for name, seconds in names.items()]
    order = [found.scheme for found in rank(entries, Workload())]
    assert order == ["W8A8", "W4A16 g128", "16-bit", "W8A16"]


def test_what_does_not_run_has_no_rank(real_facts: Callable[..., ModelFacts]) -> None:
    found = ranked(real_facts("llama-3-70b"), device_named("H100-80GB"))
    assert found[0].scheme == "W4A16 g128"
    assert "16-bit" not in [entry.scheme for entry in found]
    assert all(entry.reason.endswith("16 bits do not run here") for entry in found)
    assert ranked(real_facts("llama-3-8b"), device_named("H200"), prompt_p99=8192) == []


def test_a_processor_is_offered_a_gguf(real_facts: Callable[..., ModelFacts]) -> None:
    points = {"16-bit": ((1, 4e-10), (64, 40e-10)), "weight-only": ((1, 1e-10), (64, 50e-10))}
    products = {kind: MeasuredProducts(rows, 10e9) for kind, rows in points.items()}
    laptop = Device("cpu", 16e9, 10e9, {"16-bit": 50e9}, "measured", products, 1e-3, 1e-3, 1e-4)
    found = ranked(real_facts("qwen2.5-0.5b"), laptop)
    gguf = next(entry for entry in found if entry.scheme == "Q4_K_M")
    assert gguf.reason.startswith("one file for a laptop, ")


def test_settings_follow_the_workload(real_facts: Callable[..., ModelFacts]) -> None:
    facts, device = real_facts("llama-3-8b"), device_named("H100-80GB")
    weights = model_bytes(facts, SCHEME_BY_NAME["W4A16 g128"])

    def names(batch: int, **settings: object) -> list[str]:
        workload = Workload(**(CHAT | settings))  # type: ignore[arg-type]
        return [found.name for found in advise_settings(facts, device, workload, weights, VLLM, batch)]

    assert names(1) == ["paged KV cache"]
    assert "fp8 KV cache" in names(64)
    reasons = [found.reason for found in advise_settings(facts, device, Workload(**CHAT), weights / 50, VLLM, 1)]
    assert any("a step of 1 sequence of 1500 tokens" in reason for reason in reasons)
    assert "prefix caching" in names(1, shared_prefix=800)
    even = {"prompt_p99": 1000, "output_p99": 500}
    assert names(1, **even) == []
    ampere = advise_settings(facts, device_named("A100-80GB"), Workload(**CHAT), weights, VLLM, 64)
    assert "int8 KV cache" in [found.name for found in ampere]


@pytest.mark.parametrize("name", ["W4A16 g128", "W4A16 g32", "W8A16", "W8A8", "FP8", "Q4_K_M", "W4A16_ASYM g128"])
def test_a_written_recipe_parses_or_says_why_there_is_none(name: str) -> None:
    written = write_recipe('owner/"name"', SCHEME_BY_NAME[name], "a reason\nin two lines")
    if written.text is None:
        assert written.left_out
        return
    recipe = parse_recipe(written.text)
    assert recipe.model == 'owner/"name"'
    assert recipe.gates.max_drop_pp == {"extract": 5}
    if recipe.calibration is not None:  # the default: half text, half chat
        assert recipe.calibration == Calibration(num_tokens=32768)
    assert written.text.splitlines()[0] == "# Written by `quantkit plan`: a reason in two lines"


def test_the_scheme_of_a_written_recipe_is_the_recommended_one() -> None:
    text = write_recipe("m", SCHEME_BY_NAME["W4A16 g64"], "r").text
    assert text is not None
    quantization = parse_recipe(text).require_quantization()
    assert (quantization.group_size, quantization.algorithm.name) == (64, "gptq")
    assert quantization.scheme(64).num_bits == 4


def test_16_bits_need_no_recipe(real_facts: Callable[..., ModelFacts]) -> None:
    assert write_recipe("m", SCHEME_BY_NAME["16-bit"], "r").text is None
    best = writable(ranked(real_facts("llama-3-8b"), device_named("B200"), quality_critical=True))
    assert best.recipe is not None
    for none in ([entry for entry in ranked(real_facts("llama-3-8b"), device_named("B200")) if not entry.recipe], []):
        with pytest.raises(UsageError, match="no recommended scheme has a recipe"):
            writable(none)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_p50": 0}, "prompt's p50=0 is less than 1"),
        ({"output_p50": 9, "output_p99": 3}, "output's p99=3 is less than its p50=9"),
        ({"shared_prefix": 5000}, "shared_prefix=5000 is not between 0"),
    ],
)
def test_impossible_workloads(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workload(**(CHAT | settings))
