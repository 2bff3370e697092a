"""How long a step takes: reading the weights or multiplying them, whichever is longer, and reading the cache.

    step = max(bytes of the matrices / bandwidth, 2 * parameters * tokens / FLOP/s)   for each kind of matrix
         + bytes of keys and values / bandwidth + attention's products / FLOP/s + the engine's own time

Source: Williams, Waterman, Patterson, Roofline: an insightful visual performance model (2009). Shares of the data
sheet's figures that engines reach, and their own time, are assumptions of `quantkit.capacity.devices`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.capacity.devices import Device, ProductTime
from quantkit.capacity.kv_footprint import CacheLayout, KVDtype, read_bytes
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.weight_schemes import WeightScheme, weight_bytes
from quantkit.errors import UsageError

MAX_BATCH = 4096  # where the search for a crossover ends


@dataclass(frozen=True, slots=True)
class Step:
    """What a step computes.

    Attributes:
        tokens: over all sequences.
        sequences: that take part.
        sampled: of them that get a token.
        contexts: (tokens in the cache after the step, how many sequences have so many).
        pairs: (query, key) pairs of attention.
    """

    tokens: int
    sequences: int
    sampled: int
    contexts: tuple[tuple[int, int], ...]
    pairs: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the seconds of a step go.

    Attributes:
        memory: reading weights and cache.
        compute: multiplying.
        overhead: the engine's own time.
        total: of the step; less than the sum, because reading and multiplying overlap.
    """

    memory: float
    compute: float
    overhead: float
    total: float

    @property
    def bound(self) -> str:
        """``memory``, ``compute`` or ``overhead``: what takes most of the time."""
        times = {"memory": self.memory, "compute": self.compute, "overhead": self.overhead}
        return max(times, key=lambda name: times[name])


