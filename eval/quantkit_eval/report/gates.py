"""What a gate of the verdict means: its boundary, its unit, and how its numbers are written."""

from typing import Literal

from quantkit_eval.record_types import Gate, Outcome
from quantkit_eval.report.quantities import MISSING, RATIO, SHARE, Unit, number, unit_named
from quantkit_eval.suites import CONSTRAINED
from quantkit_eval.suites.lm_eval_task import PREFIX

OUTCOME_WORDS: dict[Outcome, str] = {"pass": "Pass", "fail": "Fail", "inconclusive": "Inconclusive"}
SUBJECTS = {
    "extract": "structured output",
    "schema": "output by JSON schema",
    "tools": "tool calls",
    "arith": "arithmetic",
    "needle": "retrieval from long context",
    "scripts": "rare scripts and emoji",
    "instructions": "instruction following",
    "nll": "token predictions",
    "throughput": "speed",
}
METRICS = {
    "exact": "exactly right",
    "parse_ok": "parses",
    "schema_ok": "valid for the schema",
    "followed": "as told",
    "tool_ok": "right tool, or rightly none",
    "answer_ok": "right answer",
    "step_accuracy": "steps right",
    "rule_accuracy": "rules followed",
    "other_key": "value of another key",
    "contained": "text somewhere in the output",
    "looped": "repeats itself to the end",
    "whitespace_run": "longest run of white space",
    "replacement_chars": "U+FFFD characters",
    "only_json": "nothing but JSON",
    "forced_token_rate": "tokens that the form left no choice for",
    "legal_mass": "probability of what the form allows",
    "truncated": "cut off at the token limit",
    "field_accuracy": "fields right",
    "kl_mean_nats": "KL divergence to the original",
    "kl_p99_nats": "KL divergence, 99th percentile",
    "kl_p999_nats": "KL divergence, 99.9th percentile",
    "top1_agreement": "same next token as the original",
    "perplexity_ratio": "perplexity, candidate over original",
    "nll_nats": "negative log-likelihood",
    "delta_nll_nats": "added negative log-likelihood",
}


def subject(suite: str) -> str:
    """What a suite is about, in plain words; a user's own suite keeps its name."""
    name = suite.removesuffix(CONSTRAINED)
    return SUBJECTS.get(name, name) + (", constrained" if name != suite else "")


def title(suite: str) -> str:
    """The subject at the beginning of a line; only its first letter changes, JSON stays JSON."""
    words = subject(suite)
    return words[:1].upper() + words[1:]


def metric_words(metric: str) -> str:
    """A metric in plain words; an unknown one keeps its name without underscores."""
    if metric.startswith("decode_batch_"):
        return f"decoding at batch {metric.removeprefix('decode_batch_')}"
    if metric.startswith(PREFIX):
        return f"{metric.removeprefix(PREFIX)} of lm-eval"
    return METRICS.get(metric, metric.replace("_", " "))


def short_metric(metric: str) -> str:
    """A metric as a headline has it."""
    return "KL" if metric.startswith("kl_mean") else metric_words(metric)


def value_unit(gate: Gate) -> Unit:
    """The unit of the gate's value, interval and limit."""
    return RATIO if gate["kind"] == "ratio" else unit_named(gate["unit"])


def is_difference(gate: Gate) -> bool:
    """True if the gate's value is a difference, so that its sign matters."""
    return gate["kind"] == "non_inferiority"


def boundary(gate: Gate) -> float:
    """Where the forbidden side of the gate's value begins."""
    if gate["kind"] == "non_inferiority" and gate["direction"] == "higher_is_better":
        return -gate["limit"]
    return gate["limit"]


def allowed_side(gate: Gate) -> Literal["above", "below"]:
    """On which side of the boundary a value is good."""
    if gate["kind"] == "upper_bound" or gate["direction"] == "lower_is_better":
        return "below"
    return "above"


def is_beyond(gate: Gate) -> bool:
    """Whether the measured value itself lies on the forbidden side; a loss may be proven and still lie within."""
    value, limit = gate["value"], boundary(gate)
    return value is not None and (value < limit if allowed_side(gate) == "above" else value > limit)


def counted(gate: Gate) -> str:
    """What the gate's n and its needed number count."""
    return {"non_inferiority": "items", "upper_bound": "windows", "ratio": "pairs of runs"}[gate["kind"]]


def needed(gate: Gate) -> str:
    """How much data would probably decide: ``needs about 310 items``; empty unless the verdict says so."""
    return f"needs about {number(gate['items_needed'])} {counted(gate)}" if gate["items_needed"] else ""


def no_change(gate: Gate) -> float:
    """The value of a candidate that equals the baseline."""
    return 1.0 if gate["kind"] == "ratio" else 0.0


def requirement(gate: Gate) -> str:
    """What the gate asks: ``at most 5 pp lower``."""
    if gate["kind"] == "non_inferiority":
        return f"at most {amount(gate)} {'lower' if gate['direction'] == 'higher_is_better' else 'higher'}"
    return f"at {'least' if allowed_side(gate) == 'above' else 'most'} {amount(gate)}"


def amount(gate: Gate) -> str:
    """The limit without a sign: ``5 pp``."""
    unit = value_unit(gate)
    return unit.difference(gate["limit"]).removeprefix("+") if is_difference(gate) else unit.value(gate["limit"])


def level(gate: Gate, side: Literal["baseline", "candidate"]) -> str:
    """The value of one model: ``29 of 32`` where it is a share of counted items, else the number and its unit."""
    value, n = gate[side], gate["n"]
    unit = unit_named(gate["unit"])
    if value is None:
        return MISSING
    if unit is SHARE and gate["kind"] == "non_inferiority" and n:
        count = value * n
        if abs(count - round(count)) < 1e-6 * max(n, 1):
            return f"{round(count)} of {n}"
    return unit.value(value)


def limit_words(gate: Gate) -> str:
    """The limit alone, as a drawing or a headline has it."""
    unit = value_unit(gate)
    return f"limit {unit.difference(boundary(gate)) if is_difference(gate) else unit.value(gate['limit'])}"


def change(gate: Gate) -> str:
    """How the candidate differs, in the terms that the gate judges: percentage points, a factor, or the unit."""
    if gate["kind"] == "ratio":
        return RATIO.value(gate["value"])
    return unit_named(gate["unit"]).difference(gate["difference"])
