"""What the suite ``nll`` measures on its windows, and what it makes of them for result.json."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit_eval.record_types import Direction, Histogram, Metric, MetricValue
from quantkit_eval.reference import TokenDistributions
from quantkit_eval.statistics import Estimate, bootstrap_mean, bootstrap_perplexity

CONFIDENCE = 0.95
KL_EDGES = [0.0, *(float(f"{10 ** (exponent / 4):.4g}") for exponent in range(-24, 9))]  # nats: 1e-6 to 100


@dataclass(frozen=True, slots=True)
class Divergence:
    """A window of T tokens against the reference, [T - 1] each: KL and difference of NLL in nats, equal argmax."""

    kl: Tensor
    delta_nll: Tensor
    agrees: Tensor

    @classmethod
    def measure(cls, log_probs: Tensor, nll: Tensor, reference: TokenDistributions) -> "Divergence":
        """From the model's own [T - 1, V] log-probabilities and [T - 1] NLL."""
        agrees = log_probs.argmax(dim=1) == reference.argmax
        return cls(reference.kl_divergence(log_probs), nll - reference.nll_nats, agrees)


@dataclass(frozen=True, slots=True)
class WindowScore:
    """NLL of a window, [T - 1] nats, and what only a reference can tell."""

    nll: Tensor
    divergence: Divergence | None

    def metrics(self) -> dict[str, MetricValue]:
        """Of the window's line in samples.jsonl."""
        own: dict[str, MetricValue] = {"nll_nats": _mean(self.nll), "num_tokens": len(self.nll)}
        if self.divergence is None:
            return own
        return own | {
            "kl_mean_nats": _mean(self.divergence.kl),
            "top1_agreement": _mean(self.divergence.agrees),
            "delta_nll_nats": _mean(self.divergence.delta_nll),
        }


def summarize(scores: Sequence[WindowScore]) -> dict[str, Metric]:
    """Means over tokens, with intervals over windows."""
    drawn: dict[str, Any] = {"weights": [len(score.nll) for score in scores], "confidence": CONFIDENCE}
    nll = [_mean(score.nll) for score in scores]
    summary = {
        "nll_nats": _metric(bootstrap_mean(nll, **drawn), "nats_per_token", "lower_is_better"),
        "perplexity": _metric(bootstrap_perplexity(nll, **drawn), "perplexity", "lower_is_better", 1.0),
    }
    windows = [score.divergence for score in scores if score.divergence]
    if not windows:
        return summary
    kl = [_mean(window.kl) for window in windows]
    agrees = [_mean(window.agrees) for window in windows]
    delta_nll = [_mean(window.delta_nll) for window in windows]
    every_kl = torch.cat([window.kl for window in windows])
    return summary | {
        "kl_mean_nats": _metric(bootstrap_mean(kl, **drawn), "nats_per_token", "lower_is_better"),
        "kl_p99_nats": _quantile(every_kl, 0.99),
        "kl_p999_nats": _quantile(every_kl, 0.999),
        "top1_agreement": _metric(bootstrap_mean(agrees, **drawn), "fraction", "higher_is_better", 0.0, 1.0),
        "perplexity_ratio": _metric(bootstrap_perplexity(delta_nll, **drawn), "ratio", "lower_is_better"),
    }


def histograms(scores: Sequence[WindowScore]) -> dict[str, Histogram]:
    """How many tokens have which divergence; what lies beyond the last edge counts in the last bin."""
    kl = [score.divergence.kl for score in scores if score.divergence]
    if not kl:
        return {}
    counts, _ = np.histogram(torch.cat(kl).clamp_max(KL_EDGES[-1]).numpy(), bins=KL_EDGES)
    return {"kl_nats": {"edges": KL_EDGES, "counts": [int(count) for count in counts], "unit": "nats_per_token"}}


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _metric(
    estimate: Estimate, unit: str, direction: Direction, lowest: float = 0.0, highest: float = math.inf
) -> Metric:
    """Of window means, weighted by tokens; few windows have no interval. A value cannot leave [lowest, highest].

    A value that no float holds is left out: likelihood and divergence, which are its logarithm, say how bad it is.
    """
    interval = estimate.cut_to(lowest, highest)
    return {
        "value": estimate.value if math.isfinite(estimate.value) else None,
        "n": estimate.n,
        "interval": list(interval) if interval else None,
        "confidence": estimate.confidence if interval else None,
        "method": "studentized bootstrap over windows",
        "unit": unit,
        "direction": direction,
    }


def _quantile(values: Tensor, share: float) -> Metric:
    return {
        "value": float(values.quantile(share)),
        "n": values.numel(),
        "interval": None,
        "confidence": None,
        "method": f"{100 * share:g}th percentile of the tokens",
        "unit": "nats_per_token",
        "direction": "lower_is_better",
    }
