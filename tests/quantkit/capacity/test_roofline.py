"""The roofline against arithmetic done by hand, and where schemes cross."""

from collections.abc import Callable

import pytest

from quantkit.capacity.devices import Device, MeasuredProducts
from quantkit.capacity.kv_footprint import KV_DTYPES, QUANTKIT, VLLM
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.roofline import SpeedModel, find_crossovers
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME
from quantkit.errors import UsageError

KV = KV_DTYPES["16-bit"]
# 1 TB/s and 100 TFLOP/s after the shares that engines reach
DEVICE = Device("test", 1e12, 1.25e12, {"16-bit": 100e12 / 0.7, "int8": 200e12 / 0.7}, "made up", {}, 0.0, 0.0)


def speed(facts: ModelFacts, scheme: str, device: Device = DEVICE, tp: int = 1) -> SpeedModel:
    return SpeedModel(facts, SCHEME_BY_NAME[scheme], device, KV, VLLM, tp)


@pytest.fixture
def facts(real_facts: Callable[..., ModelFacts]) -> ModelFacts:
    return real_facts("llama-3-8b")


def test_one_sequence_reads_every_matrix_once(facts: ModelFacts) -> None:
    matrices = 2 * (facts.of_role("linear") + facts.of_role("lm_head"))
    cache = 1000 * 2 * 2 * 32 * 8 * 128
    step = speed(facts, "16-bit").decode(1, 1000)
    assert step.total == pytest.approx((matrices + cache) / 1e12)
    assert step.bound == "memory"


def test_a_long_prompt_is_bound_by_multiplying(facts: ModelFacts) -> None:
    seconds = speed(facts, "16-bit").prefill(2048)
    products = 2 * facts.of_role("linear") * 2048
    attention = 4 * 32 * 32 * 128 * 2048 * 2049 / 2
    head = 2 * facts.of_role("lm_head") / 1e12  # one row: its bytes are read
    assert seconds == pytest.approx((products + attention) / 100e12 + head, rel=1e-6)


def test_16_bits_cross_where_the_device_says(facts: ModelFacts) -> None:
    """2 bytes a weight at 1 TB/s take as long as 2 operations a weight and token at 100 TFLOP/s for 100 tokens."""
    four, eight = speed(facts, "W4A16 g128"), speed(facts, "W8A8")
    found = find_crossovers(speed(facts, "16-bit"), four, eight, 1)
    assert found.sixteen_compute_bound == 100
    # codes are widened at 85 % of the rate: 85 tokens take as long as reading 16 bits
    assert found.weight_only_stops_helping in (84, 85)
    # W8A8 reads 1 byte a weight, which W4A16 multiplies in the time of 42.5 tokens
    assert found.int8_beats_weight_only in (43, 44)
    assert found.weight_only_gain_at_one == pytest.approx(
        (2 * (facts.of_role("linear") + facts.of_role("lm_head")))
        / (0.515625 * facts.of_role("linear") + 2 * facts.of_role("lm_head")),
        rel=1e-3,
    )


def test_crossovers_are_none_where_there_is_none(facts: ModelFacts) -> None:
    found = find_crossovers(speed(facts, "16-bit"), None, None, 1)
    assert (found.weight_only_stops_helping, found.int8_beats_weight_only) == (None, None)


def test_the_cache_outweighs_the_weights_for_many_long_sequences(facts: ModelFacts) -> None:
    gains = []
    for context in (128, 8192):
        sixteen, four = (speed(facts, name).decode(32, context).total for name in ("16-bit", "W4A16 g128"))
        gains.append(sixteen / four)
    assert gains[0] > 2.2
    assert gains[1] < 1.25


def test_experts_are_read_as_far_as_they_are_chosen(real_facts: Callable[..., ModelFacts]) -> None:
    mixture = real_facts("mixtral-8x7b")
    model = speed(mixture, "16-bit")
    one, many = model.decode(1, 1), model.decode(64, 1)
    experts, rest = 2 * mixture.of_role("expert"), 2 * (mixture.of_role("linear") + mixture.of_role("lm_head"))
    assert one.memory == pytest.approx((experts / 4 + rest) / 1e12, rel=1e-3)
    assert many.memory == pytest.approx((experts + rest) / 1e12, rel=1e-3)
    assert many.compute == pytest.approx(64 * 2 * (experts / 2 / 4 + rest / 2) / 100e12, rel=1e-3)


def test_devices_share_the_work(facts: ModelFacts) -> None:
    one, two = speed(facts, "16-bit").decode(8, 1024), speed(facts, "16-bit", tp=2).decode(8, 1024)
    assert two.total == pytest.approx(one.total / 2)


def test_a_product_that_the_device_lacks_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match="test has no fp8 products"):
        speed(facts, "FP8")


def test_measured_products_are_interpolated_and_extended() -> None:
    measured = MeasuredProducts(((1, 1e-9), (4, 2e-9), (64, 32e-9)), bytes_per_s=4e9)
    assert measured.time(2.0, 1.0, 1).total == 1e-9
    assert measured.time(2.0, 1.0, 1).read == 0.5e-9
    assert measured.time(2.0, 1.0, 2).total == pytest.approx(2**0.5 * 1e-9)
    assert measured.time(2.0, 1.0, 16).total == pytest.approx(8e-9)
    assert measured.time(2.0, 1.0, 128).total == pytest.approx(64e-9)
    assert measured.time(2.0, 1000.0, 4).total == pytest.approx(2e-6)


def test_a_measured_device_has_what_was_measured(facts: ModelFacts) -> None:
    products = {
        "16-bit": MeasuredProducts(((1, 2e-10), (64, 64e-10)), 10e9),
        "weight-only": MeasuredProducts(((1, 1e-10), (64, 80e-10)), 10e9),
    }
    device = Device("cpu", 16e9, 10e9, {"16-bit": 20e9}, "measured", products, 1e-3, 1e-3, 1e-4)
    sixteen = SpeedModel(facts, SCHEME_BY_NAME["16-bit"], device, KV, QUANTKIT)
    four = SpeedModel(facts, SCHEME_BY_NAME["W4A16 g128"], device, KV, QUANTKIT)
    step = sixteen.decode(1, 1)
    assert step.overhead == pytest.approx(1e-3 + 32 * 1.1e-3)
    assert step.total == pytest.approx(
        2e-10 * (facts.of_role("linear") + facts.of_role("lm_head")) + step.overhead, rel=1e-3
    )
    stops = find_crossovers(sixteen, four, None, 1).weight_only_stops_helping
    assert stops is not None
    assert 16 < stops < 64
    with pytest.raises(UsageError, match="no int8 products"):
        SpeedModel(facts, SCHEME_BY_NAME["W8A8"], device, KV, QUANTKIT)
