"""The report as Markdown for a pull request: verdict, gates, the worst flipped items, provenance.

What a model wrote stands only inside fenced code whose fence is longer than any inside, so that it can neither end the
fence nor mention a user nor open an HTML element; everything else goes through ``plain``.
"""

import re
from collections.abc import Sequence

from quantkit_eval.record_types import Outcome
from quantkit_eval.report.changes import noise_line
from quantkit_eval.report.flips import Flip, Side, flipped_items, shortened
from quantkit_eval.report.gates import OUTCOME_WORDS, change, level, metric_words, needed, requirement, subject
from quantkit_eval.report.html import flip_words
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.provenance import model_name
from quantkit_eval.report.quantities import instant, shorten
from quantkit_eval.report.sections import interval_line, test_line
from quantkit_eval.report.wording import facts, headline

TOP_ITEMS = 5
TEXT_LIMIT = 600  # characters of a prompt or an output
_SIGNS: dict[Outcome, str] = {"pass": "✅", "fail": "❌", "inconclusive": "⚠️"}
_MENTIONS = "@#!~$&"  # followed by a name or number, a forge makes a link of it and may notify somebody
_WORD_JOINER = "&#8288;"
_ACTIVE = re.compile(r"[\\`*_\[\]<>#!|&~@$]|:(?=[/a-z+-])|(?<=www)\.", re.IGNORECASE)
_NAMED_REFERENCES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def render_markdown(run: ReportInput) -> str:
    """The summary of a run whose texts were made visible."""
    outcome = run.verdict["verdict"]
    lines = [
        f"## {_SIGNS[outcome]} {OUTCOME_WORDS[outcome]}: {plain(headline(run))}",
        "",
        f"**{plain(model_name(run.candidate['model']))}** compared with {plain(model_name(run.baseline['model']))}",
        "",
        *_facts(run),
        *_gates(run),
        *_unjudged(run),
        *([plain(line), ""] if (line := noise_line(run)) else []),
        *_flips(flipped_items(run)),
        _provenance(run),
    ]
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line: every sign that could do something is a character reference.

    References, not backslashes, because these also hold inside tables. They do not stop forges from finding mentions of
    users and issues, which are looked for in the rendered text; an invisible word joiner after the sign does.
    """
    return _ACTIVE.sub(_reference, " ".join(text.split()))


def _reference(match: re.Match[str]) -> str:
    sign = match.group()
    joined = sign in _MENTIONS and match.string[match.end() : match.end() + 1].isalnum()
    return _NAMED_REFERENCES.get(sign, f"&#{ord(sign)};") + (_WORD_JOINER if joined else "")


def _facts(run: ReportInput) -> list[str]:
    found = facts(run)
    if not found:
        return []
    return [*(f"- {plain(fact.name)}: **{plain(fact.value)}** ({plain(fact.detail)})" for fact in found), ""]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], ends: str) -> list[str]:
    """A table; ``ends`` has a letter for each column: l or r."""
    rule = ["---:" if end == "r" else "---" for end in ends]
    body = [[plain(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (list(head), rule, *body)]


def _gates(run: ReportInput) -> list[str]:
    rows = [
        [
            f"{_SIGNS[gate['verdict']]} {OUTCOME_WORDS[gate['verdict']]}",
            f"{subject(gate['suite'])}: {metric_words(gate['metric'])}",
            level(gate, "baseline"),
            level(gate, "candidate"),
            change(gate),
            interval_line(gate),
            requirement(gate),
            " · ".join(part for part in (test_line(gate), needed(gate)) if part),
        ]
        for gate in run.verdict["gates"]
    ]
    if not rows:
        return []
    head = ["Verdict", "Gate", "Baseline", "Candidate", "Difference", "Interval", "Limit", "Test"]
    return [*_table(head, rows, "llrrrlll"), ""]


def _unjudged(run: ReportInput) -> list[str]:
    names = [f"{entry['suite']}.{entry['metric']}" for entry in run.verdict["unjudged"]]
    return [f"Measured, not judged: {', '.join(plain(name) for name in names)}.", ""] if names else []


def _flips(flips: Sequence[Flip]) -> list[str]:
    if not flips:
        return ["No item flipped.", ""]
    top = flips[:TOP_ITEMS]
    words = f"{len(flips)} flipped items" if len(flips) != 1 else "1 flipped item"
    which = f", the first {len(top)}" if len(flips) > len(top) else ""
    lines = ["<details>", f"<summary>{words}{which}</summary>", "", plain(flip_words(flips)), ""]
    for flip in top:
        lines += _item(shortened(flip, TEXT_LIMIT))
    return [*lines, "</details>", ""]


def _item(flip: Flip) -> list[str]:
    prompt = _fenced([("", flip.prompt), ("gold: ", flip.gold)], "text")
    outputs = _fenced([("- ", _text(flip.baseline)), ("+ ", _text(flip.candidate))], "diff")
    return [
        f"**{plain(flip.direction)}: {plain(shorten(f'{flip.suite} / {flip.id}', 120))}**",
        "",
        *prompt,
        "",
        *outputs,
        "",
    ]


def _text(side: Side) -> str:
    text = "".join(segment.text for segment in side.segments) or "(empty)"
    return ("[…] " if side.before else "") + text + (" […]" if side.after else "")


def _fenced(texts: Sequence[tuple[str, str]], language: str) -> list[str]:
    """Fenced code; the fence is longer than any run of backticks inside."""
    lines = [f"{sign}{line}" for sign, text in texts for line in text.split("\n")]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + language, *lines, fence]


def _provenance(run: ReportInput) -> str:
    checkpoint = run.checkpoint or {}
    parts = [f"quantkit {checkpoint['quantkit_version']}"] if checkpoint.get("quantkit_version") else []
    for side, result in (("baseline", run.baseline), ("candidate", run.candidate)):
        revision = result["model"].get("revision") or result["model"].get("checkpoint_hash")
        if revision:
            parts.append(f"{side} {str(revision)[:12]}")
    parts.append(f"seed {run.candidate['seed']}")
    parts.append(f"{run.candidate['machine']['cpu']}, {run.candidate['machine']['num_threads']} threads")
    parts.append(instant(run.verdict["created"]))
    return f"<sub>{plain(' · '.join(parts))}</sub>"
