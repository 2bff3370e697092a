"""Function calls as JSON: two to four functions are on offer; one of them, two in a row, or none fits the message."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantkit.calibration.structured.layout import Layout, draw_layout
from quantkit.calibration.structured.scenario import Field, draw_values, fill, read_fields
from quantkit.calibration.structured.shape import Spelling, assemble, formats_told, schema_of
from quantkit.calibration.structured.task import Sample, Task, wordings
from quantkit.calibration.structured.values import type_name
from quantkit.calibration.structured.vocabulary import load

NONE_SHARE = 0.2  # of the messages fit no function


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    Attributes:
        name: of the function.
        does: what it does, in the third person.
        parameters: name -> what it takes.
        requests: sentences that ask for it, parameters in braces.
    """

    name: str
    does: str
    parameters: Mapping[str, Field]
    requests: Sequence[str]


@dataclass(frozen=True, slots=True)
class Form:
    """How a call is written.

    Attributes:
        shown: in the request.
        none: the value if no function fits.
        call: the value from a function's name and its parameters.
        several: whether calls stand in an array, so that two fit in.
    """

    shown: str
    none: Any
    call: Callable[[str, Mapping[str, Any]], Any]
    several: bool = False


FORMS = (
    Form(
        '{"function": <its name>, "params": {...}}',
        {"function": None, "params": {}},
        lambda name, params: {"function": name, "params": params},
    ),
    Form('{"call": "...", "with": {...}}', {"call": "nothing"}, lambda name, params: {"call": name, "with": params}),
    Form(
        '{"action": "<function>", "inputs": {...}}',
        {"action": "no_action", "inputs": {}},
        lambda name, params: {"action": name, "inputs": params},
    ),
    Form(
        "a JSON object whose only key is the function, holding its parameters", {}, lambda name, params: {name: params}
    ),
    Form(
        'a JSON array of calls [{"function": ..., "params": {...}}]',
        [],
        lambda name, params: {"function": name, "params": params},
        several=True,
    ),
)


@cache
def functions() -> tuple[Function, ...]:
    """All of them."""
    return tuple(
        Function(name, entry["does"], read_fields(entry["parameters"]), entry["requests"])
        for name, entry in load("functions").items()
    )


def call_task(rng: random.Random) -> Task:
    """Which call a message wants."""
    offered = rng.sample(functions(), rng.randint(2, 4))
    others = [function for function in functions() if function not in offered]
    form, layout, words, tasks = rng.choice(FORMS), draw_layout(rng), wordings("en"), load("tasks")
    fields = {f"{f.name}.{key}": field for f in offered for key, field in f.parameters.items()}
    request = rng.choice(tasks["call"]).format(
        functions=_listing(offered, rng), form=form.shown, none=json.dumps(form.none)
    )

    def sample(rng: random.Random) -> Sample:
        if rng.random() < NONE_SHARE:
            return _unfit(others, form, layout, rng)
        called = rng.sample(offered, 2 if form.several and rng.random() < 0.4 else 1)
        sentences, calls = [], []
        for function in called:
            drawn = draw_values(function.parameters, rng)
            sentences.append(fill(rng.choice(function.requests), drawn))
            calls.append(form.call(function.name, {key: value.value for key, value in drawn.items()}))
        value = calls if form.several else calls[0]
        return Sample(" ".join(sentences), layout.dump(value), value)

    instruction = assemble([request, *formats_told(fields, words, rng), *layout.told(words, rng)])
    return Task("call", instruction, "message", sample)


def _unfit(others: Sequence[Function], form: Form, layout: Layout, rng: random.Random) -> Sample:
    """A message that none of the functions on offer serves: small talk, or one that wants another function."""
    text = rng.choice(load("tasks")["chatter"])
    if rng.random() < 0.6:
        function = rng.choice(others)
        text = fill(rng.choice(function.requests), draw_values(function.parameters, rng))
    return Sample(text, layout.dump(form.none), form.none)


def _listing(offered: Sequence[Function], rng: random.Random) -> str:
    """The functions as signatures, as bullet points, or as JSON."""
    match rng.choice(["signature", "bullets", "json"]):
        case "signature":
            return "\n".join(f"{_signature(function, typed=True)}: {function.does}" for function in offered)
        case "bullets":
            return "\n".join(f"- {_signature(function, typed=False)} {function.does}" for function in offered)
    entries = [
        {
            "function": function.name,
            "description": function.does,
            "parameters": schema_of(function.parameters, Spelling(camel=False), nullable=False)["properties"],
        }
        for function in offered
    ]
    return "\n".join(json.dumps(entry) for entry in entries)


def _signature(function: Function, *, typed: bool) -> str:
    parts = [f"{key}: {type_name(field.kind)}" if typed else key for key, field in function.parameters.items()]
    return f"{function.name}({', '.join(parts)})"
