"""Short calculations in words, with the result as JSON."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from quantkit.calibration.structured.layout import draw_layout
from quantkit.calibration.structured.scenario import Field, draw_values, fill
from quantkit.calibration.structured.shape import assemble
from quantkit.calibration.structured.task import Sample, Task, wordings
from quantkit.calibration.structured.vocabulary import load

Numbers = Mapping[str, Decimal]


@dataclass(frozen=True, slots=True)
class Problem:
    """A calculation.

    Attributes:
        texts: wordings, with the names of ``given`` in braces.
        given: name -> kind of value.
        results: key of the answer -> formula on the numbers of ``given``.
    """

    texts: Sequence[str]
    given: Mapping[str, str]
    results: Mapping[str, Callable[[Numbers], Decimal]]


PROBLEMS = (
    Problem(
        (
            "{who} buys {n} {what} at {each} euros apiece.",
            "The invoice lists {n} {what}; one costs {each} euros. {who} pays.",
        ),
        {"who": "person", "n": "int 2 24", "what": "goods", "each": "decimal 2 40"},
        {"total_eur": lambda x: x["n"] * x["each"]},
    ),
    Problem(
        (
            "A {what} for {full} euros is reduced by {percent} percent.",
            "{percent} % off: the {what} used to cost {full} euros.",
        ),
        {"what": "appliance", "full": "int 40 600 20", "percent": "int 5 60 5"},
        {
            "saved_eur": lambda x: x["full"] * x["percent"] / 100,
            "to_pay_eur": lambda x: x["full"] * (100 - x["percent"]) / 100,
        },
    ),
    Problem(
        (
            "The barrel holds {full} litres; the {plant} takes {weekly} litres a week, for {weeks} weeks.",
            "From {full} litres of water, {weekly} litres go every week, for {weeks} weeks.",
        ),
        {"full": "int 150 400", "plant": "plant", "weekly": "int 3 14", "weeks": "int 2 9"},
        {"left_litres": lambda x: x["full"] - x["weekly"] * x["weeks"]},
    ),
    Problem(
        (
            "Temperatures in {town}: {a}, {b} and {c} °C. Mean?",
            "The station {town} measured {a} °C, {b} °C and {c} °C; average them.",
        ),
        {"town": "town", "a": "int 2 30", "b": "int 2 30", "c": "int 2 30"},
        {"mean_c": lambda x: (x["a"] + x["b"] + x["c"]) / 3},
    ),
    Problem(
        (
            "The film lasts {h} hours and {m} minutes, with {ads} minutes of adverts before it.",
            "First {ads} minutes of adverts, then {h} h {m} min of film.",
        ),
        {"h": "int 1 3", "m": "int 5 55 5", "ads": "int 8 25"},
        {"minutes_in_all": lambda x: x["h"] * 60 + x["m"] + x["ads"]},
    ),
    Problem(
        ("A terrace measures {long} m by {wide} m.", "{who} tiles a floor, {long} metres long and {wide} metres wide."),
        {"who": "person", "long": "int 4 25", "wide": "int 2 12"},
        {"area_m2": lambda x: x["long"] * x["wide"], "edge_m": lambda x: 2 * (x["long"] + x["wide"])},
    ),
    Problem(
        ("{out} km to {town}, {back} km home by another way; the van needs {rate} litres on 100 km.",),
        {"out": "int 20 240", "town": "town", "back": "int 20 240", "rate": "decimal1 5 12"},
        {"km": lambda x: x["out"] + x["back"], "fuel_litres": lambda x: (x["out"] + x["back"]) * x["rate"] / 100},
    ),
    Problem(
        ("{who} worked {h} hours at {pay} euros an hour.", "Pay: {pay} euros per hour, {h} hours, employee {who}."),
        {"who": "person", "h": "int 3 40", "pay": "decimal 13 38"},
        {"wage_eur": lambda x: x["h"] * x["pay"]},
    ),
    Problem(
        (
            "The {dish} for 4 takes {g} g of {what}. How much for {n}?",
            "{g} g of {what} serve 4; {n} guests want {dish}.",
        ),
        {"dish": "dish", "g": "int 100 900 20", "what": "ingredient", "n": "int 5 14"},
        {"grams": lambda x: x["g"] * x["n"] / 4},
    ),
    Problem(
        (
            "{who} has {money} euros at {rate} percent a year.",
            "Savings of {money} euros bear {rate} % a year; owner: {who}.",
        ),
        {"who": "person", "money": "int 200 9000 50", "rate": "int 1 6"},
        {
            "interest_eur": lambda x: x["money"] * x["rate"] / 100,
            "after_one_year_eur": lambda x: x["money"] * (100 + x["rate"]) / 100,
        },
    ),
    Problem(
        ('{who} reads {daily} pages of "{book}" on each of {evenings} evenings. The book has {pages} pages.',),
        {"who": "person", "daily": "int 5 22", "book": "booktitle", "evenings": "int 3 12", "pages": "int 280 700"},
        {
            "pages_read": lambda x: x["daily"] * x["evenings"],
            "pages_left": lambda x: x["pages"] - x["daily"] * x["evenings"],
        },
    ),
    Problem(
        ("{adults} adults at {full} euros and {children} children at {half} euros go to the {venue}.",),
        {"adults": "int 1 6", "full": "int 9 30", "children": "int 1 7", "half": "int 3 8", "venue": "venue"},
        {
            "adults_eur": lambda x: x["adults"] * x["full"],
            "children_eur": lambda x: x["children"] * x["half"],
            "together_eur": lambda x: x["adults"] * x["full"] + x["children"] * x["half"],
        },
    ),
    Problem(
        ("{boxes} boxes with {inside} {what} each arrive, {broken} of the {what} are broken.",),
        {"boxes": "int 3 20", "inside": "int 6 48 2", "what": "goods", "broken": "int 1 17"},
        {"delivered": lambda x: x["boxes"] * x["inside"], "usable": lambda x: x["boxes"] * x["inside"] - x["broken"]},
    ),
    Problem(
        ("{team} won {won} games ({per} points each) and drew {drawn} (1 point each).",),
        {"team": "team", "won": "int 3 19", "per": "int 2 3", "drawn": "int 1 9"},
        {"points_in_all": lambda x: x["won"] * x["per"] + x["drawn"]},
    ),
)


def arithmetic_task(rng: random.Random) -> Task:
    """A calculation of one kind."""
    problem, layout, words, tasks = rng.choice(PROBLEMS), draw_layout(rng), wordings("en"), load("tasks")
    outline = "{" + ", ".join(f'"{key}": number' for key in problem.results) + "}"
    form = rng.choice([outline, json.dumps(dict.fromkeys(problem.results, 0))])
    request = rng.choice(tasks["solve"]).format(form=form)
    fields = {key: Field(kind, key) for key, kind in problem.given.items()}

    def sample(rng: random.Random) -> Sample:
        drawn = draw_values(fields, rng)
        numbers = {key: Decimal(str(item.value)) for key, item in drawn.items() if not isinstance(item.value, str)}
        value = {key: _number(formula(numbers)) for key, formula in problem.results.items()}
        return Sample(fill(rng.choice(problem.texts), drawn), layout.dump(value), value)

    instruction = assemble([request, rng.choice(tasks["round"]), *layout.told(words, rng)])
    return Task("arithmetic", instruction, "problem", sample, "en", list(problem.results))


def _number(value: Decimal) -> int | float:
    """To two decimals, halves away from zero; whole numbers as integers."""
    rounded = value.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
    return int(rounded) if rounded == rounded.to_integral_value() else float(rounded)
