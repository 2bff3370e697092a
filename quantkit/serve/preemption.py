"""What it costs to give a preempted request its cache back: compute it anew, or copy it to the host and back."""

from dataclasses import dataclass

FLOPS_PER_BYTE = 10.0  # operations that a processor does in the time in which it moves a byte of memory; GPUs do more


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Both ways in bytes of memory traffic, so that the choice depends on the sizes alone and not on a clock.

        recompute = max(passes * weight_bytes, 2 * parameters * tokens / FLOPS_PER_BYTE)
        swap = 4 * blocks * block_bytes                  out and in, each read and written

    Attributes:
        block_bytes: of a cache block, over all layers.
        weight_bytes: of the model.
        num_parameters: each is multiplied and added once a token.
        max_num_batched_tokens: tokens in a pass.
    """

    block_bytes: int
    weight_bytes: int
    num_parameters: int
    max_num_batched_tokens: int

    def recompute(self, num_tokens: int) -> float:
        """Bytes for computing the keys and values of so many tokens."""
        passes = -(-num_tokens // self.max_num_batched_tokens)
        return max(passes * self.weight_bytes, 2 * self.num_parameters * num_tokens / FLOPS_PER_BYTE)

    def swap(self, num_blocks: int) -> float:
        """Bytes for copying so many blocks out and in."""
        return 4.0 * num_blocks * self.block_bytes
