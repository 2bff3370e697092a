"""Facts of a short text as an object: flat, nested, or in another format than JSON; and questions about the text."""

import csv
import io
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from quantkit.calibration.structured.layout import draw_layout
from quantkit.calibration.structured.scenario import Field, Record, Scenario, draw_record, fill, keys_of
from quantkit.calibration.structured.shape import Spelling, assemble, describe, formats_told, show
from quantkit.calibration.structured.task import Exchange, Sample, Task, follow_up, pose, wordings
from quantkit.calibration.structured.values import join
from quantkit.calibration.structured.vocabulary import load

COMPLETE_SHARE = 0.5  # of the tasks ask only for what every text states
FOLLOW_UP_SHARE = 0.5  # of the questions follow an extraction, if its text has the answer
ENGLISH_SHARE = 0.4  # of the requests about a text in another language are in English


def draw_spelling(rng: random.Random) -> Spelling:
    """One time in five camelCase."""
    return Spelling(camel=rng.random() < 0.2)


def _language(scenario: Scenario, rng: random.Random) -> str:
    return "en" if rng.random() < ENGLISH_SHARE else scenario.language


def _choose_keys(scenario: Scenario, rng: random.Random, least: int, most: int) -> tuple[dict[str, Field], bool]:
    """Fields to ask for, in any order, and whether a text states all of them."""
    complete = rng.random() < COMPLETE_SHARE
    pool = list(scenario.fields)
    if complete:
        common = keys_of(rng.choice(scenario.patterns))
        pool = [key for key in pool if key in common]
    chosen = rng.sample(pool, min(len(pool), rng.randint(least, most)))
    if rng.random() < 0.5:
        chosen.sort(key=list(scenario.fields).index)
    return {key: scenario.fields[key] for key in chosen}, complete


def _records(scenario: Scenario, fields: Mapping[str, Field], complete: bool) -> Callable[[random.Random], Record]:
    return lambda rng: draw_record(scenario, rng, fields if complete else ())


def flat_task(scenario: Scenario, rng: random.Random) -> Task:
    """Some of a text's facts as a flat JSON object."""
    fields, complete = _choose_keys(scenario, rng, 3, 6)
    language, spelling, layout = _language(scenario, rng), draw_spelling(rng), draw_layout(rng)
    words, draw = wordings(language), _records(scenario, fields, complete)
    if rng.random() < 0.55:
        spec = describe(fields, spelling, words, rng, language)
    else:
        spec = show(fields, draw(rng).values(fields), spelling, words, rng, nullable=not complete)
    opener = rng.choice(words["openers"]).format(thing=scenario.thing, shape=rng.choice(words["object"]))
    missing = [] if complete and rng.random() < 0.8 else [rng.choice(words["missing"])]
    notes = [*missing, *formats_told(fields, words, rng), *layout.told(words, rng)]
    instruction = assemble([opener, spec, *notes])

    def sample(rng: random.Random) -> Sample:
        record = draw(rng)
        value = spelling.value(record.values(fields))
        return Sample(record.text, layout.dump(value), value, record.stated)

    return Task("extraction", instruction, scenario.thing, sample, language, [spelling.key(key) for key in fields])


def nested_task(scenario: Scenario, rng: random.Random) -> Task:
    """A text's facts in inner objects."""
    count = rng.randint(2, len(scenario.groups))
    names = sorted(rng.sample(list(scenario.groups), count), key=list(scenario.groups).index)
    shape = {name: {key: scenario.fields[key] for key in scenario.groups[name]} for name in names}
    fields = {key: field for group in shape.values() for key, field in group.items()}
    language, spelling, layout = _language(scenario, rng), draw_spelling(rng), draw_layout(rng)
    words = wordings(language)

    def nest(record: Record) -> dict[str, Any]:
        return {name: record.values(group) for name, group in shape.items()}

    if language == "en" and rng.random() < 0.35:
        tasks, form = load("tasks"), rng.choice(load("tasks")["group"])
        parts = [
            form.format(group=spelling.key(name), keys=join([spelling.key(key) for key in group]))
            for name, group in shape.items()
        ]
        spec = rng.choice(tasks["nested"]).format(groups="; ".join(parts))
    else:
        spec = show(shape, nest(draw_record(scenario, rng)), spelling, words, rng, nullable=True)
    opener = rng.choice(words["openers"]).format(thing=scenario.thing, shape=rng.choice(words["object"]))
    notes = [rng.choice(words["missing"]), *formats_told(fields, words, rng), *layout.told(words, rng)]

    def sample(rng: random.Random) -> Sample:
        record = draw_record(scenario, rng)
        value = spelling.value(nest(record))
        return Sample(record.text, layout.dump(value), value)

    keys = [spelling.key(key) for key in (*names, *fields)]
    return Task("nested", assemble([opener, spec, *notes]), scenario.thing, sample, language, keys)


def format_task(scenario: Scenario, rng: random.Random) -> Task:
    """Facts that every text states as YAML, ``key: value`` lines or CSV."""
    common = keys_of(rng.choice(scenario.patterns))
    stated = [key for key, field in scenario.fields.items() if key in common and "many" not in field.kind]
    fields = {key: scenario.fields[key] for key in rng.sample(stated, min(len(stated), rng.randint(3, 6)))}
    spelling, name = draw_spelling(rng), rng.choice(["yaml", "yaml", "lines", "csv", "semicolon"])
    words = wordings("en")
    opener = rng.choice(words["openers"]).format(thing=scenario.thing, shape=rng.choice(load("tasks")["formats"][name]))
    spec = describe(fields, spelling, words, rng, "en")
    instruction = assemble([opener, spec, *formats_told(fields, words, rng), rng.choice(words["bare"])])

    def sample(rng: random.Random) -> Sample:
        record = draw_record(scenario, rng, fields)
        return Sample(record.text, write(name, [spelling.value(record.values(fields))]))

    return Task(f"format {name}", instruction, scenario.thing, sample, "en", [spelling.key(key) for key in fields])


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows in a format of ``tasks.yaml``; YAML and lines take the first row."""
    match name:
        case "yaml":
            return str(yaml.safe_dump(dict(rows[0]), allow_unicode=True, sort_keys=False)).rstrip("\n")
        case "lines":
            return "\n".join(f"{key}: {_cell(value)}" for key, value in rows[0].items())
        case "markdown":
            lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    out = io.StringIO()
    writer = csv.writer(out, delimiter={"csv": ",", "semicolon": ";", "tab": "\t"}[name], lineterminator="\n")
    writer.writerows([list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)])
    return out.getvalue().rstrip("\n")


def _cell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain_exchange(scenario: Scenario, rng: random.Random) -> Exchange:
    """A question about a text, answered in a sentence; often after the text was turned into JSON."""
    key, asked, answered = rng.choice(scenario.ask)
    words = wordings(scenario.language)
    question = rng.choice(words["question"]).format(question=asked, thing=scenario.thing)
    needed = {key, *keys_of(answered)}

    def sample(rng: random.Random) -> Sample:
        record = draw_record(scenario, rng, needed)
        return Sample(record.text, fill(answered, record.stated))

    task = Task("plain", question, scenario.thing, sample, scenario.language)
    if rng.random() < FOLLOW_UP_SHARE:
        first = pose(flat_task(scenario, rng), rng)
        if needed <= first.sample.stated.keys():
            stated = first.sample.stated
            return follow_up(first, task, Sample(first.sample.text, fill(answered, stated)))
    return pose(task, rng)
