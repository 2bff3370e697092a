"""The cheap look at a candidate: few items a round, and no further round once it is hopeless."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from quantkit.search.holdout import ItemSet
from quantkit_eval.comparability import Evaluation, check_comparable
from quantkit_eval.evaluate import evaluate
from quantkit_eval.gates import Gates, judge_kl
from quantkit_eval.pairing import pair_up
from quantkit_eval.protocol import Model
from quantkit_eval.sequential import is_hopeless

FALSE_STOP = 0.05  # probability that a candidate that keeps every limit is stopped, over all limits and rounds
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Answers:
    """What is known of a candidate so far.

    Attributes:
        right: suite -> of each item, whether baseline and candidate are right.
        kl: mean divergence of each window, nats a token.
        tokens: of each window.
    """

    right: dict[str, list[tuple[bool, bool]]] = field(default_factory=dict)
    kl: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, before: Evaluation, after: Evaluation, limits: Gates) -> None:
        """Count the records of a round."""
        check_comparable(before, after)
        for suite in limits.max_drop_pp:
            if suite in after.samples:
                pairs = pair_up(suite, before, after)
                self.right.setdefault(suite, []).extend((pair.baseline_right, pair.candidate_right) for pair in pairs)
        for window in after.samples.get("nll", ()):
            self.kl.append(cast(float, window["metrics"]["kl_mean_nats"]))
            self.tokens.append(cast(int, window["metrics"]["num_tokens"]))

    @property
    def kl_mean(self) -> float | None:
        """Nats a token."""
        if not self.kl:
            return None
        return sum(kl * n for kl, n in zip(self.kl, self.tokens, strict=True)) / sum(self.tokens)

    def scores(self) -> dict[str, Any]:
        """The selection scores: measured values, not bounds."""
        found: dict[str, Any] = {}
        for suite, right in self.right.items():
            shares = [sum(side) / len(right) for side in zip(*right, strict=True)]
            found[suite] = {"n": len(right), "baseline": shares[0], "candidate": shares[1]}
        if self.kl:
            found["kl_mean_nats"] = {"n": len(self.kl), "candidate": self.kl_mean}
        return found


def screen(
    model: Model, rounds: Sequence[ItemSet], baselines: Path, out: Path, limits: Gates, progress: Progress
) -> dict[str, Any]:
    """Ask a candidate round by round.

    Hopeless: a drop above its margin, or a divergence above its limit, is shown. The drops are a betting test
    (`quantkit_eval.sequential`), the divergence is the gate's own interval; each errs with ``FALSE_STOP`` divided by
    the number of limits, so that a candidate that keeps all of them is stopped with at most ``FALSE_STOP``.

    Args:
        model: the candidate.
        rounds: what to ask.
        baselines: folder with the baseline's records of each round.
        out: folder for the candidate's records.
        limits: of the gates.
        progress: is called with (stage, done, total).

    Returns:
        ``status``: promising (every measured value keeps its limit), doubtful (one does not, and may by chance) or
        hopeless; ``reason``, ``rounds`` that were asked and ``scores``.
    """
    answers = Answers()
    alpha = FALSE_STOP / (len(limits.max_drop_pp) + (limits.max_kl_mean_nats is not None))
    for number, item_set in enumerate(rounds, start=1):
        reference = baselines / item_set.name if item_set.has_reference else None
        evaluate(model, item_set.suites, item_set.seed, out / item_set.name, reference, progress)
        answers.add(Evaluation.read(baselines / item_set.name), Evaluation.read(out / item_set.name), limits)
        reason = _hopeless(answers, limits, alpha)
        if reason is not None:
            return {"status": "hopeless", "reason": reason, "rounds": number, "scores": answers.scores()}
    beyond = _beyond(answers, limits)
    status = "doubtful" if beyond else "promising"
    reason = "; ".join(beyond) or "every measured value keeps its limit"
    return {"status": status, "reason": reason, "rounds": len(rounds), "scores": answers.scores()}


def _hopeless(answers: Answers, limits: Gates, alpha: float) -> str | None:
    """What is shown to be beyond its limit."""
    for suite, right in answers.right.items():
        drops = [int(before) - int(after) for before, after in right]
        if is_hopeless(drops, limits.max_drop_pp[suite] / 100, alpha):
            return f"{_measured_drop(suite, right, limits.max_drop_pp)}, which is no accident"
    if answers.kl and limits.max_kl_mean_nats is not None:
        gate = judge_kl(answers.kl, answers.tokens, limits.max_kl_mean_nats, alpha)
        if gate["verdict"] == "fail":
            return gate["reason"]
    return None


def _beyond(answers: Answers, limits: Gates) -> list[str]:
    """The measured values beyond their limits, in words."""
    found = []
    for suite, right in answers.right.items():
        lost = sum(int(before) - int(after) for before, after in right)
        if 100 * lost > limits.max_drop_pp[suite] * len(right):
            found.append(_measured_drop(suite, right, limits.max_drop_pp))
    kl = answers.kl_mean
    if kl is not None and limits.max_kl_mean_nats is not None and kl > limits.max_kl_mean_nats:
        found.append(f"{kl:.4g} nats a token on {len(answers.kl)} windows, {limits.max_kl_mean_nats:g} are allowed")
    return found


def _measured_drop(suite: str, right: Sequence[tuple[bool, bool]], margins: Mapping[str, float]) -> str:
    before, after = (sum(side) for side in zip(*right, strict=True))
    return f"{suite}: {before} of {len(right)} right before, {after} after, {margins[suite]:g} points are allowed"
