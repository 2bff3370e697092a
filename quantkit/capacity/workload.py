"""What users will ask of the model: lengths, how many at once, and what matters to them."""

from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import UsageError

Goal = Literal["latency", "throughput"]
MAX_TOKENS = 10_000_000  # of a prompt or an answer


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload.

    Attributes:
        prompt_p50: tokens of a usual prompt.
        prompt_p99: of a long one.
        output_p50: tokens of a usual answer.
        output_p99: of a long one.
        concurrency: sequences at the same time; None: one for ``latency``, as many as fit for ``throughput``.
        goal: what matters.
        shared_prefix: tokens at the start of every prompt that are the same.
        quality_critical: a small loss of quality costs more than time.
        prefix_caching: whether the engine keeps the keys and values of prompts for the next request.

    Raises:
        UsageError: a number out of range.
    """

    prompt_p50: int = 1536
    prompt_p99: int = 3584
    output_p50: int = 512
    output_p99: int = 512
    concurrency: int | None = None
    goal: Goal = "latency"
    shared_prefix: int = 0
    quality_critical: bool = False
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for kind in ("prompt", "output"):
            usual, long = getattr(self, f"{kind}_p50"), getattr(self, f"{kind}_p99")
            if usual < 1:
                raise UsageError(f"the {kind}'s p50={usual} is less than 1")
            if long > MAX_TOKENS:
                raise UsageError(f"the {kind}'s p99={long} is more than {MAX_TOKENS} tokens")
            if long < usual:
                raise UsageError(f"the {kind}'s p99={long} is less than its p50={usual}", fix="Give P50,P99")
        if self.shared_prefix < 0 or self.shared_prefix > self.prompt_p50:
            raise UsageError(f"shared_prefix={self.shared_prefix} is not between 0 and the prompt's {self.prompt_p50}")

    @property
    def context_p50(self) -> int:
        """Tokens of a usual sequence, prompt and answer."""
        return self.prompt_p50 + self.output_p50

    @property
    def context_p99(self) -> int:
        """Tokens of a long sequence."""
        return self.prompt_p99 + self.output_p99

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {name: getattr(self, name) for name in self.__slots__}
