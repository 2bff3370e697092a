"""How an engine is set up; the names are vLLM's."""

from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        dtype: of weights, activations and cache: ``float32``, ``bfloat16``, or ``auto``, the checkpoint's own
            (bfloat16 for a float16 checkpoint).
        max_model_len: most tokens of a request, prompt and continuation together; None is what the model was made for.
        max_num_seqs: most requests that run at the same time.
        max_num_batched_tokens: most tokens in one step, over all requests; longer prompts are computed in chunks.
        kv_block_size: tokens in a block of the cache.
        kv_cache_bytes: memory for the cache; None is room for max_num_seqs requests of max_model_len, but at most a
            quarter of the memory that is free.
        enable_prefix_caching: not supported yet; must be False.
        swap_space: not supported yet; must be 0.
        kv_cache_dtype: ``auto`` is dtype; ``int8`` is not supported yet.
        seed: from which requests without a seed of their own get one.

    Raises:
        UsageError: a value out of range, or not supported yet.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_block_size: int = 32
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = False
    swap_space: int = 0
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        for name, lowest in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("kv_block_size", 1), ("seed", 0)):
            self._check_integer(name, getattr(self, name), lowest)
        for name in ("max_model_len", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                self._check_integer(name, getattr(self, name), 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}; "
                "each running request needs one token a step"
            )
        not_yet: tuple[tuple[str, Any], ...] = (
            ("enable_prefix_caching", False),
            ("swap_space", 0),
            ("kv_cache_dtype", "auto"),
        )
        for name, supported in not_yet:
            if getattr(self, name) != supported:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is not supported yet", fix=f"leave it at {supported!r}"
                )

    @staticmethod
    def _check_integer(name: str, value: object, lowest: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise UsageError(f"{name}={value!r} is not an integer of {lowest} or more")
