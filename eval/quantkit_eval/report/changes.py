"""How much the answers changed, flipped or not, beside what changes when nothing does: the noise floor."""

from quantkit_eval.record_types import Changes
from quantkit_eval.report.gates import title
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.quantities import MISSING, number


def change_rows(run: ReportInput) -> list[dict[str, str]]:
    """A row a suite: texts that changed, items that flipped, where the texts part, the noise floor."""
    floor = run.verdict["noise_floor"]
    by_suite = {entry["suite"]: entry for entry in floor["changes"]} if floor and not _is_self(run) else {}
    return [
        {
            "suite": title(entry["suite"]),
            "code": entry["suite"],
            "changed": _of(entry["changed"], entry["n"]),
            "regressed": number(entry["regressed"]),
            "improved": number(entry["improved"]),
            "divergence": number(entry["median_divergence"]),
            "floor": _floor(by_suite.get(entry["suite"])),
        }
        for entry in run.verdict["changes"]
    ]


def noise_line(run: ReportInput) -> str:
    """What the noise floor is, in a sentence; empty if none was measured."""
    floor = run.verdict["noise_floor"]
    if floor is None:
        return ""
    changed, n = (sum(entry[key] for entry in floor["changes"]) for key in ("changed", "n"))
    flipped = sum(entry["regressed"] + entry["improved"] for entry in floor["changes"])
    found = f"{number(changed)} of {number(n)} answers are another text, {number(flipped)} flipped"
    if floor["kl_mean_nats"] is not None:
        found += f", the mean KL divergence is {number(floor['kl_mean_nats'])} nats a token"
    if _is_self(run):
        return f"Noise floor: this run compares a model with itself; {found}. No gate may fail on it."
    return f"Noise floor: between two evaluations of the original, {found}. As much as that is no damage."


def _is_self(run: ReportInput) -> bool:
    return run.verdict["baseline"].get("model") == run.verdict["candidate"].get("model")


def _floor(entry: Changes | None) -> str:
    if entry is None:
        return MISSING
    return f"{_of(entry['changed'], entry['n'])}, {number(entry['regressed'] + entry['improved'])} flipped"


def _of(count: int, n: int) -> str:
    return f"{number(count)} of {number(n)}"
