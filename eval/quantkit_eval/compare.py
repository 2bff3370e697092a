"""Baseline against candidate: refuses what cannot be compared, judges every gate, and says what nobody asked about."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from quantkit_eval.comparability import Evaluation, check_comparable, check_measured_models, shared_suites
from quantkit_eval.errors import IncomparableResults, OptionError
from quantkit_eval.gates import Gates, judge_drop, judge_kl, judge_throughput
from quantkit_eval.pairing import changes, count, flipped, graded_suites, noise_floor, pair_up, primary_metric
from quantkit_eval.record_types import Gate, NoiseFloor, Outcome, Throughput, Unjudged, Verdict
from quantkit_eval.records import REFERENCE_FILE, SCHEMA_VERSION, read_throughput, utc_now
from quantkit_eval.statistics import ALPHA, holm

EXIT_CODES: dict[Outcome, int] = {"pass": 0, "fail": 3, "inconclusive": 4}


def compare(
    baseline: Path,
    candidate: Path,
    gates: Mapping[str, Any],
    throughput: Path | None = None,
    control: Path | None = None,
    alpha: float = ALPHA,
) -> Verdict:
    """Judge a candidate against its baseline.

    Args:
        baseline: folder of the baseline's records.
        candidate: folder of the candidate's records.
        gates: as in a recipe: ``suites``, ``max_drop_pp``, ``max_kl_mean_nats``, ``min_throughput_ratio``.
        throughput: throughput.json of the two, if it was measured.
        control: folder of a second evaluation of the baseline's model (another batch size, another day), for the noise
            floor. A comparison of a model with itself is its own.
        alpha: one-sided error of every bound and test but those of speed; less where several candidates may be judged.

    Returns:
        The content of verdict.json, for ``records.write_verdict``.

    Raises:
        OptionError: a gate is unknown or asks about what was not run.
        RecordError: a record is missing or damaged.
        IncomparableResults: items, prompts, template, sampling, reference or models do not match.
    """
    wanted = Gates.parse(gates)
    before, after = Evaluation.read(baseline), Evaluation.read(candidate)
    check_comparable(before, after)
    speeds = read_throughput(throughput) if throughput else None
    if speeds:
        check_measured_models(speeds, before, after)
    _check_gates_were_run(wanted, before, after, speeds)
    judged = [
        *_judge_drops(wanted, before, after, alpha),
        *_judge_kl(wanted, after, alpha),
        *_judge_speeds(wanted, speeds),
    ]
    floor = _noise_floor(before, after, Evaluation.read(control) if control else None)
    verdict: Outcome = "pass"
    for outcome in ("inconclusive", "fail"):
        if any(gate["verdict"] == outcome for gate in judged):
            verdict = outcome
    return {
        "schema_version": SCHEMA_VERSION,
        "created": utc_now(),
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "reason": _explain(verdict, judged),
        "alpha": alpha,
        "gates": judged,
        "unjudged": _unjudged(judged, before, after, speeds),
        "flipped": [item for suite in graded_suites(before, after) for item in flipped(suite, before, after)],
        "changes": changes(before, after),
        "noise_floor": floor,
        "baseline": before.party(),
        "candidate": after.party(),
    }


def _check_gates_were_run(gates: Gates, baseline: Evaluation, candidate: Evaluation, speeds: Throughput | None) -> None:
    shared = shared_suites(baseline, candidate)
    asked = [("suites", suite) for suite in gates.suites] + [("max_drop_pp", suite) for suite in gates.max_drop_pp]
    if gates.max_kl_mean_nats is not None:
        asked.append(("max_kl_mean_nats", "nll"))
    for gate, suite in asked:
        if suite not in shared:
            for side in (baseline, candidate):
                if suite in side.result.get("not_offered", {}):
                    raise OptionError(
                        f"gate {gate} asks about suite {suite!r}, which {side.folder} lacks: "
                        f"{side.result['not_offered'][suite]}",
                        fix="Drop the gate",
                    )
            raise OptionError(
                f"gate {gate} asks about suite {suite!r}, but both were evaluated on {', '.join(shared) or 'no suite'}",
                fix=f"Evaluate both on {suite!r} or drop the gate",
            )
    graded = graded_suites(baseline, candidate)
    for suite in gates.max_drop_pp:
        if suite not in graded:
            raise OptionError(
                f"gate max_drop_pp.{suite}: the suite has no right and wrong answers",
                fix=f"Choose from {', '.join(graded)}" if graded else "Evaluate both on a suite that has",
            )
    if gates.max_kl_mean_nats is not None:
        _check_divergence(baseline, candidate)
    for batch in gates.min_throughput_ratio:
        if speeds is None:
            raise OptionError(
                f"gate min_throughput_ratio.{batch}: no throughput of these two models was measured",
                fix="Measure it with `quantkit bench BASELINE CANDIDATE -o FILE` and give --throughput FILE",
            )
        if batch not in speeds["batches"]:
            raise OptionError(
                f"gate min_throughput_ratio.{batch}: that batch was not measured",
                fix=f"Choose from {', '.join(speeds['batches'])}",
            )


def _check_divergence(baseline: Evaluation, candidate: Evaluation) -> None:
    """The candidate's KL must be there and be the one to this baseline."""
    if not candidate.measures_divergence():
        steps = [f"`quantkit eval CANDIDATE -o {candidate.folder} --reference {baseline.folder}`"]
        if not (baseline.folder / REFERENCE_FILE).is_file():
            steps.insert(0, f"`quantkit eval BASELINE -o {baseline.folder}`")
        raise OptionError(
            f"gate max_kl_mean_nats: {candidate.folder} holds no divergence from the baseline; a server's URL cannot "
            "give one, because it does not tell its distributions",
            fix=f"Run {', then '.join(steps)} with the suite nll and models given as folders; or drop the gate",
        )
    if baseline.measures_divergence():
        raise IncomparableResults(
            f"the baseline {baseline.folder} was itself measured against a reference, so the candidate's divergence is "
            "not the one to this baseline",
            fix="Evaluate the baseline without a reference",
        )


