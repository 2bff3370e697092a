"""Decode steps as CUDA graphs: a step of a few hundred launches becomes one.

A graph is a step of one shape that reads and writes always the same memory. So a batch of decoding requests is filled
up to the next size of batch and the next length of context that there is a graph for; each is captured when it is
needed first.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import EngineError
from quantkit.serve.batch import Batch
from quantkit.serve.step_inputs import StepInputs, StepShape

SMALL_BATCHES = (1, 2, 4)
BATCH_STEP = 8  # from here on
LEAST_CONTEXT_LEN = 512  # then twice as much each time; the keys that one program of the attention kernel reads
Compute = Callable[[StepInputs], Tensor]


class Capture(Protocol):
    """Makes a graph of a computation on fixed memory; calling the result computes it again."""

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """The computation must have run once before, so that its kernels are compiled."""
        ...


class CudaCapture:
    """`torch.cuda.CUDAGraph`; all graphs share the memory of what lies between their inputs and outputs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`.

        Raises:
            EngineError: something in the computation cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                compute()
        except RuntimeError as error:
            raise EngineError(f"a decode step cannot be a CUDA graph: {error}", fix="set enforce_eager") from error
        replay: Callable[[], None] = graph.replay
        return replay


def batch_bucket(num_seqs: int, max_num_seqs: int) -> int:
    """The size of batch that holds ``num_seqs`` requests: 1, 2, 4, 8, 16, 24, ... up to ``max_num_seqs``."""
    for size in SMALL_BATCHES:
        if num_seqs <= size:
            return min(size, max_num_seqs)
    return min(-(-num_seqs // BATCH_STEP) * BATCH_STEP, max_num_seqs)


def context_bucket(context_len: int, max_context_len: int) -> int:
    """The length that holds ``context_len`` tokens: 512, 1024, 2048, ... up to ``max_context_len``."""
    length = LEAST_CONTEXT_LEN
    while length < context_len:
        length *= 2
    return min(length, max_context_len)


class DecodeGraphs:
    """The graphs of a model's decode steps.

    Args:
        compute: [T, V] logits of all tokens of a step, from its inputs.
        capture: makes a graph.
        max_num_seqs: most requests of a step.
        max_context_len: most tokens of a request.
        kv_block_size: tokens in a block of the cache.
        device: of the inputs.
    """

    def __init__(
        self,
        compute: Compute,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_context_len: int,
        kv_block_size: int,
        device: torch.device,
    ) -> None:
        self._compute, self._capture, self._device = compute, capture, device
        self._max_num_seqs, self._max_context_len = max_num_seqs, max_context_len
        self._kv_block_size = kv_block_size
        self._captured: dict[tuple[int, int], tuple[StepInputs, Callable[[], None]]] = {}
        self._logits: Tensor | None = None  # [max_num_seqs, V], the output of all graphs

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """(requests, tokens of context) of the graphs that were captured."""
        return sorted(self._captured)

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is one token of each request, with the logits of all of them and no others."""
        count = len(batch.context_lens)
        is_decode = batch.num_decodes == count == len(batch.sampled_rows)
        return is_decode and not batch.scored_tokens and 0 < count <= self._max_num_seqs

    def __call__(self, batch: Batch) -> Tensor:
        """[R, V] logits of a batch that `takes` is true for; they are valid until the next call.

        Raises:
            EngineError: a graph cannot be captured.
        """
        count = len(batch.context_lens)
        key = (
            batch_bucket(count, self._max_num_seqs),
            context_bucket(max(batch.context_lens), self._max_context_len),
        )
        if key not in self._captured:
            self._captured[key] = self._make(*key, batch)
        inputs, replay = self._captured[key]
        inputs.fill(batch)
        replay()
        assert self._logits is not None, "the first capture makes it"
        logits = self._logits[:count]
        return logits.clone() if batch.has_fixed_shapes else logits  # such a step is several forward passes

    def _make(self, num_seqs: int, context_len: int, batch: Batch) -> tuple[StepInputs, Callable[[], None]]:
        """Compute the step once without a graph, which compiles its kernels, and then capture it."""
        shape = StepShape(num_seqs, context_len, 0, 0, 0, 0, None, self._kv_block_size)
        inputs = StepInputs(shape, self._device)
        inputs.fill(batch)
        logits = self._compute(inputs)
        if self._logits is None:
            self._logits = logits.new_empty(self._max_num_seqs, logits.shape[1])
        output = self._logits[:num_seqs]

        def step() -> None:
            output.copy_(self._compute(inputs))

        return inputs, self._capture(step)
