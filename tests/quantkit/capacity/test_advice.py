"""Which recipe for which workload, and that what is written parses with the recipe parser of today."""

from collections.abc import Callable

import pytest

from quantkit.capacity.advice import Advice, advise, advise_settings, writable
from quantkit.capacity.devices import Device, MeasuredProducts, device_named
from quantkit.capacity.fit import Demand
from quantkit.capacity.kv_footprint import KV_DTYPES, QUANTKIT, VLLM
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.recipe_text import write_recipe
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME, model_bytes
from quantkit.capacity.workload import Workload
from quantkit.errors import UsageError
from quantkit.recipe import parse_recipe

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
    assert "17x finer than 4 bits" in next(entry.reason for entry in found if entry.scheme == "W8A8")


def test_what_does_not_fit_comes_last_with_the_reason(real_facts: Callable[..., ModelFacts]) -> None:
    found = ranked(real_facts("llama-3-70b"), device_named("H100-80GB"))
    assert found[0].scheme == "W4A16 g128"
    assert found[-1].request_seconds is None
    assert "weights, activations and overhead need" in found[-1].reason


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
    hopeless = ranked(real_facts("llama-3-70b"), device_named("T4"))
    with pytest.raises(UsageError, match="no recommended scheme has a recipe"):
        writable(hopeless)


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
