"""Several entries of one kind: a list in prose or a table, turned into JSON, CSV or a Markdown table."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantkit.calibration.structured.extraction import draw_spelling, write
from quantkit.calibration.structured.layout import draw_layout
from quantkit.calibration.structured.scenario import Field, draw_values, fill, read_fields
from quantkit.calibration.structured.shape import assemble, describe, formats_told, show
from quantkit.calibration.structured.task import Exchange, Sample, Task, pose, wordings
from quantkit.calibration.structured.values import Drawn, json_schema
from quantkit.calibration.structured.vocabulary import load


@dataclass(frozen=True, slots=True)
class Collection:
    """A kind of list.

    Attributes:
        thing: what the list is called.
        entry: what its entries are called.
        fields: key -> fact; the first one tells the entries apart.
        lead: what may stand before the entries.
        rows: patterns of an entry.
        ask: (key, question, answer) about one entry.
    """

    thing: str
    entry: str
    fields: Mapping[str, Field]
    lead: Sequence[str]
    rows: Sequence[str]
    ask: tuple[str, str, str]


Entries = Sequence[Mapping[str, Drawn]]


@cache
def collections() -> tuple[Collection, ...]:
    """All of them."""
    return tuple(
        Collection(
            thing=entry["thing"],
            entry=entry["entry"],
            fields=read_fields(entry["fields"]),
            lead=entry["lead"],
            rows=entry["row"],
            ask=tuple(entry["ask"]),
        )
        for entry in load("collections").values()
    )


def _draw_entries(collection: Collection, rng: random.Random) -> Entries:
    """Two to five entries, the first field of each different."""
    first = next(iter(collection.fields))
    entries: dict[str, Mapping[str, Drawn]] = {}
    count = rng.randint(2, 5)
    while len(entries) < count:
        drawn = draw_values(collection.fields, rng)
        entries.setdefault(drawn[first].surface, drawn)
    return list(entries.values())


def _values(entries: Entries) -> list[dict[str, Any]]:
    return [{key: drawn.value for key, drawn in entry.items()} for entry in entries]


def _prose(collection: Collection, entries: Entries, rng: random.Random) -> str:
    """The list as text: bullets, numbers, lines, or one sentence."""
    pattern, lead = rng.choice(collection.rows), rng.choice(collection.lead)
    rows = [fill(pattern, entry) for entry in entries]
    match rng.choice(["bullets", "numbers", "lines", "sentence", "sentence"]):
        case "bullets":
            return "\n".join([lead, *(f"- {row}" for row in rows)])
        case "numbers":
            return "\n".join([lead, *(f"{number}. {row}" for number, row in enumerate(rows, start=1))])
        case "lines":
            return "\n".join([lead, *rows])
    return f"{lead} {'; '.join(rows)}."


def list_task(collection: Collection, rng: random.Random) -> Task:
    """The entries of a list as a JSON array of objects, or as such an array in an object."""
    spelling, layout, words, tasks = draw_spelling(rng), draw_layout(rng), wordings("en"), load("tasks")
    wrapper = collection.entry if rng.random() < 0.4 else None
    shape = {wrapper: [collection.fields]} if wrapper else [collection.fields]

    def wrap(entries: Entries) -> Any:
        return spelling.value({wrapper: _values(entries)} if wrapper else _values(entries))

    if rng.random() < 0.5:
        per_entry = rng.choice(tasks["list"]["array"])
        put = rng.choice(tasks["list"]["wrapped"]).format(entry=wrapper) if wrapper else ""
        spec = assemble([per_entry, describe(collection.fields, spelling, words, rng, "en"), put])
    else:
        spec = show(shape, wrap(_draw_entries(collection, rng)[:2]), spelling, words, rng, nullable=False)
    name = rng.choice(words["object" if wrapper else "array"])
    opener = rng.choice(words["openers"]).format(thing=collection.thing, shape=name)
    instruction = assemble([opener, spec, *formats_told(collection.fields, words, rng), *layout.told(words, rng)])

    def sample(rng: random.Random) -> Sample:
        entries = _draw_entries(collection, rng)
        value = wrap(entries)
        return Sample(_prose(collection, entries, rng), layout.dump(value), value)

    keys = [spelling.key(key) for key in collection.fields]
    return Task("list", instruction, collection.thing, sample, "en", [wrapper, *keys] if wrapper else keys)


def _table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], name: str) -> str:
    """Rows as CSV, with tabs, or as a Markdown table; true and false as yes and no."""
    spelled = {True: "yes", False: "no"}
    shown = [
        {titles[key]: spelled[value] if isinstance(value, bool) else value for key, value in row.items()}
        for row in rows
    ]
    return write(name, shown)


def table_task(collection: Collection, rng: random.Random) -> Task:
    """A small table as JSON: by rows, by the first column, or by columns."""
    spelling, layout, words, tasks = draw_spelling(rng), draw_layout(rng), wordings("en"), load("tasks")["table"]
    form, name = (
        rng.choices(["rows", "keyed", "columns"], [5, 2, 2])[0],
        rng.choice(["csv", "semicolon", "tab", "markdown"]),
    )
    keys = list(collection.fields)
    renamed = rng.random() < 0.5
    titles = {key: key.replace("_", " ").capitalize() if renamed else spelling.key(key) for key in keys}
    quoted = ", ".join(f'"{spelling.key(key)}"' for key in (keys[1:] if form == "keyed" else keys))
    has_boolean = any(json_schema(field.kind).get("type") == "boolean" for field in collection.fields.values())
    instruction = assemble(
        [
            rng.choice(tasks[form]).format(first=f'"{titles[keys[0]]}"'),
            rng.choice(tasks["renamed"]).format(keys=quoted) if renamed else "",
            rng.choice(tasks["booleans"]) if has_boolean else "",
            *layout.told(words, rng),
        ]
    )

    def sample(rng: random.Random) -> Sample:
        rows = _values(_draw_entries(collection, rng))
        value: Any = [spelling.value(row) for row in rows]
        if form == "keyed":
            value = {str(row[keys[0]]): spelling.value({key: row[key] for key in keys[1:]}) for row in rows}
        elif form == "columns":
            value = {spelling.key(key): [row[key] for row in rows] for key in keys}
        return Sample(_table(rows, titles, name), layout.dump(value), value)

    asked = [spelling.key(key) for key in keys]
    return Task(f"table {form}", instruction, collection.thing, sample, "en", asked[1:] if form == "keyed" else asked)


def list_format_task(collection: Collection, rng: random.Random) -> Task:
    """The entries of a list as CSV or a Markdown table."""
    spelling, words = draw_spelling(rng), wordings("en")
    name = rng.choice(["csv", "semicolon", "markdown"])
    shape = rng.choice(load("tasks")["formats"][name])
    opener = rng.choice(words["openers"]).format(thing=collection.thing, shape=shape)
    spec = describe(collection.fields, spelling, words, rng, "en")
    instruction = assemble([opener, spec, *formats_told(collection.fields, words, rng), rng.choice(words["bare"])])

    def sample(rng: random.Random) -> Sample:
        entries = _draw_entries(collection, rng)
        rows = [spelling.value(row) for row in _values(entries)]
        return Sample(_prose(collection, entries, rng), write(name, rows))

    keys = [spelling.key(key) for key in collection.fields]
    return Task(f"format {name}", instruction, collection.thing, sample, "en", keys)


def plain_list_exchange(collection: Collection, rng: random.Random) -> Exchange:
    """A question about one entry of a list, answered in a sentence."""
    _, asked, answered = collection.ask
    entries = _draw_entries(collection, rng)
    wanted = rng.choice(entries)
    words = wordings("en")
    question = rng.choice(words["question"]).format(question=fill(asked, wanted), thing=collection.thing)
    text = _prose(collection, entries, rng)
    return pose(Task("plain", question, collection.thing, lambda _: Sample(text, fill(answered, wanted))), rng)
