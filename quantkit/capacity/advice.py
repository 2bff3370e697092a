"""From a workload to ranked recipes and settings, each with its reason in one line.

Recipes are ranked by what the roofline predicts for the workload on the device: the seconds of a usual request, or the
requests a second of a full batch. Of those that are within `UNCERTAINTY` of the fastest the one that loses the least
quality comes first. If quality is critical, 16 and 8 bits come before 4. What does not run has no rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.capacity.devices import Device
from quantkit.capacity.fit import Demand, Fit, fit
from quantkit.capacity.kv_footprint import (
    KV_DTYPES,
    CacheLayout,
    KVDtype,
    block_waste,
    read_bytes,
    sequence_bytes,
    waste,
)
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.problem import sequences
from quantkit.capacity.recipe_text import write_recipe
from quantkit.capacity.roofline import SpeedModel
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME, SIXTEEN, WeightScheme, step_ratio
from quantkit.capacity.workload import Workload
from quantkit.errors import UsageError

LONG_CONTEXT_SHARE = 0.25  # of a step's bytes that the cache may be before its dtype matters
SHARED_SHARE = 0.2  # of a prompt that must be shared before caching it matters
UNCERTAINTY = 1.25  # a factor of speed: the largest by which predictions were off in docs/PLAN.md
LAPTOP_BYTES = 40e9  # a processor with less memory is called a laptop


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommended recipe.

    Attributes:
        scheme: name.
        reason: one line.
        request_seconds: of a usual request at the workload's concurrency, or at what of it fits.
        requests_per_s: of a full batch.
        fit: on the device.
        recipe: YAML that today's parser accepts; None if there is none.
        left_out: what a recipe cannot say yet.
    """

    scheme: str
    reason: str
    request_seconds: float
    requests_per_s: float
    fit: Fit
    recipe: str | None
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "fit"} | {
            "left_out": list(self.left_out),
            "fit": self.fit.to_dict(),
        }


def candidates(facts: ModelFacts, device: Device) -> list[WeightScheme]:
    """Schemes worth weighing on a device: one of each kind, with the largest group that divides every matrix."""
    names = ["16-bit", "W8A8", "FP8", "W8A16", _w4_name(facts)]
    if device.measured:
        names = ["16-bit", _w4_name(facts), "Q4_K_M"]
    schemes = [SCHEME_BY_NAME[name] for name in names]
    return [s for s in schemes if device.products(s.compute, weight_only=s.is_weight_only) is not None]


def _w4_name(facts: ModelFacts) -> str:
    columns = [weight.columns for weight in facts.weights if weight.role in ("linear", "expert")]
    size = next((size for size in (128, 64) if all(count % size == 0 for count in columns)), 32)
    return f"W4A16 g{size}"


def advise(
    facts: ModelFacts,
    device: Device,
    workload: Workload,
    kv_dtype: KVDtype,
    layout: CacheLayout,
    demand: Demand,
    model: str,
) -> list[Advice]:
    """Recipes for a workload that run on the device, the best first.

    Args:
        facts: the model.
        device: where it runs.
        workload: what will be asked of it.
        kv_dtype: of the cache.
        layout: of the cache.
        demand: the workload as numbers to fit.
        model: what a written recipe quantizes.

    Raises:
        UsageError: the device has no 16-bit products to compare with.
    """
    sixteen = SpeedModel(facts, SIXTEEN, device, kv_dtype, layout, demand.tp)
    runs_sixteen = fit(facts, SIXTEEN, device, kv_dtype, layout, demand).runs
    found = []
    for scheme in candidates(facts, device):
        weighed = fit(facts, scheme, device, kv_dtype, layout, demand)
        if not weighed.runs:
            continue
        speed = SpeedModel(facts, scheme, device, kv_dtype, layout, demand.tp)
        batch = sequences_at_once(workload, weighed)
        reason = _reason(scheme, speed, sixteen, workload, batch, weighed)
        if not runs_sixteen:
            reason += "; 16 bits do not run here"
        written = write_recipe(model, scheme, reason)
        found.append(
            Advice(
                scheme.name,
                reason,
                request_seconds(speed, workload, batch),
                request_rate(speed, workload, min(weighed.batch_p50, workload.concurrency or 256)),
                weighed,
                written.text,
                written.left_out,
            )
        )
    return rank(found, workload)


def sequences_at_once(workload: Workload, weighed: Fit) -> int:
    """Usual sequences that run at the same time: those that were asked for, if they fit."""
    full = weighed.batch_p50
    return min(full, workload.concurrency or (1 if workload.goal == "latency" else full))


def request_seconds(speed: SpeedModel, workload: Workload, batch: int) -> float:
    """Seconds of a usual request beside ``batch - 1`` others: its prompt and its answer."""
    prompt = workload.prompt_p50 - (workload.shared_prefix if workload.prefix_caching else 0)
    context = workload.prompt_p50 + workload.output_p50 // 2
    return speed.prefill(max(1, prompt)) + workload.output_p50 * speed.decode(batch, context).total


def request_rate(speed: SpeedModel, workload: Workload, batch: int) -> float:
    """Requests a second of a batch that is always full: its prompts and its answers share the device."""
    prompt = workload.prompt_p50 - (workload.shared_prefix if workload.prefix_caching else 0)
    context = workload.prompt_p50 + workload.output_p50 // 2
    answers = workload.output_p50 * speed.decode(batch, context).total
    return batch / (answers + batch * speed.prefill(max(1, prompt)))


