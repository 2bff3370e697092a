"""Runs the model on a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.serve.attention_metadata import AttentionMetadata
from quantkit.serve.batch import Batch, uncached_batch
from quantkit.serve.kv_cache import KVCache
from quantkit.serve.models.decoder import Decoder

SCORED_ROWS = 256  # rows of logits made into float32 log-probabilities at a time


class ModelRunner:
    """A model and its cache.

    Args:
        model: a `Decoder`, or transformers' with `quantkit.serve.attention` in its layers.
        cache: keys and values of all requests.
        dtype: of the activations.
    """

    def __init__(self, model: nn.Module, cache: KVCache, dtype: torch.dtype) -> None:
        self._model = model
        self._cache = cache
        self._dtype = dtype

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Compute a step and fill the cache; [R, V] logits of the requests that reach their last token."""
        rows = batch.logits_indices()
        is_every = len(rows) == batch.num_tokens and bool((rows[1:] > rows[:-1]).all())
        return self._logits(batch, self._cache, None if is_every else rows)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] float32 log-probabilities of each next token, from one forward pass; the cache is not touched."""
        logits = self._logits(uncached_batch([token_ids]), None, None)
        scores = torch.empty(logits.shape, dtype=torch.float32)
        for start in range(0, len(logits), SCORED_ROWS):
            rows = slice(start, start + SCORED_ROWS)
            torch.log_softmax(logits[rows].float(), dim=-1, out=scores[rows])
        return scores

    def _logits(self, batch: Batch, cache: KVCache | None, rows: Tensor | None) -> Tensor:
        """[R, V] logits of the tokens ``rows``, or of all."""
        if isinstance(self._model, Decoder):
            metadata = AttentionMetadata(batch, cache, self._model.activation_dtype)
            found: Tensor = self._model(batch.input_ids, batch.positions, metadata, rows)
            return found
        output: Any = self._model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            paged=AttentionMetadata(batch, cache, self._dtype),
        )
        logits: Tensor = output.logits[0]
        return logits
