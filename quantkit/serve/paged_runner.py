"""Runs the model on a batch on a device whose kernels read the paged cache themselves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quantkit.serve.batch import Batch, uncached_batch
from quantkit.serve.config import EngineConfig
from quantkit.serve.cuda_graphs import CudaCapture, DecodeGraphs
from quantkit.serve.device import runs_triton
from quantkit.serve.kv_cache import KVCache
from quantkit.serve.models.decoder import Decoder
from quantkit.serve.models.loader import LoadedModel
from quantkit.serve.paged_step import PagedStep
from quantkit.serve.runner import SCORED_ROWS, ModelRunner
from quantkit.serve.step_inputs import StepInputs, StepShape


class Runner(Protocol):
    """What runs the model; see `ModelRunner`."""

    def forward(self, batch: Batch) -> Tensor:
        """[R, V] logits of a step, on the device of the model."""
        ...

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] float32 log-probabilities, on the CPU."""
        ...


class PagedRunner:
    """A decoder and its cache on a device.

    Args:
        model: the decoder.
        cache: keys and values of all requests.

    Attributes:
        graphs: of decode steps; None runs every step launch by launch.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._device = cache.device
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Compute a step and fill the cache; [R, V] logits of the requests that reach their last token."""
        if self.graphs is not None and self.graphs.takes(batch):
            return self.graphs(batch)
        rows = batch.logits_indices()
        inputs = StepInputs(StepShape.of(batch, self._cache.kv_block_size, len(rows)), self._device)
        inputs.fill(batch, rows)
        return self.compute(inputs)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] float32 log-probabilities of each next token, from one forward pass; the cache is not touched."""
        block_size = self._cache.kv_block_size
        num_blocks = -(-len(token_ids) // block_size)
        scratch = KVCache(self._model.shapes[:1], num_blocks, block_size, self._model.dtype, device=self._device)
        batch = replace(
            uncached_batch([token_ids]),
            slot_mapping=torch.arange(len(token_ids)),
            block_tables=torch.arange(num_blocks).unsqueeze(0),
        )
        inputs = StepInputs(StepShape.of(batch, block_size, None), self._device)
        inputs.fill(batch)
        step = PagedStep(inputs, scratch, has_one_layer=True)
        logits: Tensor = self._model(inputs.input_ids, inputs.positions, step, None)
        scores = torch.empty(logits.shape, dtype=torch.float32)
        for start in range(0, len(logits), SCORED_ROWS):
            rows = slice(start, start + SCORED_ROWS)
            scores[rows] = torch.log_softmax(logits[rows].float(), dim=-1)
        return scores

    def compute(self, inputs: StepInputs) -> Tensor:
        """[R, V] logits of a step whose inputs are on the device."""
        logits: Tensor = self._model(inputs.input_ids, inputs.positions, PagedStep(inputs, self._cache), inputs.rows)
        return logits


def make_runner(config: EngineConfig, loaded: LoadedModel, cache: KVCache, max_model_len: int) -> Runner:
    """The runner for the device of a model: with Triton's kernels where they run, with torch's attention elsewhere."""
    if not isinstance(loaded.model, Decoder) or not runs_triton(loaded.device):
        return ModelRunner(loaded.model, cache, loaded.dtype)
    runner = PagedRunner(loaded.model, cache)
    if loaded.device.type == "cuda" and loaded.model.is_capturable and not config.enforce_eager:
        runner.graphs = DecodeGraphs(
            runner.compute,
            CudaCapture(),
            max_num_seqs=config.max_num_seqs,
            max_context_len=max_model_len,
            kv_block_size=config.kv_block_size,
            device=loaded.device,
        )
    return runner
