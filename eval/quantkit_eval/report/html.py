"""The report as one HTML file that needs nothing else: style, script and drawings are inside, and nothing may load."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from quantkit_eval.report import provenance, sections
from quantkit_eval.report.changes import change_rows, noise_line
from quantkit_eval.report.flips import Flip, Side, flipped_items, shortened
from quantkit_eval.report.gates import OUTCOME_WORDS
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.load_page import crossover_lines, load_plots
from quantkit_eval.report.plain_page import environment
from quantkit_eval.report.quantities import instant, number, shorten
from quantkit_eval.report.wording import because, facts, headline

PAGE_BYTES = 1_900_000  # what the flipped items may fill the page up to; the names of those that do not fit count
TEXT_LIMITS = (6000, 3000, 1500, 800, 400, 200)  # characters of each text; the largest that fits is used
MAX_NAMES = 4000  # items listed by name where texts do not fit
FIRST_ITEMS, OPEN_ITEMS = 20, 3
_COUNTS = re.compile(r"\S+ of \S+ → \S+ of \S+|(?<=[(,] )\S+ \S+(?=[,)])")
EXCERPT = 90  # characters of a prompt in a closed item
LAST_TURN = "\n\n[user]\n"  # of a chat, where what differs from item to item begins


def render_html(run: ReportInput) -> str:
    """The page for a run whose texts were made visible. The same input gives the same page."""
    template = environment().get_template("report.html.j2")
    flips = flipped_items(run)
    style, script = _data("report.css"), _data("report.js")
    page = _page(run, flips) | {
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
    }
    without_items = template.render(page | _listed(flips, []))
    return template.render(page | _listed(flips, _fitting_items(flips, PAGE_BYTES - len(without_items.encode()))))


def _listed(flips: Sequence[Flip], rendered: Sequence[Markup]) -> dict[str, Any]:
    """The items as the template lists them: open or closed at once, behind one more fold, by name only."""
    rest = len(flips) - len(rendered)
    return {
        "first_items": rendered[:FIRST_ITEMS],
        "more_items": rendered[FIRST_ITEMS:],
        "listed_items": flips[len(rendered) : len(rendered) + MAX_NAMES],
        "listed_total": rest,
    }


def _page(run: ReportInput, flips: Sequence[Flip]) -> dict[str, Any]:
    """Everything that the template names, without the items."""
    page: dict[str, Any] = {
        "outcome": run.verdict["verdict"],
        "outcome_word": OUTCOME_WORDS[run.verdict["verdict"]],
        "headline": _unbroken(headline(run)),
        "facts": facts(run),
        "reason": because(run),
        "name": provenance.model_name(run.candidate["model"]),
        "scheme": run.candidate["model"].get("scheme"),
        "baseline_name": provenance.model_name(run.baseline["model"]),
        "created": run.verdict["created"],
        "when": instant(run.verdict["created"]),
        "gates": sections.gate_rows(run),
        "confidence_line": sections.confidence_line(run),
        "unjudged": sections.unjudged_rows(run),
        "unjudged_confidence": sections.unjudged_confidence(run),
        "absent": sections.absences(run),
        "changes": change_rows(run),
        "noise_line": noise_line(run),
        "flip_total": len(flips),
        "flip_words": flip_words(flips),
        "suites": sorted({flip.suite for flip in flips}),
        "histograms": sections.histogram_plots(run),
        "throughput": sections.throughput_plot(run),
        "load_lines": crossover_lines(run.load) if run.load else [],
        "load_plots": load_plots(run.load) if run.load else [],
        "layers": sections.layer_section(run),
        "recipe": (run.checkpoint or {}).get("recipe"),
        "key_rows": provenance.key_rows(run),
        "quantization": provenance.quantization_rows(run),
        "evaluation": provenance.evaluation_rows(run),
        "throughput_rows": provenance.throughput_rows(run),
        "files": provenance.file_rows(run),
    }
    sections_there = [
        ("gates", "Why", True),
        ("flipped", "Flipped items", True),
        ("distributions", "Distributions", page["histograms"]),
        ("throughput", "Throughput", page["throughput"] or page["load_plots"]),
        ("layers", "Layers", page["layers"]),
        ("provenance", "Recipe and provenance", True),
    ]
    return page | {"contents": [(anchor, words) for anchor, words, there in sections_there if there]}


def _unbroken(sentence: str) -> str:
    """No line break inside ``29 of 32 → 0 of 32``."""
    return _COUNTS.sub(lambda match: match.group().replace(" ", "\u00a0"), sentence)


def flip_words(flips: Sequence[Flip]) -> str:
    """How many items regressed and improved, as a sentence."""
    regressed = sum(flip.direction == "regressed" for flip in flips)
    improved = len(flips) - regressed
    return (
        f"{number(regressed)} {'item' if regressed == 1 else 'items'} that only the baseline got right (regressed), "
        f"{number(improved)} that only the candidate got right (improved)."
    )


def _data(name: str) -> str:
    return files("quantkit_eval.report").joinpath("templates", name).read_text(encoding="utf-8").strip()


def _csp_hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    changed: bool
    divergence: bool


def _fitting_items(flips: Sequence[Flip], nbytes: int) -> list[Markup]:
    """The items as HTML: all of them with the longest texts that fit, or as many as fit with the shortest."""
    for limit in TEXT_LIMITS:
        rendered = []
        room = nbytes
        for index, flip in enumerate(flips):
            text = _render_item(shortened(flip, limit), opened=index < OPEN_ITEMS)
            room -= len(text.encode())
            if room < 0:
                break
            rendered.append(text)
        if len(rendered) == len(flips):
            break
    return rendered


def _render_item(flip: Flip, *, opened: bool) -> Markup:
    if flip.divergence is None:
        divergence = "none: both outputs are equal"
    else:
        divergence = f"after {number(flip.divergence)} equal characters"
    view = {
        "suite": flip.suite,
        "id": flip.id,
        "direction": flip.direction,
        "open": opened,
        "excerpt": shorten(flip.prompt.rpartition(LAST_TURN)[2], EXCERPT),
        "notes": ", ".join((flip.candidate if flip.direction == "regressed" else flip.baseline).notes),
        "prompt": flip.prompt,
        "gold": flip.gold,
        "divergence": divergence,
        "baseline": _output(flip.baseline, flip.divergence),
        "candidate": _output(flip.candidate, flip.divergence),
    }
    macro = environment().get_template("parts.html.j2").module.item  # type: ignore[attr-defined]
    return Markup(str(macro(view)).strip())


def _output(side: Side, divergence: int | None) -> dict[str, Any]:
    """The segments; the one that holds the divergence is split there and its second part carries the mark."""
    parts = []
    position = side.before
    for segment in side.segments:
        cut = (divergence if divergence is not None else -1) - position
        if 0 < cut < len(segment.text):
            parts.append(_Part(segment.text[:cut], segment.changed, False))
            parts.append(_Part(segment.text[cut:], segment.changed, True))
        else:
            parts.append(_Part(segment.text, segment.changed, cut == 0))
        position += len(segment.text)
    if divergence == position and not side.after:  # the other output goes on where this one ends
        parts.append(_Part("", False, True))
    return {
        "parts": parts,
        "empty": not side.segments,
        "before": number(side.before) if side.before else "",
        "after": number(side.after) if side.after else "",
        "notes": side.notes,
    }
