"""What fits on a device: weights, activations and how many sequences of which length; with the settings that follow."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.capacity.devices import Device
from quantkit.capacity.kv_footprint import CacheLayout, KVDtype, sequence_bytes
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.problem import Problem, sequences, tp_problem
from quantkit.capacity.weight_schemes import SchemeDoesNotFitError, WeightScheme, weight_bytes
from quantkit.capacity.workload import MAX_TOKENS
from quantkit.errors import UsageError

# Assumptions, stated wherever a fit is shown.
OVERHEAD_BYTES = 1.5e9  # CUDA context, libraries' workspaces, CUDA graphs
DEFAULT_UTILIZATION, MAX_UTILIZATION = 0.90, 0.95
MAX_NUM_SEQS = 1024  # that are served at once if nobody says how many
ACTIVATION_COPIES = 4  # tensors of the hidden size alive at once in a step

ASSUMPTIONS = (
    f"{OVERHEAD_BYTES / 1e9:g} GB a device for the driver's context, workspaces and CUDA graphs",
    f"activations: {ACTIVATION_COPIES} tensors of the hidden size and 2 of the MLP's for every token of a step, "
    "and 32-bit logits for every sequence that runs at once",
    "matrices, heads and vocabulary are split evenly over tensor-parallel devices, norms are on all of them",
    "a data sheet's GB are decimal; drivers report a little more",
)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be served.

    Attributes:
        context_p50: tokens of a usual sequence, prompt and continuation together.
        context_p99: of a long one.
        concurrency: sequences at the same time.
        tp: tensor-parallel devices.
        max_num_batched_tokens: tokens of a step.

    Raises:
        UsageError: a number out of range.
    """

    context_p50: int = 2048
    context_p99: int = 4096
    concurrency: int | None = None
    tp: int = 1
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("context_p50", "context_p99", "tp", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} is less than 1")
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"concurrency={self.concurrency} is less than 1")
        if self.context_p99 < self.context_p50:
            raise UsageError(
                f"the context's p99={self.context_p99} is less than its p50={self.context_p50}",
                fix="Give --context P50,P99",
            )


@dataclass(frozen=True, slots=True)
class Fit:
    """One model in one scheme on one kind of device.

    Attributes:
        device: name.
        scheme: name.
        kv_dtype: name.
        tp: devices.
        memory_bytes: of a device; like all bytes below those of one device.
        weight_bytes: of its part of the weights.
        activation_bytes: of a step.
        overhead_bytes: of everything else.
        kv_bytes: what is left for the cache at ``utilization`` beside ``max_num_seqs`` sequences' logits; 0 if nothing.
        batch_p50: usual sequences that fit at once, each with its cache and its logits.
        batch_p99: long ones.
        longest: tokens of the longest sequence that fits alone; at most what the model was made for.
        utilization: gpu_memory_utilization to set.
        max_model_len: to set; None if the demanded p99 does not fit.
        max_num_seqs: to set.
        problem: why not everything that was demanded fits; None if it does.
    """

    device: str
    scheme: str
    kv_dtype: str
    tp: int
    memory_bytes: float
    weight_bytes: float = 0
    activation_bytes: float = 0
    overhead_bytes: float = 0
    kv_bytes: float = 0
    batch_p50: int = 0
    batch_p99: int = 0
    longest: int = 0
    utilization: float = DEFAULT_UTILIZATION
    max_model_len: int | None = None
    max_num_seqs: int = 0
    problem: Problem | None = None

    @property
    def fits(self) -> bool:
        """Whether everything that was demanded fits."""
        return self.problem is None

    @property
    def runs(self) -> bool:
        """Whether sequences of the demanded lengths run at all, if only fewer at once than was demanded."""
        return self.max_model_len is not None

    @property
    def answer(self) -> str:
        """``yes``, ``in part`` or ``no``."""
        return "yes" if self.fits else "in part" if self.runs else "no"

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        names = [name for name in self.__slots__ if name != "problem"]
        return {name: getattr(self, name) for name in names} | {
            "fits": self.fits,
            "runs": self.runs,
            "problem": self.problem.message if self.problem else None,
            "fix": self.problem.fix if self.problem else None,
        }


def split_weight_bytes(facts: ModelFacts, scheme: WeightScheme, tp: int) -> float:
    """Bytes of the weights on each of ``tp`` devices.

    Raises:
        SchemeDoesNotFitError: the scheme cannot hold the model.
    """
    split = sum(weight_bytes(w, scheme, facts) for w in facts.weights if w.role != "other")
    whole = sum(weight_bytes(w, scheme, facts) for w in facts.weights if w.role == "other")
    return split / tp + whole


def activation_bytes(facts: ModelFacts, demand: Demand, num_seqs: int) -> float:
    """Bytes that a step of up to ``num_seqs`` sequences needs beside weights and cache."""
    width = ACTIVATION_COPIES * facts.hidden_size + 2 * facts.intermediate_size / demand.tp
    return 2 * max(demand.max_num_batched_tokens, num_seqs) * width + 4 * num_seqs * facts.vocab_size


