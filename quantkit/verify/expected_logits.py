"""What the quantized model in memory said to a fixed prompt, and how far another answer is from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ExpectedLogits:
    """The logits of a prompt: all of them, or what quantkit.json keeps.

    Attributes:
        token_ids: [1, T] the prompt.
        logits: [T, V] or [1, T, V] float32, or None if only the record is known.
        record: ``probe`` of quantkit.json: for each position the largest logits, their ids, and the log of the sum of
            all exponentials.
    """

    token_ids: Tensor
    logits: Tensor | None = None
    record: Mapping[str, Any] | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any], vocab_size: int) -> "ExpectedLogits":
        """From ``probe`` of quantkit.json, as `quantkit.checkpoint.manifest.read_manifest` gives it.

        Args:
            record: the probe.
            vocab_size: of the model.

        Raises:
            CheckpointError: it names tokens that the model does not have.
        """
        ids = [*record["token_ids"], *(token for row in record["top_ids"] for token in row)]
        if not ids or not (min(ids) >= 0 and max(ids) < vocab_size):
            raise CheckpointError(f"the probe of quantkit.json holds token ids outside 0 to {vocab_size - 1}, or none")
        return cls(torch.tensor([record["token_ids"]]), record=record)

    def distance(self, logits: Tensor) -> tuple[float, float]:
        """The largest difference to [T, V] float32 ``logits``, and the largest magnitude expected."""
        if self.logits is not None:
            full = self.logits.float().reshape(logits.shape)
            return float((logits - full).abs().max()), float(full.abs().max())
        assert self.record is not None
        top = torch.tensor(self.record["top_logits"])
        at_top = logits.gather(1, torch.tensor(self.record["top_ids"])) - top
        normalizer = logits.logsumexp(-1) - torch.tensor(self.record["logsumexp"])
        return float(torch.cat([at_top.flatten(), normalizer]).abs().max()), float(top.abs().max())
