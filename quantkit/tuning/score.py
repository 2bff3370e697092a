"""How far a tuned model is from the original on the windows that judge, and which of two states is better."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.tuning.objective import kl_of_tokens
from quantkit.tuning.student import Student
from quantkit.tuning.windows import TuningSource

Targets = Mapping[int, Tensor]  # id of the windows -> output of the original's last block
WindowSum = Sequence[float]  # tokens of a window, and the sum of their KL in nats


@dataclass(frozen=True, slots=True)
class Score:
    """How far the model is from the original on the windows that judge.

    Attributes:
        windows: by source what each window gave, always in the same order.
        agreement: share of tokens for which both models put the same token first, by source.
    """

    windows: Mapping[str, Sequence[WindowSum]]
    agreement: Mapping[str, float]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Score":
        """Of an entry of the history."""
        return cls(record["windows"], record["agreement"])

    def to_record(self) -> dict[str, Any]:
        """For the history; the mean KL beside what it is computed of."""
        return {"kl": self.kl, "agreement": dict(self.agreement), "windows": dict(self.windows)}

    @property
    def kl(self) -> dict[str, float]:
        """Mean KL in nats a token, by source."""
        return {
            name: sum(total for _, total in windows) / sum(tokens for tokens, _ in windows)
            for name, windows in self.windows.items()
        }

    def ratio(self, before: "Score") -> float:
        """Mean over the sources of the KL as a share of what it was."""
        was = before.kl
        return sum(value / max(was[name], 1e-9) for name, value in self.kl.items()) / len(self.windows)

    def is_better_than(self, before: "Score") -> bool:
        """Whether the mean ratio fell, and no source's KL rose by more than the standard error of its change."""
        was = before.kl
        return self.ratio(before) < 1 and all(
            value - was[name] <= change_error(before.windows[name], self.windows[name])
            for name, value in self.kl.items()
        )


def change_error(before: Sequence[WindowSum], after: Sequence[WindowSum]) -> float:
    """Standard error of the change of the mean KL a token, in nats; 0 for a single window, which tells none.

    The windows are the sample: a ratio estimate of the paired differences by the windows' tokens.

    Source: Cochran, Sampling Techniques, 3rd edition, equation 6.13, without the finite population's factor.
    """
    count = len(before)
    if count < 2:
        return 0.0
    tokens = [window[0] for window in before]
    changes = [new[1] - old[1] for old, new in zip(before, after, strict=True)]
    mean = sum(changes) / sum(tokens)
    squares = sum((change - mean * weight) ** 2 for change, weight in zip(changes, tokens, strict=True))
    return math.sqrt(count / (count - 1) * squares) / sum(tokens)


@torch.no_grad()
def evaluate(student: Student, sources: Sequence[TuningSource], targets: Targets) -> Score:
    """Score the student as it would be stored now."""
    found: dict[str, list[WindowSum]] = {}
    agreement: dict[str, float] = {}
    for source in sources:
        sums: list[WindowSum] = []
        agreed = 0.0
        for windows in source.validation:
            hidden = student.blocks(student.enter(windows.token_ids, windows.token_mask)).flatten(0, 1)
            counted = windows.token_mask.flatten()
            target = targets[id(windows)].flatten(0, 1)[counted]
            distance, agrees = kl_of_tokens(
                hidden[counted], target, student.original_head, student.head, student.rows_at_once
            )
            agreed += float(agrees.sum())
            tokens = windows.token_mask.sum(1).tolist()
            parts = zip(tokens, distance.split(tokens), strict=True)
            sums += [(number, float(part.double().sum())) for number, part in parts if number]
        found[source.label] = sums
        agreement[source.label] = agreed / sum(tokens for tokens, _ in sums)
    return Score(found, agreement)
