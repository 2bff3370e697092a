"""Broken JSON, to be corrected without a change of its data."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.calibration.structured.extraction import draw_spelling
from quantkit.calibration.structured.layout import draw_layout
from quantkit.calibration.structured.scenario import Scenario, draw_values
from quantkit.calibration.structured.shape import assemble
from quantkit.calibration.structured.task import Sample, Task, wordings
from quantkit.calibration.structured.vocabulary import load

_MEMBER_END = re.compile(r',(?=\s*")')
_KEY = re.compile(r'"(\w+)":')


def _drop(pattern: re.Pattern[str], text: str, rng: random.Random, replacement: str = "") -> str:
    """The text without one of the pattern's matches, drawn."""
    found = rng.choice(list(pattern.finditer(text)))
    return text[: found.start()] + replacement + text[found.end() :]


def _python_words(text: str) -> str:
    return text.replace(": true", ": True").replace(": false", ": False").replace(": null", ": None")


BREAKS: Sequence[Callable[[str, random.Random], str]] = (
    lambda text, rng: text.rstrip("}\n "),
    lambda text, rng: text.rstrip("}\n ") + ",}",
    lambda text, rng: _drop(_MEMBER_END, text, rng),
    lambda text, rng: _KEY.sub(r"\1:", text),
    lambda text, rng: text.replace('"', "'") if "'" not in text else text[:-1],
    lambda text, rng: _drop(re.compile(r'(?<=\w)":'), text, rng, ":"),
    lambda text, rng: _drop(re.compile(r'":'), text, rng, '" ='),
    lambda text, rng: _python_words(text) if re.search(": (true|false|null)", text) else text + "}",
    lambda text, rng: _drop(re.compile(r'"(?=[,}\n])'), text, rng) if re.search(r'"[,}\n]', text) else text[1:],
    lambda text, rng: _MEMBER_END.sub(";", text),
    lambda text, rng: text[1:],
)


def repair_task(scenario: Scenario, rng: random.Random) -> Task:
    """JSON with one kind of fault."""
    spelling, layout, broken_layout = draw_spelling(rng), draw_layout(rng), rng.choice([None, None, 2])
    keys = rng.sample(list(scenario.fields), rng.randint(3, min(6, len(scenario.fields))))
    fields = {key: scenario.fields[key] for key in keys}
    request = rng.choice(load("tasks")["repair"])

    def sample(rng: random.Random) -> Sample:
        drawn = draw_values(fields, rng, scenario.language)
        value: dict[str, Any] = spelling.value({key: item.value for key, item in drawn.items()})
        if rng.random() < 0.25:
            value[rng.choice(list(value))] = None
        text = json.dumps(value, ensure_ascii=False, indent=broken_layout)
        return Sample(rng.choice(BREAKS)(text, rng), layout.dump(value), value)

    instruction = assemble([request, *layout.told(wordings("en"), rng)])
    return Task("repair", instruction, "input", sample)
