"""How an engine is set up; the names are vLLM's."""

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import UsageError

CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16"),
    "kv_cache_dtype": ("auto", "int8"),
    "scheduling_policy": ("fcfs", "priority"),
}
LOWEST = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "kv_block_size": 1, "swap_space": 0, "seed": 0}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        device: ``cpu``, ``cuda``, or ``auto``: a GPU if there is one that the kernels run on.
        dtype: of weights, activations and cache: ``float32``, ``bfloat16``, or ``auto``, the checkpoint's own
            (bfloat16 for a float16 checkpoint).
        max_model_len: most tokens of a request, prompt and continuation together; None is what the model was made for.
        max_num_seqs: most requests that run at the same time.
        max_num_batched_tokens: most tokens in one step, over all requests; longer prompts are computed in chunks.
        kv_block_size: tokens in a block of the cache.
        kv_cache_bytes: memory for the cache; None is room for max_num_seqs requests of max_model_len, but at most a
            quarter of the memory that is free, or 80% of a GPU's.
        gpu_memory_utilization: share of the memory that is free once the model is loaded, instead of kv_cache_bytes; in
            (0, 1]. On a CPU that is the host's memory.
        enable_prefix_caching: keep what is computed for the beginnings of prompts, and use it for others that begin
            alike.
        swap_space: bytes of host memory to which preempted requests may be copied, where that is cheaper than to
            compute them anew (`PreemptionCost`); 0 is never.
        kv_cache_dtype: ``auto`` is dtype; ``int8`` keeps keys and values as 8-bit codes with a scale for each token and
            head.
        scheduling_policy: who runs first: ``fcfs`` in order of arrival, ``priority`` by the requests' priority.
        max_num_waiting: most requests that may wait when another one comes; None is no limit.
        deterministic: give a seeded request the same tokens alone, in any batch, and whether its prompt is cached or
            not. Each request is then computed in forward passes of its own, so that little is won by running many
            at a time, unless a decode step is one compiled call, in which no row depends on another.
        enforce_eager: capture no CUDA graphs of decode steps.
        seed: from which requests without a seed of their own get one.

    Raises:
        UsageError: a value out of range, or one that excludes another.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_block_size: int = 32
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    swap_space: int = 0
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_waiting: int | None = None
    deterministic: bool = False
    enforce_eager: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("enable_prefix_caching", "deterministic", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r} is neither True nor False")
        for name, lowest in LOWEST.items():
            self._check_integer(name, lowest)
        for name in ("max_model_len", "kv_cache_bytes", "max_num_waiting"):
            if getattr(self, name) is not None:
                self._check_integer(name, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}; "
                "each running request needs one token a step"
            )
        if self.deterministic and self.chunk < 1:
            raise UsageError(
                f"deterministic needs room for a block beside all decodes: max_num_batched_tokens="
                f"{self.max_num_batched_tokens} is less than max_num_seqs + kv_block_size="
                f"{self.max_num_seqs + self.kv_block_size}"
            )
        self._check_utilization()

    @property
    def chunk(self) -> int:
        """Tokens in a chunk of a prompt when ``deterministic``: whole blocks, beside a token for every request."""
        return (self.max_num_batched_tokens - self.max_num_seqs) // self.kv_block_size * self.kv_block_size

    def _check_utilization(self) -> None:
        share = self.gpu_memory_utilization
        if share is None:
            return
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise UsageError(f"gpu_memory_utilization={share!r} is not a number above 0 and up to 1")
        if self.kv_cache_bytes is not None:
            raise UsageError("kv_cache_bytes and gpu_memory_utilization exclude each other", fix="leave one out")

    def _check_integer(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise UsageError(f"{name}={value!r} is not an integer of {lowest} or more")
