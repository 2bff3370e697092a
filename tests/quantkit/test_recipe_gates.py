"""The section ``gates``: suites by name and from files, their limits, and what is wrong with them in one line."""

from typing import get_args

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe import Recipe, parse_recipe
from quantkit.recipe import gates as recipe_gates
from quantkit.recipe.gates import BuiltinSuite, ConstrainableSuite, FileSuite
from quantkit_eval.gates import Gates
from quantkit_eval.suites import CONSTRAINABLE, CONSTRAINED, SUITES
from quantkit_eval.suites.file import MAX_TOKENS, FileOptions

RECIPE = """\
version: 1
gates:
  suites: [extract, schema, nll, {kind: file, path: mine.jsonl, name: mine}]
  num_items: {schema: 40, nll: 8, mine: 12}
  max_drop_pp: {schema: 5, mine: 2.5}
"""


def parse(text: str) -> Recipe:
    return parse_recipe(text, origin="r.yaml")


def test_the_names_are_those_of_the_suites() -> None:
    assert set(get_args(BuiltinSuite)) == set(SUITES)
    assert FileSuite(kind="file", path="a", name="b").max_tokens == MAX_TOKENS
    assert (get_args(ConstrainableSuite), recipe_gates.CONSTRAINED) == (CONSTRAINABLE, CONSTRAINED)


def test_a_constrained_suite_stands_beside_the_free_one() -> None:
    gates = parse(
        "version: 1\ngates:\n"
        "  suites: [schema, {name: schema, constrained: true},"
        " {kind: file, path: m.jsonl, name: mine, constrained: true}]\n"
        "  num_items: {schema+constrained: 9}\n"
        "  max_drop_pp: {schema+constrained: 3, mine+constrained: 4}\n"
    ).gates
    assert gates.suite_options == {
        "schema": {},
        "schema+constrained": {"num_items": 9},
        "mine+constrained": {"kind": "file", "path": "m.jsonl", "max_tokens": 256},
    }
    assert Gates.parse(gates.limits).suites == ("schema", "schema+constrained", "mine+constrained")
    assert parse_recipe("version: 1\ngates: {suites: [{name: tools, constrained: true}]}", origin="r").gates.suites


def test_the_text_of_nll_may_be_the_users() -> None:
    text = "version: 1\ngates:\n  suites: [extract, {name: nll, path: mails.txt}]\n  max_kl_mean_nats: 0.1\n"
    gates = parse(text + "  num_items: {nll: 8}\n").gates
    assert gates.suite_names == ("extract", "nll")
    assert gates.suite_options["nll"] == {"text_path": "mails.txt", "max_windows": 8}
    assert gates.files == {"nll": "mails.txt"}
    assert Gates.parse(gates.limits).suites == ("extract", "nll")
    with pytest.raises(RecipeError, match=r"r\.yaml:3:21: gates\.suites\[1\]\.path: missing"):
        parse(text.replace(", path: mails.txt", ""))
    with pytest.raises(RecipeError, match=r"gates\.suites\[1\]\.constrained: unknown key"):
        parse(text.replace("path: mails.txt", "path: mails.txt, constrained: true"))


def test_suites_by_name_and_from_a_file() -> None:
    gates = parse(RECIPE).gates
    assert gates.suite_names == ("extract", "schema", "nll", "mine")
    assert gates.suite_options == {
        "extract": {},
        "schema": {"num_items": 40},
        "nll": {"max_windows": 8},
        "mine": {"kind": "file", "path": "mine.jsonl", "max_tokens": 256, "num_items": 12},
    }
    FileOptions(**gates.suite_options["mine"])


def test_the_limits_are_what_compare_takes() -> None:
    limits = Gates.parse(parse(RECIPE).gates.limits)
    assert limits.suites == ("extract", "schema", "nll", "mine")
    assert limits.max_drop_pp == {"schema": 5, "mine": 2.5}


@pytest.mark.parametrize("suite", sorted(set(SUITES) - {"nll"}))
def test_every_suite_with_answers_can_have_a_margin(suite: str) -> None:
    gates = parse(f"version: 1\ngates: {{suites: [{suite}], max_drop_pp: {{{suite}: 5}}}}\n").gates
    assert gates.max_drop_pp == {suite: 5}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("extract,", "extrct,", "r.yaml:3:12: gates.suites[0]: 'extrct' is not allowed; allowed: extract, schema, "
         "tools, arith, needle, scripts, instructions, nll; did you mean 'extract'?"),
        ("extract,", "3,", "r.yaml:3:12: gates.suites[0]: 3 is not allowed; allowed: extract, schema, tools, "
         "arith, needle, scripts, instructions, nll"),
        ("kind: file", "kind: flie", "r.yaml:3:41: gates.suites[3].kind: 'flie' is not allowed; allowed: file; "
         "did you mean 'file'?"),
        ("kind: file, ", "", "r.yaml:3:34: gates.suites[3].kind: missing"),
        ("path: mine.jsonl", "file: mine.jsonl", "r.yaml:3:47: gates.suites[3].file: unknown key; allowed here: kind, "
         "path, name, max_tokens, constrained"),
        ("extract,", "{name: needle, constrained: true},", "r.yaml:3:19: gates.suites[0].name: 'needle' is not "
         "allowed; allowed: extract, schema, tools, arith"),
        ("extract,", "{name: schema, constrained: false},", "r.yaml:3:40: gates.suites[0].constrained: false is not "
         "allowed; allowed: true"),
        ("name: mine", "name: mine+constrained", "r.yaml:3:71: gates.suites[3].name: 'mine+constrained' is the name "
         "of a constrained suite; choose another name, and constrained: true"),
        ("path: mine.jsonl", "path: ''", "r.yaml:3:53: gates.suites[3].path: empty"),
        ("name: mine", "name: schema", "r.yaml:3:71: gates.suites[3].name: 'schema' is the name of a built-in suite or "
         "of a measurement; choose another name"),
        ("suites: [extract, schema, nll, {kind: file, path: mine.jsonl, name: mine}]", "suites: [schema, nll, {kind: "
         "file, path: mine.jsonl, name: mine}, {kind: file, path: mine.jsonl, name: mine}]",
         "r.yaml:3:11: gates.suites: a suite stands here twice"),
        ("max_drop_pp: {schema: 5, mine: 2.5}", "max_drop_pp: {schema: 5, mien: 2.5}", "r.yaml:5:28: "
         "gates.max_drop_pp.mien: 'mien' is not allowed; allowed: extract, schema, mine; did you mean 'mine'?"),
        ("max_drop_pp: {schema: 5, mine: 2.5}", "max_drop_pp: {tools: 5}", "r.yaml:5:24: gates.max_drop_pp.tools: the "
         "suite tools is not in gates.suites (extract, schema, nll, mine)"),
        ("max_drop_pp: {schema: 5, mine: 2.5}", "max_drop_pp: {nll: 5}", "r.yaml:5:22: gates.max_drop_pp.nll: nll has "
         "no right and wrong answers; its gate is max_kl_mean_nats"),
        ("mine: 12", "other: 12", "r.yaml:4:35: gates.num_items.other: 'other' is not allowed; allowed: extract, "
         "schema, nll, mine"),
        ("mine: 12", "mine: 0", "r.yaml:4:41: gates.num_items.mine: must be greater than or equal to 1, not 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(old: str, new: str, message: str) -> None:
    assert old in RECIPE
    with pytest.raises(RecipeError) as caught:
        parse(RECIPE.replace(old, new, 1))
    assert str(caught.value) == message