def rank(found: Sequence[Advice], workload: Workload) -> list[Advice]:
    """The best first: what holds the concurrency, and of that again and again the best of those near the fastest.

    Near is less than `UNCERTAINTY` times as slow; the best of those loses the least quality, or is the fastest of such.
    """

    def group(advice: Advice) -> tuple[bool, bool]:
        return (not advice.fit.fits, workload.quality_critical and SCHEME_BY_NAME[advice.scheme].bits < 8)

    def cost(advice: Advice) -> float:
        return advice.request_seconds if workload.goal == "latency" else 1 / advice.requests_per_s

    left = sorted(found, key=lambda advice: (group(advice), cost(advice)))
    ranked = []
    while left:
        fastest = left[0]
        near = [a for a in left if group(a) == group(fastest) and cost(a) < UNCERTAINTY * cost(fastest)]
        best = max(near, key=lambda advice: _quality(SCHEME_BY_NAME[advice.scheme]))
        ranked.append(best)
        left.remove(best)
    return ranked


def _quality(scheme: WeightScheme) -> tuple[float, bool]:
    """More is better: bits of a weight, then activations that keep 16 bits."""
    return (scheme.bits, scheme.compute == "16-bit")


def _reason(
    scheme: WeightScheme, speed: SpeedModel, sixteen: SpeedModel, workload: Workload, batch: int, weighed: Fit
) -> str:
    """Why this scheme, in one line."""
    context = workload.prompt_p50 + workload.output_p50 // 2
    decode, plain = speed.decode(batch, context), sixteen.decode(batch, context)
    prompt = sixteen.prefill(workload.prompt_p50) / speed.prefill(workload.prompt_p50)
    gain = plain.total / decode.total
    note = f"; {weighed.problem}" if weighed.problem else ""
    if scheme is SIXTEEN:
        return f"the original: no loss of quality, decoding is {plain.bound}-bound at batch {batch}{note}"
    if scheme.gguf is not None:
        where = "a laptop" if speed.device.memory_bytes < LAPTOP_BYTES else "llama.cpp"
        return f"one file for {where}, {8 * _size(weighed) / speed.facts.parameters:.1f} bits a weight{note}"
    if scheme.compute == "fp8":
        finer = "; not written by quantkit: vLLM makes it at load (--quantization fp8)"
    else:
        finer = f", rounded in steps {step_ratio(4, 8):.0f} times smaller than those of 4 bits"
    if scheme.compute != "16-bit":
        return f"prompts (compute-bound) {prompt:.1f}x as fast, tokens {gain:.1f}x at batch {batch}{finer}{note}"
    if scheme.bits >= 8:
        return f"tokens {gain:.1f}x as fast at batch {batch}{finer}{note}"
    return f"decoding is {plain.bound}-bound at batch {batch}: tokens {gain:.1f}x as fast, prompts {prompt:.1f}x{note}"


def _size(weighed: Fit) -> float:
    return weighed.weight_bytes * weighed.tp


@dataclass(frozen=True, slots=True)
class Setting:
    """A recommended setting of the engine.

    Attributes:
        name: what to turn on.
        gain: how many times more of what the reason says.
        reason: one line.
    """

    name: str
    gain: float
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {"name": self.name, "gain": self.gain, "reason": self.reason}


def advise_settings(
    facts: ModelFacts, device: Device, workload: Workload, weight_bytes: float, layout: CacheLayout, batch: int
) -> list[Setting]:
    """Settings that pay for a workload, the largest gain first.

    Args:
        facts: the model.
        device: where it runs.
        workload: what will be asked of it.
        weight_bytes: of the recommended scheme.
        layout: of the cache.
        batch: sequences that run at once.
    """
    found = []
    reserved, usual = workload.context_p99, workload.context_p50
    paged = (1 - block_waste(usual, layout.block_size)) / (1 - waste(usual, reserved))
    if paged > 1.05:
        found.append(
            Setting(
                "paged KV cache",
                paged,
                f"a sequence of {usual} tokens would leave {waste(usual, reserved):.1%} of room for {reserved} unused; "
                f"in blocks of {layout.block_size} it leaves {block_waste(usual, layout.block_size):.1%}",
            )
        )
    sixteen = KV_DTYPES["16-bit"]
    cache = batch * read_bytes(facts, usual, sixteen, layout)
    share = cache / (cache + weight_bytes) if cache else 0.0
    if share >= LONG_CONTEXT_SHARE:
        dtype = KV_DTYPES["fp8" if "fp8" in device.flops else "int8"]
        gain = sequence_bytes(facts, usual, sixteen, layout) / sequence_bytes(facts, usual, dtype, layout)
        found.append(
            Setting(
                f"{dtype.name} KV cache",
                gain,
                f"the cache is {share:.0%} of what a step of {sequences(batch)} of {usual} tokens reads: "
                f"{dtype.name} holds {gain:.2f}x as many",
            )
        )
    if workload.shared_prefix / workload.prompt_p50 >= SHARED_SHARE:
        gain = workload.prompt_p50 / max(1, workload.prompt_p50 - workload.shared_prefix)
        state = "is on" if workload.prefix_caching else "is off"
        found.append(
            Setting(
                "prefix caching",
                gain,
                f"{workload.shared_prefix} of {workload.prompt_p50} prompt tokens are shared; it {state}",
            )
        )
    return sorted(found, key=lambda setting: -setting.gain)


def writable(advice: Sequence[Advice]) -> Advice:
    """The best recommendation that has a recipe.

    Args:
        advice: the best first.

    Raises:
        UsageError: there is none.
    """
    for entry in advice:
        if entry.recipe is not None:
            return entry
    raise UsageError(
        "no recommended scheme has a recipe: "
        + ("; ".join(f"{entry.scheme}: {(entry.left_out or (entry.reason,))[0]}" for entry in advice) or "none runs"),
        fix="Choose a larger device, or shorter contexts",
    )