def fit(
    facts: ModelFacts, scheme: WeightScheme, device: Device, kv_dtype: KVDtype, layout: CacheLayout, demand: Demand
) -> Fit:
    """Weigh one combination; what does not fit comes back with its reason.

    A sequence needs its cache and, in every step, its logits. So a number of sequences fits if the cache and the
    activations of so many do; what is demanded changes only how much memory may be used, and the settings.
    """
    base = (device.name, scheme.name, kv_dtype.name, demand.tp, device.memory_bytes)
    problem = _impossible(facts, scheme, device, demand)
    if problem is not None:
        return Fit(*base, problem=problem)
    try:
        weights = split_weight_bytes(facts, scheme, demand.tp)
    except SchemeDoesNotFitError as error:
        return Fit(*base, problem=Problem("scheme-does-not-fit", str(error), "choose another scheme"))
    usual, long = (
        sequence_bytes(facts, tokens, kv_dtype, layout, demand.tp)
        for tokens in (demand.context_p50, demand.context_p99)
    )

    def fixed(num_seqs: int) -> float:
        return weights + OVERHEAD_BYTES + activation_bytes(facts, demand, num_seqs)

    wanted = fixed(demand.concurrency or 1) + (demand.concurrency or 1) * long
    utilization = min(MAX_UTILIZATION, max(DEFAULT_UTILIZATION, math.ceil(100 * wanted / device.memory_bytes) / 100))
    memory = device.memory_bytes * utilization

    def at_once(sequence: float) -> int:
        return largest(int(memory // sequence), lambda count: fixed(count) + count * sequence <= memory)

    batch_p50, batch_p99 = at_once(usual), at_once(long)
    served = min(batch_p50, demand.concurrency or MAX_NUM_SEQS)
    num_seqs = max(1, largest(served, lambda count: fixed(count) + max(count * usual, long) <= memory))
    longest = longest_sequence(facts, memory - fixed(1), kv_dtype, layout, demand.tp)
    return Fit(
        *base,
        weight_bytes=weights,
        activation_bytes=activation_bytes(facts, demand, num_seqs),
        overhead_bytes=OVERHEAD_BYTES,
        kv_bytes=max(0.0, memory - fixed(num_seqs)),
        batch_p50=batch_p50,
        batch_p99=batch_p99,
        longest=longest,
        utilization=utilization,
        max_model_len=_max_model_len(facts, demand, layout, longest),
        max_num_seqs=num_seqs,
        problem=_shortage(scheme, device, demand, fixed(1), batch_p50, batch_p99),
    )


def largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` for which something holds; 0 if there is none.

    Args:
        most: where the search ends.
        holds: true up to some number, and false above it.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def longest_sequence(facts: ModelFacts, nbytes: float, kv_dtype: KVDtype, layout: CacheLayout, tp: int = 1) -> int:
    """Tokens of the longest sequence that ``nbytes`` hold, at most what the model was made for."""
    most = facts.max_model_len or 2 * MAX_TOKENS
    return largest(most, lambda tokens: sequence_bytes(facts, tokens, kv_dtype, layout, tp) <= nbytes)


def _max_model_len(facts: ModelFacts, demand: Demand, layout: CacheLayout, longest: int) -> int | None:
    """The demanded p99 in whole blocks."""
    wanted = math.ceil(demand.context_p99 / layout.block_size) * layout.block_size
    wanted = min(wanted, facts.max_model_len or wanted)
    return wanted if demand.context_p99 <= wanted <= longest else None


def _impossible(facts: ModelFacts, scheme: WeightScheme, device: Device, demand: Demand) -> Problem | None:
    """What rules a combination out before anything is weighed."""
    if facts.max_model_len is not None and demand.context_p99 > facts.max_model_len:
        return Problem(
            "context-beyond-the-model",
            f"a context of {demand.context_p99} tokens is more than the model's {facts.max_model_len}",
            f"demand at most {facts.max_model_len} tokens (--context, or --prompt and --output together)",
        )
    if scheme.compute not in device.flops and not device.measured:
        return Problem(
            "no-such-products", f"{device.name} has no {scheme.compute} products", "choose another scheme or device"
        )
    return tp_problem(facts, scheme, demand.tp)


def _shortage(
    scheme: WeightScheme, device: Device, demand: Demand, fixed: float, batch_p50: int, batch_p99: int
) -> Problem | None:
    """What the memory is too small for."""
    if fixed > device.memory_bytes * MAX_UTILIZATION:
        return Problem(
            "full-precision-does-not-fit" if scheme.name == "16-bit" else "weights-do-not-fit",
            f"weights, activations and overhead need {fixed / 1e9:.1f} GB of {device.memory_bytes / 1e9:g} GB",
            "quantize to fewer bits, or use more devices (--tp)",
        )
    if batch_p99 < 1:
        return Problem(
            "kv-does-not-fit-at-p99",
            f"no sequence of {demand.context_p99} tokens fits beside the weights",
            "shorten max_model_len, use an 8-bit KV cache, more devices, or fewer bits a weight",
        )
    if demand.concurrency is not None and batch_p50 < demand.concurrency:
        return Problem(
            "demand-does-not-fit",
            f"{batch_p50} of {sequences(demand.concurrency)} of {demand.context_p50} tokens fit at once",
            "lower --concurrency or --context",
        )
    return None