def _noise_floor(baseline: Evaluation, candidate: Evaluation, control: Evaluation | None) -> NoiseFloor | None:
    if control is None:
        is_same = baseline.result["model"] == candidate.result["model"]
        return noise_floor(baseline, candidate) if is_same else None
    if control.folder.resolve() == baseline.folder.resolve():
        raise OptionError(
            f"the control {control.folder} is the baseline itself, so nothing could differ",
            fix="Evaluate the baseline's model once more, with another --batch-items, into a folder of its own",
        )
    check_comparable(baseline, control)
    if control.result["model"] != baseline.result["model"]:
        raise IncomparableResults(
            f"the control {control.folder} is of another model than the baseline: {control.result['model']}, "
            f"not {baseline.result['model']}",
            fix="Evaluate the baseline's model once more",
        )
    return noise_floor(baseline, control)


def _judge_drops(gates: Gates, baseline: Evaluation, candidate: Evaluation, alpha: float) -> list[Gate]:
    counts = {suite: count(pair_up(suite, baseline, candidate)) for suite in gates.max_drop_pp}
    adjusted = holm([counts[suite].p_value for suite in counts])
    return [
        judge_drop(suite, str(primary_metric(suite, baseline)), counts[suite], gates.max_drop_pp[suite], p_holm, alpha)
        for suite, p_holm in zip(counts, adjusted, strict=True)
    ]


def _judge_kl(gates: Gates, candidate: Evaluation, alpha: float) -> list[Gate]:
    if gates.max_kl_mean_nats is None:
        return []
    metrics = [sample["metrics"] for sample in candidate.samples["nll"]]
    means = [cast(float, window["kl_mean_nats"]) for window in metrics]  # there: Evaluation.read looked
    tokens = [cast(int, window["num_tokens"]) for window in metrics]
    return [judge_kl(means, tokens, gates.max_kl_mean_nats, alpha)]


def _judge_speeds(gates: Gates, speeds: Throughput | None) -> list[Gate]:
    if speeds is None:
        return []
    is_same_model = speeds["baseline"] == speeds["candidate"]
    return [
        judge_throughput(batch, speeds["batches"][batch], minimum, is_same_model)
        for batch, minimum in gates.min_throughput_ratio.items()
    ]


def _unjudged(
    judged: Sequence[Gate], baseline: Evaluation, candidate: Evaluation, speeds: Throughput | None
) -> list[Unjudged]:
    """Every metric of either result, and every batch, that no gate is about."""
    done = {(gate["suite"], gate["metric"]) for gate in judged}
    first, second = baseline.result["suites"], candidate.result["suites"]
    unjudged: list[Unjudged] = []
    for suite in [*first, *(suite for suite in second if suite not in first)]:
        before = first[suite]["metrics"] if suite in first else {}
        after = second[suite]["metrics"] if suite in second else {}
        unjudged += [
            {
                "suite": suite,
                "metric": name,
                "baseline": before[name]["value"] if name in before else None,
                "candidate": after[name]["value"] if name in after else None,
                "unit": metric["unit"],
            }
            for name, metric in (before | after).items()
            if (suite, name) not in done
        ]
    for name, batch in (speeds["batches"] if speeds else {}).items():
        if ("throughput", name) not in done:
            unjudged.append(
                {
                    "suite": "throughput",
                    "metric": name,
                    "baseline": median(batch["baseline_tok_per_s"]),
                    "candidate": median(batch["candidate_tok_per_s"]),
                    "unit": "tok_per_s",
                }
            )
    return unjudged


def _explain(verdict: Outcome, gates: Sequence[Gate]) -> str:
    """The verdict in a sentence or two: how many gates, and the reason of the first that decided."""
    if not gates:
        return "No gate was set, so nothing was judged; the measured numbers are listed as unjudged."
    if verdict == "pass":
        return "The gate passes." if len(gates) == 1 else f"All {len(gates)} gates pass."
    deciding = [gate for gate in gates if gate["verdict"] == verdict]
    word = "failed" if verdict == "fail" else "could not be decided"
    return f"{len(deciding)} of {len(gates)} gates {word}. {deciding[0]['reason']}"
