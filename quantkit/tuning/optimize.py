"""The loop: passes in, gradients of the KL out, the best state by windows that never gave a gradient."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.recipe.tuning import Tuning
from quantkit.tuning.objective import backward_through_head
from quantkit.tuning.score import Score, Targets, evaluate
from quantkit.tuning.student import Student
from quantkit.tuning.windows import PASS_TOKENS, TuningSource, Windows, passes

WARMUP_STEPS = 5
EVALUATIONS = 6  # of a run, evenly spaced
BETAS = (0.9, 0.95)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TuningState:
    """Where a run of tuning stands: everything that the next step depends on.

    Attributes:
        step: steps that are done.
        tensors: shifts, optimizer moments and offsets of codes, by name.
        best: the same of the best state so far, without moments.
        best_step: after which step that was; 0 is the start.
        history: evaluations so far.
    """

    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def rate(step: int, steps: int) -> float:
    """Share of the learning rate at a step: a short rise, then half a cosine to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Tuner:
    """Tunes a student.

    Args:
        student: starts as it is stored.
        sources: windows.
        targets: of all their windows.
        tuning: the recipe's section.
        state: of an interrupted run of the same recipe on the same data; None to start.
    """

    def __init__(
        self,
        student: Student,
        sources: Sequence[TuningSource],
        targets: Targets,
        tuning: Tuning,
        state: TuningState | None = None,
    ) -> None:
        self.student, self._sources, self._targets, self._tuning = student, sources, targets, tuning
        self._parameters = list(student.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, lr=tuning.learning_rate, betas=BETAS)
        self._passes_a_step = max(1, round(tuning.tokens_per_step / PASS_TOKENS))
        self._schedule: Iterator[Windows] = passes(sources, tuning.seed)
        self.state = state or TuningState()
        if self.state.step:
            self._restore(self.state)
            for _ in range(self.state.step * self._passes_a_step):
                next(self._schedule)
        else:
            self._evaluate()

    def run(self, progress: Callable[[int, int], None], save: Callable[[TuningState], None] | None = None) -> None:
        """Take all steps that are left, and leave the student in the best state that was seen.

        A loss that is no finite number ends it early, with a warning.

        Args:
            progress: is called with (steps done, all steps).
            save: is given the state after every evaluation.
        """
        steps = self._tuning.steps
        every = max(1, -(-steps // EVALUATIONS))
        progress(self.state.step, steps)
        while self.state.step < steps:
            loss = self._step(self.state.step)
            if not math.isfinite(loss):
                words = "tuning stops after %d steps: its loss is %s; lower learning_rate"
                logger.warning(words, self.state.step, loss)
                break
            self.state.step += 1
            progress(self.state.step, steps)
            if self.state.step % every == 0 or self.state.step == steps:
                self._evaluate(loss)
                if save is not None:
                    self.state.tensors = self._snapshot(moments=True)
                    save(self.state)
        self.take_best()

    def take_best(self) -> None:
        """Put the student into the best state that was seen."""
        self._load(self.state.best)

    @property
    def best_score(self) -> Score:
        """Of the best state that was seen."""
        entry = next(entry for entry in self.state.history if entry["step"] == self.state.best_step)
        return Score.from_record(entry)

    def _step(self, step: int) -> float:
        """One step; returns the mean KL of its windows before it, in nats."""
        share = rate(step, self._tuning.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._tuning.learning_rate * share
        for layer in self.student.layers.values():
            if layer.offsets is not None:
                layer.offsets.learning_rate = self._tuning.code_learning_rate * share / self._passes_a_step
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(self._passes_a_step):
            windows = next(self._schedule)
            hidden = self.student.blocks(self.student.enter(windows.token_ids, windows.token_mask)).flatten(0, 1)
            loss, gradient = backward_through_head(
                hidden,
                self._targets[id(windows)].flatten(0, 1),
                windows.token_mask.flatten(),
                self.student.original_head,
                self.student.head,
                self.student.rows_at_once,
            )
            torch.autograd.backward(hidden, gradient / self._passes_a_step)
            total += loss / self._passes_a_step
        self._optimizer.step()
        return total

    def _evaluate(self, loss: float | None = None) -> None:
        """Score the present state and keep it if it is the best so far."""
        score = evaluate(self.student, self._sources, self._targets)
        history = self.state.history
        first = Score.from_record(history[0]) if history else score
        ratio = score.ratio(first)
        if not math.isfinite(ratio):  # the loss of the next step says so
            return
        history.append({"step": self.state.step, "ratio": ratio, "loss": loss} | score.to_record())
        if ratio <= min(entry["ratio"] for entry in history) and (score is first or score.is_better_than(first)):
            self.state.best = self._snapshot(moments=False)
            self.state.best_step = self.state.step

    def _snapshot(self, *, moments: bool) -> dict[str, Tensor]:
        """Copies of everything that moves, by name."""
        tensors: dict[str, Tensor] = {}
        for name, layer in self.student.layers.items():
            tensors[f"{name}.shift"] = layer.shift.detach().clone()
            if layer.offsets is not None:
                tensors[f"{name}.offset"] = layer.offsets.offset.clone()
                if moments:
                    tensors[f"{name}.momentum"] = layer.offsets.momentum.clone()
                    tensors[f"{name}.square"] = layer.offsets.square.clone()
        for name, value in self.student.small.items():
            tensors[f"{name}.shift"] = value.shift.detach().clone()
        if moments:
            for number, parameter in enumerate(self._parameters):
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    tensors[f"adam.{number}.{key}"] = value.clone()
        return tensors

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put copies of a snapshot back, without moments of the optimizer."""
        for name, layer in self.student.layers.items():
            layer.shift.data.copy_(tensors[f"{name}.shift"])
            if layer.offsets is not None:
                layer.offsets.offset.copy_(tensors[f"{name}.offset"])
                if f"{name}.momentum" in tensors:
                    layer.offsets.momentum.copy_(tensors[f"{name}.momentum"])
                    layer.offsets.square.copy_(tensors[f"{name}.square"])
                    layer.offsets.steps = self.state.step * self._passes_a_step
        for name, value in self.student.small.items():
            value.shift.data.copy_(tensors[f"{name}.shift"])

    def _restore(self, state: TuningState) -> None:
        self._load(state.tensors)
        for number, parameter in enumerate(self._parameters):
            keys = ("step", "exp_avg", "exp_avg_sq")
            found = {key: state.tensors[f"adam.{number}.{key}"] for key in keys}
            self._optimizer.state[parameter] = found
