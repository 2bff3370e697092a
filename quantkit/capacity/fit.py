"""What fits on a device: weights, activations and how many sequences of which length; with the settings that follow."""

import math
from dataclasses import dataclass
from typing import Any

from quantkit.capacity.devices import Device
from quantkit.capacity.kv_footprint import CacheLayout, KVDtype, sequence_bytes
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.weight_schemes import SchemeDoesNotFitError, WeightScheme, weight_bytes
from quantkit.errors import UsageError

# Assumptions, stated wherever a fit is shown.
OVERHEAD_BYTES = 1.5e9  # CUDA context, libraries' workspaces, CUDA graphs
DEFAULT_UTILIZATION, MAX_UTILIZATION = 0.90, 0.95
MAX_NUM_SEQS = 1024
ACTIVATION_COPIES = 4  # tensors of the hidden size alive at once in a step

ASSUMPTIONS = (
    f"{OVERHEAD_BYTES / 1e9:g} GB a device for the driver's context, workspaces and CUDA graphs",
    f"activations: {ACTIVATION_COPIES} tensors of the hidden size and 2 of the MLP's for every token of a step, "
    "and 32-bit logits for every sequence",
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
        kv_bytes: what is left for the cache at ``utilization``; 0 if nothing is.
        batch_p50: usual sequences that fit at once.
        batch_p99: long ones.
        longest: tokens of the longest sequence that fits alone; at most what the model was made for.
        utilization: gpu_memory_utilization to set.
        max_model_len: to set; None if the demanded p99 does not fit.
        max_num_seqs: to set.
        problem: why it does not fit; None if it does.
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
    problem: str | None = None

    @property
    def fits(self) -> bool:
        """Whether everything that was demanded fits."""
        return self.problem is None

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        names = [name for name in self.__slots__ if name != "problem"]
        return {name: getattr(self, name) for name in names} | {"fits": self.fits, "problem": self.problem}


def split_weight_bytes(facts: ModelFacts, scheme: WeightScheme, tp: int) -> float:
    """Bytes of the weights on each of ``tp`` devices.

    Raises:
        SchemeDoesNotFitError: the scheme cannot hold the model.
    """
    split = sum(weight_bytes(w, scheme, facts) for w in facts.weights if w.role != "other")
    whole = sum(weight_bytes(w, scheme, facts) for w in facts.weights if w.role == "other")
    return split / tp + whole


def activation_bytes(facts: ModelFacts, demand: Demand, num_seqs: int) -> float:
    """Bytes that a step needs beside weights and cache."""
    width = ACTIVATION_COPIES * facts.hidden_size + 2 * facts.intermediate_size / demand.tp
    return 2 * demand.max_num_batched_tokens * width + 4 * num_seqs * facts.vocab_size


def tp_problem(facts: ModelFacts, scheme: WeightScheme, tp: int) -> str | None:
    """Why a model cannot be split over ``tp`` devices; None if it can."""
    if facts.num_heads % tp:
        return f"{facts.num_heads} attention heads cannot be split over {tp} devices"
    if scheme.group_size > 0:
        for weight in facts.weights:
            name = weight.name.rpartition(".")[2]
            if name in ("o_proj", "down_proj", "attn_output", "ffn_down") and weight.columns % (scheme.group_size * tp):
                return (
                    f"groups of {scheme.group_size} do not divide {weight.columns} columns / {tp} of {weight.name}, "
                    f"which tensor parallelism splits by columns"
                )
    return None


def fit(
    facts: ModelFacts, scheme: WeightScheme, device: Device, kv_dtype: KVDtype, layout: CacheLayout, demand: Demand
) -> Fit:
    """Weigh one combination; what does not fit comes back with its reason."""
    base = (device.name, scheme.name, kv_dtype.name, demand.tp, device.memory_bytes)
    problem = tp_problem(facts, scheme, demand.tp)
    if problem is None and scheme.compute not in device.flops and not device.measured:
        problem = f"{device.name} has no {scheme.compute} products"
    if problem is not None:
        return Fit(*base, problem=problem)
    try:
        weights = split_weight_bytes(facts, scheme, demand.tp)
    except SchemeDoesNotFitError as error:
        return Fit(*base, problem=str(error))
    num_seqs = demand.concurrency or 256
    activations = activation_bytes(facts, demand, num_seqs)
    fixed = weights + activations + OVERHEAD_BYTES
    usual, long = (
        sequence_bytes(facts, tokens, kv_dtype, layout, demand.tp)
        for tokens in (demand.context_p50, demand.context_p99)
    )
    wanted = fixed + (demand.concurrency or 1) * long
    utilization = min(MAX_UTILIZATION, max(DEFAULT_UTILIZATION, math.ceil(100 * wanted / device.memory_bytes) / 100))
    left = max(0.0, device.memory_bytes * utilization - fixed)
    batch_p50, batch_p99 = int(left // usual), int(left // long)
    longest = longest_sequence(facts, left, kv_dtype, layout, demand.tp)
    return Fit(
        *base,
        weight_bytes=weights,
        activation_bytes=activations,
        overhead_bytes=OVERHEAD_BYTES,
        kv_bytes=left,
        batch_p50=batch_p50,
        batch_p99=batch_p99,
        longest=longest,
        utilization=utilization,
        max_model_len=_max_model_len(facts, demand, layout, longest),
        max_num_seqs=max(1, min(batch_p50, demand.concurrency or MAX_NUM_SEQS, MAX_NUM_SEQS)),
        problem=_problem(facts, device, demand, fixed, batch_p50, batch_p99),
    )


def longest_sequence(facts: ModelFacts, nbytes: float, kv_dtype: KVDtype, layout: CacheLayout, tp: int = 1) -> int:
    """Tokens of the longest sequence that ``nbytes`` hold, at most what the model was made for."""
    most = facts.max_model_len or 1 << 24
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_bytes(facts, middle, kv_dtype, layout, tp) <= nbytes:
            low = middle
        else:
            high = middle - 1
    return low


def _max_model_len(facts: ModelFacts, demand: Demand, layout: CacheLayout, longest: int) -> int | None:
    """The demanded p99 in whole blocks."""
    wanted = math.ceil(demand.context_p99 / layout.block_size) * layout.block_size
    wanted = min(wanted, facts.max_model_len or wanted)
    return wanted if demand.context_p99 <= wanted <= longest else None


def _problem(
    facts: ModelFacts, device: Device, demand: Demand, fixed: float, batch_p50: int, batch_p99: int
) -> str | None:
    if facts.max_model_len is not None and demand.context_p99 > facts.max_model_len:
        return f"a context of {demand.context_p99} tokens is more than the model's {facts.max_model_len}"
    if fixed > device.memory_bytes * MAX_UTILIZATION:
        return f"weights, activations and overhead need {fixed / 1e9:.1f} GB of {device.memory_bytes / 1e9:g} GB"
    if batch_p99 < 1:
        return f"no sequence of {demand.context_p99} tokens fits beside the weights"
    if demand.concurrency is not None and batch_p50 < demand.concurrency:
        return f"{batch_p50} of {demand.concurrency} sequences of {demand.context_p50} tokens fit at once"
    return None
