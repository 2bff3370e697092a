"""What a search ends with: the outcome in words, the winner's recipe, the result file and the reports."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.recipe import Recipe
from quantkit.recipe.variants import variant_text
from quantkit.search.candidates import Candidate
from quantkit.search.folder import PAGE_FILE, RESULT_FILE, WINNER_FILE, SearchFolder
from quantkit.search.page import render_page
from quantkit.search.pareto import mark_front
from quantkit_eval.compare import EXIT_CODES
from quantkit_eval.record_types import Outcome, Verdict
from quantkit_eval.records import write_atomically
from quantkit_eval.report import load_report_input, write_report

SCHEMA_VERSION = 1
NOT_TRIED = {"status": "not tried", "reason": "", "rounds": 0, "scores": {}, "seconds": 0.0}
GATE_KEYS = ("name", "suite", "verdict", "baseline", "candidate", "interval", "limit", "n", "reason")


def certified_record(verdict: Verdict, number: int) -> dict[str, Any]:
    """A verdict as the journal and the result hold it."""
    gates = [{key: dict(gate)[key] for key in GATE_KEYS} for gate in verdict["gates"]]
    return {"attempt": number, "verdict": verdict["verdict"], "reason": verdict["reason"], "gates": gates}


def conclude(
    recipe: Recipe,
    candidates: Sequence[Candidate],
    left_out: Sequence[str],
    trials: Mapping[str, Mapping[str, Any]],
    winner: str | None,
    stopped: str | None,
    alpha: float,
) -> dict[str, Any]:
    """The content of search.json, but for what was asked and how long it took.

    Args:
        recipe: of the search.
        candidates: all of them, in order.
        left_out: of the ladder, with reasons.
        trials: candidate -> its record, ``certified`` in it if it came so far.
        winner: name of the candidate that passed.
        stopped: why the search ended before its last candidate; None if it did not.
        alpha: one-sided error of a bound in a certification.
    """
    rows = [
        {"name": one.name, "planned_bytes": one.nbytes, "planned_bits": one.bits}
        | NOT_TRIED
        | {key: value for key, value in trials.get(one.name, {}).items() if key != "files"}
        for one in candidates
    ]
    mark_front(rows)
    outcome, reason = _outcome(rows, winner, stopped)
    return {
        "schema_version": SCHEMA_VERSION,
        "outcome": outcome,
        "exit_code": EXIT_CODES[outcome],
        "reason": reason,
        "model": recipe.require_model(),
        "seed": recipe.require_search().seed,
        "limits": {key: recipe.gates.limits[key] for key in ("max_drop_pp", "max_kl_mean_nats")},
        "alpha": alpha,
        "speed": recipe.require_search().speed.model_dump(),
        "attempts": {
            "made": sum("certified" in row for row in rows),
            "allowed": recipe.require_search().certification.attempts,
        },
        "num_tried": len(trials),
        "left_out": list(left_out),
        "trials": rows,
        "winner": winner,
    }


def _outcome(rows: Sequence[Mapping[str, Any]], winner: str | None, stopped: str | None) -> tuple[Outcome, str]:
    """Fail only if every candidate is shown to be beyond a limit."""
    tried = [row for row in rows if row["status"] != "not tried"]
    if winner is not None:
        row = next(row for row in rows if row["name"] == winner)
        attempt = row["certified"]["attempt"]
        return "pass", f"{winner} passes: {len(tried)} of {len(rows)} candidates tried, certified in attempt {attempt}."
    is_shown = [row["status"] == "hopeless" or row.get("certified", {}).get("verdict") == "fail" for row in tried]
    if all(is_shown) and len(tried) == len(rows):
        return "fail", f"None of {len(rows)} candidates keeps the limits."
    open_rows = [row["name"] for row, shown in zip(tried, is_shown, strict=True) if not shown]
    undecided = f"; not decided: {', '.join(open_rows)}" if open_rows else ""
    why = stopped or "no candidate is certified"
    return "inconclusive", f"After {len(tried)} of {len(rows)} candidates {why}{undecided}."


def write_outcome(
    recipe: Recipe, folder: SearchFolder, candidates: Sequence[Candidate], document: dict[str, Any]
) -> None:
    """Write winner.yaml, search.json, search.html and the recipe's reports on the candidate that was certified last.

    The paths are added to the document.
    """
    paths: dict[str, str] = {"page": str(folder.root / PAGE_FILE)}
    certified = [row["name"] for row in document["trials"] if "certified" in row]
    if certified:
        last = certified[-1]
        checkpoint = folder.trial(last) / "checkpoint"
        run = load_report_input(folder.certification(last), checkpoint if checkpoint.is_dir() else None)
        written = write_report(run, recipe.report.html, recipe.report.junit, recipe.report.markdown)
        paths["reports"] = ", ".join(map(str, written))
    if document["winner"] is not None:
        chosen = next(one for one in candidates if one.name == document["winner"])
        comment = (
            f"{chosen.name}: of {document['num_tried']} candidates, tried by size, the first that passed the gates."
        )
        text = variant_text(chosen.data, comment, "Found by `quantkit search` (docs/SEARCH.md).")
        write_atomically(folder.root / WINNER_FILE, text)
        paths |= {
            "winner": str(folder.root / WINNER_FILE),
            "checkpoint": str(folder.trial(chosen.name) / "checkpoint"),
        }
    document["paths"] = paths
    write_atomically(folder.root / PAGE_FILE, render_page(document))
    write_atomically(folder.root / RESULT_FILE, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
