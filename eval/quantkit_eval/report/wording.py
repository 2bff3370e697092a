"""The verdict in one sentence that needs no statistics to understand, and the few facts beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from quantkit_eval.record_types import Gate, Outcome
from quantkit_eval.report.gates import (
    amount,
    is_beyond,
    level,
    limit_words,
    metric_words,
    short_metric,
    subject,
    title,
    value_unit,
)
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.quantities import RATIO, TIMES, number, ratio, size

_NAMED = 2  # gates that the sentence spells out
_BROKEN = 0.5  # what keeps less than this share of the baseline's value is broken, not just worse


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of the summary: what, how much, and the numbers behind it."""

    name: str
    value: str
    detail: str


def headline(run: ReportInput) -> str:
    """What the verdict means: ``structured output broke: exactly right 29 of 32 → 0 of 32``."""
    verdict = run.verdict["verdict"]
    gates = run.verdict["gates"]
    if not gates:
        return "the recipe asked for no gate, so nothing was judged"
    if verdict == "pass":
        held = "the gate held" if len(gates) == 1 else f"all {number(len(gates))} gates held"
        return f"{held}: {_listed(gates, verdict)}"
    return _listed([gate for gate in gates if gate["verdict"] == verdict] or gates, verdict)


def _listed(gates: Sequence[Gate], verdict: Outcome) -> str:
    named = sorted(gates, key=lambda gate: gate["kind"] != "non_inferiority")[:_NAMED]  # answers before numbers
    phrase = {"pass": _held, "fail": _failed, "inconclusive": _undecided}[verdict]
    sentence = "; ".join(phrase(gate) for gate in named)
    rest = len(gates) - len(named)
    if not rest or verdict == "pass":
        return sentence
    return f"{sentence}; and {number(rest)} more {'gate' if rest == 1 else 'gates'}"


def _before_after(gate: Gate) -> str:
    return f"{level(gate, 'baseline')} → {level(gate, 'candidate')}"


def _held(gate: Gate) -> str:
    if gate["kind"] == "non_inferiority":
        return f"{subject(gate['suite'])} {_before_after(gate)}"
    return f"{short_metric(gate['metric'])} {value_unit(gate).value(gate['value'])} ({limit_words(gate)})"


def _failed(gate: Gate) -> str:
    if gate["kind"] == "non_inferiority":
        before, after = gate["baseline"], gate["candidate"]
        broke = before and after is not None and gate["direction"] == "higher_is_better" and after < _BROKEN * before
        found = f"{_before_after(gate)} {metric_words(gate['metric'])}"
        unsure = "" if is_beyond(gate) else f", which is proven; whether by more than the {amount(gate)} allowed is not"
        return f"{subject(gate['suite'])} {'broke' if broke else 'got worse'}: {found}{unsure}"
    value = value_unit(gate).value(gate["value"])
    if gate["kind"] == "ratio":
        slow = "slower" if gate["direction"] == "higher_is_better" else "higher"
        return f"{metric_words(gate['metric'])} is {slow} than allowed ({value}, {limit_words(gate)})"
    drifted = f"{subject(gate['suite'])} drifted" if gate["suite"] == "nll" else f"{subject(gate['suite'])} got worse"
    return f"{drifted} ({short_metric(gate['metric'])} {value}, {limit_words(gate)})"


def _undecided(gate: Gate) -> str:
    more = f"; about {number(gate['items_needed'])} would do" if gate["items_needed"] else ""
    if gate["kind"] == "non_inferiority":
        if gate["n"] and gate["items_needed"] is None:  # no number of items would decide
            return f"{subject(gate['suite'])} has no more to lose than is allowed ({_before_after(gate)})"
        found = f"{subject(gate['suite'])} held ({_before_after(gate)})"
        return f"{number(gate['n'])} items are too few to tell whether {found}{more}"
    return f"{short_metric(gate['metric'])} is undecided ({value_unit(gate).value(gate['value'])}, {limit_words(gate)})"


def because(run: ReportInput) -> str:
    """The verdict's own reason without the gates' reasons, which stand beside the gates."""
    reason = run.verdict["reason"]
    for gate in run.verdict["gates"]:
        reason = reason.replace(gate["reason"], "")
    return " ".join(reason.split())


def facts(run: ReportInput) -> list[Fact]:
    """Size, answers, drift and speed: at most one each, and only what was measured."""
    return [*_size_fact(run), *_answers_fact(run), *_drift_fact(run), *_speed_fact(run)]


def sizes(run: ReportInput) -> tuple[int, int, str] | None:
    """Bytes before and after, and what they count; None if the candidate's record does not say."""
    file = (run.checkpoint or {}).get("gguf") or {}
    if file.get("source_bytes") and file.get("files"):
        return file["source_bytes"], sum(part["bytes"] for part in file["files"]), "weights on disk"
    layers = (run.checkpoint or {}).get("layers") or []
    before = sum(layer.get("bytes_before") or 0 for layer in layers)
    after = sum(layer.get("bytes_after") or 0 for layer in layers)
    if not before or not after:
        return None
    if run.weights_bytes is None or run.weights_bytes < after:
        return before, after, "quantized layers only"
    return run.weights_bytes - after + before, run.weights_bytes, "weights on disk"


def _size_fact(run: ReportInput) -> list[Fact]:
    both = sizes(run)
    if both is None:
        return []
    before, after, counted = both
    detail = f"{size(before)} → {size(after)}, {counted}"
    origin = run.baseline["model"].get("dequantized_from")
    if origin:
        detail += f"; before: 16 bits, dequantized from a file of {size(origin['file_bytes'])}"
    return [Fact("Size", f"{number(round(before / after, 2))}{TIMES} smaller", detail)]


def _answers_fact(run: ReportInput) -> list[Fact]:
    gates = [gate for gate in run.verdict["gates"] if gate["kind"] == "non_inferiority"]
    if not gates:
        return []
    gate = next((gate for gate in gates if gate["verdict"] == run.verdict["verdict"]), gates[0])  # the deciding one
    value = _before_after(gate)
    counts = f" of {gate['n']}"
    if value.count(counts) == 2:
        value = value.replace(counts, "", 1)
    return [Fact(title(gate["suite"]), value, metric_words(gate["metric"]))]


def _drift_fact(run: ReportInput) -> list[Fact]:
    nll = run.candidate["suites"].get("nll")
    metric = nll["metrics"].get("kl_mean_nats") if nll else None
    if not metric or metric["value"] is None:
        return []
    gate = next((gate for gate in run.verdict["gates"] if gate["metric"] == "kl_mean_nats"), None)
    limit = limit_words(gate) if gate else "not judged"
    return [Fact("Drift of predictions", f"{number(metric['value'])} nats", f"mean KL, {limit}")]


def _speed_fact(run: ReportInput) -> list[Fact]:
    if run.throughput is None:
        return []
    batch = min(run.throughput["batches"].values(), key=lambda entry: entry["batch_size"])
    rates = " → ".join(number(median(batch[side])) for side in ("baseline_tok_per_s", "candidate_tok_per_s"))
    detail = f"{rates} tok/s, ratio of paired rounds" + (
        f", {RATIO.interval(batch['ratio']['interval'])}" if batch["ratio"]["interval"] else ""
    )
    return [Fact(f"Speed at batch {number(batch['batch_size'])}", ratio(batch["ratio"]["value"]), detail)]
