"""``tools``: choose one of several tools, fill in its arguments, or say that none fits.

Catches damage to what agents live on: a wrong tool, an argument that is nearly right, a call where none was asked for.
Arguments are compared by value: a number may stand in quotes, text must agree to the letter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quantkit_eval.suites.answers import agrees, read_object
from quantkit_eval.suites.graded import FIELDS, GradedSuite, Item, Metrics
from quantkit_eval.suites.levels import Draw, items_in_turn
from quantkit_eval.suites.words import word_list

NONE = "none"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and how people ask for it.

    Attributes:
        name: of the tool.
        arguments: name -> list in data/words.json, or (smallest, largest) number.
        requests: sentences with the arguments in braces.
    """

    name: str
    arguments: Mapping[str, str | tuple[int, int]]
    requests: Sequence[str]


TOOLS = (
    Tool("get_weather", {"city": "cities"}, ("What is the weather like in {city}?", "Will it rain in {city} today?")),
    Tool("set_timer", {"minutes": (2, 90)}, ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.")),
    Tool("get_time", {"city": "cities"}, ("What time is it in {city} now?", "Tell me the local time in {city}.")),
    Tool(
        "light_on", {"room": "rooms"}, ("Switch on the light in the {room}.", "It is dark in the {room}, light please.")
    ),
    Tool("light_off", {"room": "rooms"}, ("Switch off the light in the {room}.", "Make it dark in the {room}.")),
    Tool("call", {"name": "first_names"}, ("Call {name}.", "Please phone {name} now.")),
    Tool(
        "book_train",
        {"start": "cities", "end": "cities", "day": "days"},
        ("Book a train from {start} to {end} on {day}.", "I need a train ticket on {day}, from {start} to {end}."),
    ),
    Tool(
        "book_table",
        {"city": "cities", "people": (2, 9)},
        ("Book a table for {people} people in {city}.", "Find us a restaurant in {city}; we are {people} people."),
    ),
    Tool(
        "buy",
        {"thing": "things", "count": (2, 30)},
        ("Order {count} of the article {thing}.", "Buy the article {thing}, {count} pieces."),
    ),
    Tool(
        "translate",
        {"word": "things", "language": "languages"},
        ("Translate the word {word} into {language}.", "How do you say {word} in {language}?"),
    ),
)
NO_TOOL = (
    "Who wrote the play Hamlet?", "Tell me a joke.", "Why is the sky blue?", "Write a short poem about spring.",
    "What is the capital of France?", "Explain what a noun is.", "Do you like music?", "How many legs has a spider?",
    "Thank you, that was all.", "Summarize the story of Robin Hood.",
)  # fmt: skip
SINGLE = [tool for tool in TOOLS if len(tool.arguments) == 1]
CELLS = [
    ("call", 1),
    ("call", 2),
    ("call", 3),
    ("call", 1),
    ("none", 1),
    ("call", 2),
    ("call", 4),
    ("call", 1),
    ("none", 3),
]
OTHERS = {1: 1, 2: 1, 3: 3, 4: len(TOOLS) - 1}  # level -> wrong tools beside the right one
EXPLICIT = "Use the tool {tool}: {arguments}."  # the request of level 1: nothing to choose, only the form to keep
EXAMPLES = (  # turns before the question (tools, request, answer): the form is shown, only the choice is asked for
    ("play(song), paint(color)", "How old are you?", '{"tool": "none", "arguments": {}}'),
    ("paint(color), play(song)", "Play Yesterday.", '{"tool": "play", "arguments": {"song": "Yesterday"}}'),
)
WORDINGS = (
    "Tools: {tools}, none()\nRequest: {request}\nWhich tool call? JSON only.",
    "{request}\n\nAnswer with one of the tools {tools}, as JSON. If no tool fits, the tool is none.",
    "Choose a tool and fill in its arguments: {tools}, none(). Request: {request}",
)


def _make(draw: Draw) -> Item:
    tools = list(SINGLE if draw.level <= 2 else TOOLS)
    wanted = draw.rng.choice(tools)
    others = draw.rng.sample([tool for tool in tools if tool is not wanted], OTHERS[draw.level])
    signatures = [f"{tool.name}({', '.join(tool.arguments)})" for tool in (wanted, *others)]
    draw.rng.shuffle(signatures)
    arguments: dict[str, str | int] = {}
    if draw.kind == "none":
        request, tool = draw.rng.choice(NO_TOOL), NONE
    else:
        for name, source in wanted.arguments.items():
            values = range(source[0], source[1] + 1) if isinstance(source, tuple) else word_list(source)
            arguments[name] = draw.rng.choice([value for value in values if value not in arguments.values()])
        request, tool = draw.rng.choice(wanted.requests).format(**arguments), wanted.name
        if draw.level == 1:
            named = " and ".join(f"{name} {value}" for name, value in arguments.items())
            request = EXPLICIT.format(tool=tool, arguments=named)
    wording = WORDINGS[draw.wording]
    examples = [(wording.format(tools=listed, request=asked), call) for listed, asked, call in EXAMPLES]
    question = wording.format(tools=", ".join(signatures), request=request)
    return Item.after_examples(draw.id, examples, question, {"tool": tool, "arguments": arguments})


def measure(item: Item, output: str) -> Metrics:
    """The tool by name, the arguments one by one; the arguments of a wrong tool are wrong."""
    answer, only_json = read_object(output)
    gold = item.gold
    tool_ok = answer is not None and answer.get("tool") == gold["tool"]
    given = answer.get("arguments") if answer and tool_ok else None
    arguments = given if isinstance(given, dict) else {}
    correct = sum(name in arguments and agrees(arguments[name], value) for name, value in gold["arguments"].items())
    return {
        "parse_ok": answer is not None,
        "exact": tool_ok and arguments.keys() == gold["arguments"].keys() and correct == len(gold["arguments"]),
        "tool_ok": tool_ok,
        "fields_correct": correct,
        "fields_total": len(gold["arguments"]),
        "only_json": only_json,
    }


def form(item: Item) -> dict[str, Any]:
    """A call of any of the tools, whichever the item offers: choosing one and its arguments is the model's work."""
    names = [tool.name for tool in TOOLS] + [NONE]
    arguments = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
    return {
        "type": "object",
        "properties": {"tool": {"enum": names}, "arguments": arguments},
        "required": ["tool", "arguments"],
        "additionalProperties": False,
    }


generate_items = partial(items_in_turn, _make, CELLS, len(WORDINGS))
run = GradedSuite(
    measure=measure,
    primary="exact",
    shares=("exact", "parse_ok", "tool_ok", "only_json"),
    parts=FIELDS,
    form=form,
).generated(generate_items, num_items=99, max_tokens=64)