class SpeedModel:
    """How fast a model in a scheme is on a device.

    Args:
        facts: the model.
        scheme: of its weights.
        device: where it runs.
        kv_dtype: of the cache.
        layout: of the cache.
        tp: devices that share the work; what they tell each other is not counted.

    Raises:
        UsageError: the device has no such products.
        SchemeDoesNotFitError: the scheme cannot hold the model.
    """

    def __init__(
        self,
        facts: ModelFacts,
        scheme: WeightScheme,
        device: Device,
        kv_dtype: KVDtype,
        layout: CacheLayout,
        tp: int = 1,
    ) -> None:
        products = device.products(scheme.compute, weight_only=scheme.is_weight_only)
        kept = device.products("16-bit", weight_only=False)
        if products is None or kept is None:
            raise UsageError(f"{device.name} has no {scheme.compute} products", fix="Choose another scheme or device")
        self.facts, self.scheme, self.device, self.tp = facts, scheme, device, tp
        self._products, self._kept, self._kv, self._layout = products, kept, kv_dtype, layout
        self._cache_reads: dict[int, float] = {}
        self._linear = self._matrices("linear")
        self._expert = self._matrices("expert")
        head = "lm_head" if facts.of_role("lm_head") else "embedding"
        self._head = self._matrices(head)
        self._pair_flops = sum(
            2 * facts.num_heads * ((layer.key_dim + layer.value_dim) if layer.kind != "latent" else 2 * layer.width)
            for layer in facts.kv_layers
        )

    def _cache_bytes(self, context: int) -> float:
        """Bytes that a step reads of one sequence."""
        nbytes = self._cache_reads.get(context)
        if nbytes is None:
            nbytes = read_bytes(self.facts, context, self._kv, self._layout, self.tp)
            self._cache_reads[context] = nbytes
        return nbytes

    def _matrices(self, role: str) -> tuple[float, float]:
        """Bytes and parameters of a role on one device."""
        chosen = [weight for weight in self.facts.weights if weight.role == role]
        nbytes = sum(weight_bytes(weight, self.scheme, self.facts) for weight in chosen)
        return nbytes / self.tp, sum(weight.parameters for weight in chosen) / self.tp

    def time(self, step: Step) -> StepTime:
        """Seconds of a step."""
        facts = self.facts
        products = [self._products.time(*self._linear, step.tokens)]
        if facts.num_experts:
            products.append(self._expert_time(step.tokens))
        if step.sampled:
            head = self._kept if self.scheme.gguf is None else self._products
            products.append(head.time(*self._head, step.sampled))
        cache = sum(count * self._cache_bytes(context) for context, count in step.contexts)
        cache_seconds = cache / self.device.cache_bytes_per_s
        attention_seconds = self._kept.time(0, self._pair_flops / 2 / self.tp, step.pairs).multiply
        overhead = self.device.step_seconds + facts.num_layers * (
            self.device.layer_seconds + step.sequences * self.device.request_layer_seconds
        )
        return StepTime(
            memory=sum(product.read for product in products) + cache_seconds,
            compute=sum(product.multiply for product in products) + attention_seconds,
            overhead=overhead,
            total=sum(product.total for product in products) + max(cache_seconds, attention_seconds) + overhead,
        )

    def _expert_time(self, tokens: int) -> ProductTime:
        """The experts that the tokens of a step choose, each with its share of the tokens."""
        touched = self.facts.active_share(tokens)
        rows = tokens * self.facts.experts_per_token / self.facts.num_experts / touched
        return self._products.time(self._expert[0] * touched, self._expert[1] * touched, rows)

    def decode(self, batch: int, context: int) -> StepTime:
        """A step that gives each of ``batch`` sequences a token, with ``context`` tokens in the cache of each."""
        return self.time(Step(batch, batch, batch, ((context, batch),), float(batch * context)))

    def prefill(self, tokens: int, chunk: int = 2048) -> float:
        """Seconds until the first token of a lone prompt, computed in chunks."""
        total = 0.0
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            pairs = count * (start + (count + 1) / 2)
            is_last = start + count == tokens
            total += self.time(Step(count, 1, int(is_last), ((start + count, 1),), pairs)).total
        return total

    def is_memory_bound(self, batch: int) -> bool:
        """Whether reading the matrices of the blocks takes longer than multiplying them, for a token a sequence."""
        product = self._products.time(*self._linear, batch)
        times = [product] + ([self._expert_time(batch)] if self.facts.num_experts else [])
        return sum(t.read for t in times) > sum(t.multiply for t in times)


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Where one scheme overtakes another in decoding; None: nowhere up to `MAX_BATCH`, or no such product here.

    Attributes:
        sixteen_compute_bound: batch from which multiplying 16-bit matrices takes longer than reading them.
        weight_only_stops_helping: batch from which W4A16 is no faster than 16 bits.
        weight_only_gain_at_one: how many times faster W4A16 is at batch 1.
        int8_beats_weight_only: batch from which W8A8 is faster than W4A16.
    """

    sixteen_compute_bound: int | None
    weight_only_stops_helping: int | None
    weight_only_gain_at_one: float | None
    int8_beats_weight_only: int | None


def find_crossovers(
    sixteen: SpeedModel | None, weight_only: SpeedModel | None, int8: SpeedModel | None, context: int
) -> Crossovers:
    """Where the three schemes cross at a context length; None for one that does not run."""
    bound = stops = gain = beats = None
    if sixteen is not None:
        w16 = sixteen
        bound = _first_batch(lambda b: not w16.is_memory_bound(b))
        if weight_only is not None:
            w4 = weight_only
            gain = w16.decode(1, context).total / w4.decode(1, context).total
            stops = _first_batch(lambda b: w4.decode(b, context).total >= 0.99 * w16.decode(b, context).total)
    if weight_only is not None and int8 is not None:
        w4, w8 = weight_only, int8
        beats = _first_batch(lambda b: w8.decode(b, context).total < w4.decode(b, context).total)
    return Crossovers(bound, stops, gain, beats)


def _first_batch(holds: Callable[[int], bool]) -> int | None:
    """The smallest batch from which something holds, if it holds from there on."""
    if not holds(MAX_BATCH):
        return None
    low, high = 1, MAX_BATCH
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
