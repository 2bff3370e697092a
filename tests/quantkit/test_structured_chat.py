"""Generated structured chat: its answers are right, it is varied, and it fills a share of any size."""

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.calibration.dataset import build_calibration, draw_pieces
from quantkit.calibration.structured.scenario import scenarios
from quantkit.calibration.structured.task import Exchange, wordings
from quantkit.calibration.structured_chat import generate_conversations, generate_exchanges
from quantkit.calibration.tokenize import DocumentTokenizer
from quantkit.recipe import Calibration, StructuredChatSource
from quantkit.source import ModelSource, open_source

MONTHS = (
    "january february march april may june july august september october november december",
    "januar februar märz april mai juni juli august september oktober november dezember",
    "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
)
NUMBER = r"-?\d+(?:[{}]\d+)?"


@pytest.fixture(scope="module")
def exchanges() -> list[Exchange]:
    return list(itertools.islice(generate_exchanges(5), 1200))


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> ModelSource:
    return open_source(tiny_models("llama"))


def _parse(answer: str) -> Any:
    """The JSON of an answer, out of its code fence if it has one."""
    fenced = re.fullmatch(r"```json\n(.*)\n```", answer, re.DOTALL)
    return json.loads(fenced[1] if fenced else answer)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _keys(value: Any) -> Iterator[str]:
    for inner in value if isinstance(value, list) else [value] if isinstance(value, dict) else []:
        for key, part in inner.items() if isinstance(inner, dict) else ():
            yield key
            yield from _keys(part)


@cache
def _dates(text: str) -> set[str]:
    """Every date of a text as YYYY-MM-DD; slashes and dots are read day first."""
    found = set(re.findall(r"\b\d{4}-\d\d-\d\d\b", text))
    found |= {f"{y}-{m}-{d}" for d, m, y in re.findall(r"\b(\d\d)[./](\d\d)[./](\d{4})\b", text)}
    for names in MONTHS:
        for month, name in enumerate(names.split(), start=1):
            day_first = re.findall(rf"\b(\d+)(?:er|\.)? (?:de )?{name} (?:de )?(\d{{4}})", text.lower())
            month_first = re.findall(rf"\b{name} (\d+), (\d{{4}})", text.lower())
            found |= {f"{year}-{month:02}-{int(day):02}" for day, year in day_first + month_first}
    return found


@cache
def _times(text: str) -> set[str]:
    """Every time of a text as HH:MM."""
    found = {f"{int(h):02}:{m}" for h, m in re.findall(r"\b(\d+)(?::| h )(\d\d)\b(?! [ap]m)", text)}
    halves = re.findall(r"\b(\d+):(\d\d) ([ap])m\b", text)
    return found | {f"{int(h) % 12 + (12 if half == 'p' else 0):02}:{m}" for h, m, half in halves}


@cache
def _numbers(text: str) -> set[float]:
    """Every number of a text; a comma is read as a decimal sign and as one between two numbers."""
    return {float(number.replace(",", ".")) for sign in (".,", ".") for number in re.findall(NUMBER.format(sign), text)}


def _is_stated(value: Any, text: str) -> bool:
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, str):
        return value in text or value in _dates(text) or value in _times(text)
    return float(value) in _numbers(text)


def test_every_json_answer_parses_and_has_the_keys_that_were_asked_for(exchanges: list[Exchange]) -> None:
    for exchange in exchanges:
        task, sample = exchange.task, exchange.sample
        if task.kind == "plain" or task.kind.startswith("format"):
            assert sample.value is None
            continue
        answer = _parse(exchange.conversation[-1]["content"])
        assert answer == sample.value
        if task.kind not in ("call", "repair", "table keyed"):
            assert set(_keys(answer)) == set(task.keys)
        asked = "\n".join(turn["content"] for turn in exchange.conversation if turn["role"] != "assistant")
        assert all(key in asked for key in task.keys), (task.keys, asked)


def test_what_an_answer_says_stands_in_the_text(exchanges: list[Exchange]) -> None:
    seen: Counter[str] = Counter()
    for exchange in exchanges:
        kind, sample = exchange.task.kind, exchange.sample
        if kind in ("extraction", "nested", "list") or kind.startswith("table"):
            for leaf in _leaves(sample.value):
                seen[type(leaf).__name__] += 1
                assert _is_stated(leaf, sample.text), (leaf, sample.text)
    assert {"str", "int", "float", "bool", "NoneType"} <= seen.keys()


def test_null_stands_for_what_the_text_does_not_state(exchanges: list[Exchange]) -> None:
    camel = re.compile(r"(?<=[a-z0-9])([A-Z])")
    nulls = 0
    for exchange in exchanges:
        if exchange.task.kind != "extraction":
            continue
        for key, value in exchange.sample.value.items():
            name = camel.sub(lambda match: f"_{match[1].lower()}", key)
            assert (value is None) == (name not in exchange.sample.stated), (key, exchange.sample.text)
            nulls += value is None
        if None in exchange.sample.value.values():
            asked = "\n".join(turn["content"] for turn in exchange.conversation)
            assert any(said in asked for said in wordings(exchange.task.language)["missing"])
    assert nulls > 50


def test_other_formats_read_back(exchanges: list[Exchange]) -> None:
    seen = set()
    for exchange in exchanges:
        _, _, name = exchange.task.kind.partition("format ")
        answer, text = exchange.conversation[-1]["content"], exchange.sample.text
        if not name:
            continue
        seen.add(name)
        if name == "yaml":
            rows = [yaml.safe_load(answer)]
        elif name == "lines":
            rows = [dict(line.split(": ", 1) for line in answer.splitlines())]
        elif name == "markdown":
            lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in answer.splitlines()]
            rows = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
        else:
            rows = list(csv.DictReader(io.StringIO(answer), delimiter=";" if name == "semicolon" else ","))
        assert rows
        for row in rows:
            assert list(row) == list(exchange.task.keys)
            for value in row.values():
                is_number = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?", value)
                is_truth = str(value) in ("true", "false")
                assert (
                    is_truth or _is_stated(float(value) if is_number else str(value), text) or _is_stated(value, text)
                )
    assert seen == {"yaml", "lines", "csv", "semicolon", "markdown"}


def test_broken_json_is_broken_and_repaired_without_a_change_of_data(exchanges: list[Exchange]) -> None:
    repairs = [exchange for exchange in exchanges if exchange.task.kind == "repair"]
    assert len(repairs) > 80
    for exchange in repairs:
        with pytest.raises(json.JSONDecodeError):
            json.loads(exchange.sample.text)
        for leaf in _leaves(exchange.sample.value):
            if isinstance(leaf, bool) or leaf is None:
                continue
            assert str(leaf) in exchange.sample.text


def test_a_call_is_one_that_was_on_offer_and_takes_its_arguments_from_the_message(exchanges: list[Exchange]) -> None:
    seen: Counter[str] = Counter()
    for exchange in exchanges:
        if exchange.task.kind != "call":
            continue
        value, instruction = exchange.sample.value, exchange.task.instruction
        calls = value if isinstance(value, list) else [value]
        none_told = json.dumps(value) in instruction
        seen["none" if none_told else f"calls {len(calls)}"] += 1
        if none_told:
            continue
        for call in calls:
            name = call.get("function") or call.get("call") or call.get("action") or next(iter(call))
            params = call.get("params") or call.get("with") or call.get("inputs") or call[name]
            offered = re.search(rf'{name}\(([^)]*)\)|"function": "{name}".*"parameters": (.*)', instruction)
            assert offered
            signature = offered[1] or offered[2]
            assert params
            assert all(key in signature for key in params)
            assert all(_is_stated(leaf, exchange.sample.text) for leaf in _leaves(params))
    assert seen["none"] > 10
    assert seen["calls 1"] > 50
    assert seen["calls 2"] > 3


@pytest.mark.parametrize(
    ("pattern", "results"),
    [
        (r"buys (?P<a>\d+) .* at (?P<b>[\d.]+) euros apiece", {"total_eur": lambda a, b: a * b}),
        (r"worked (?P<a>\d+) hours at (?P<b>[\d.]+) euros", {"wage_eur": lambda a, b: a * b}),
        (r"(?P<a>\d+) m by (?P<b>\d+) m", {"area_m2": lambda a, b: a * b, "edge_m": lambda a, b: 2 * a + 2 * b}),
        (r"for (?P<a>\d+) euros is reduced by (?P<b>\d+)", {"saved_eur": lambda a, b: a * b / 100}),
        (r"for 4 takes (?P<a>\d+) g .* for (?P<b>\d+)\?", {"grams": lambda a, b: a / 4 * b}),
        (r"lasts (?P<a>\d+) hours and (?P<b>\d+) minutes", {"minutes_in_all": None}),
    ],
)
def test_results_of_calculations(exchanges: list[Exchange], pattern: str, results: dict[str, Any]) -> None:
    found = 0
    for exchange in exchanges:
        match = re.search(pattern, exchange.sample.text) if exchange.task.kind == "arithmetic" else None
        if not match:
            continue
        found += 1
        for key, formula in results.items():
            numbers = [float(number) for number in match.groups()]
            expected = formula(*numbers) if formula else 60 * numbers[0] + numbers[1]
            extra = re.search(r"with (\d+) minutes of adverts", exchange.sample.text)
            assert exchange.sample.value[key] == pytest.approx(expected + (float(extra[1]) if extra else 0), abs=0.0051)
    assert found


def test_a_class_is_one_of_those_on_offer(exchanges: list[Exchange]) -> None:
    for exchange in exchanges:
        if exchange.task.kind == "classification":
            (label,) = exchange.sample.value.values()
            assert label in exchange.task.instruction


def test_layout_is_as_the_request_says(exchanges: list[Exchange]) -> None:
    seen: Counter[str] = Counter()
    for exchange in exchanges:
        if exchange.sample.value is None or exchange.sample.value in ([], {}):
            continue
        answer, words = exchange.conversation[-1]["content"], wordings(exchange.task.language)
        told = next((name for name in ("fenced", "indented", "dense") if _says(exchange, words[name])), "plain")
        seen[told] += 1
        assert answer.startswith("```") == (told == "fenced")
        assert ("\n" in answer) == (told in ("fenced", "indented"))
        if told == "dense":
            assert answer == json.dumps(exchange.sample.value, ensure_ascii=False, separators=(",", ":"))
    assert min(seen.values()) > 40
    assert len(seen) == 4


def _says(exchange: Exchange, sentences: list[str]) -> bool:
    return any(sentence in exchange.task.instruction for sentence in sentences)


def test_the_mix(exchanges: list[Exchange]) -> None:
    kinds = Counter(exchange.task.kind.split()[0] for exchange in exchanges)
    assert kinds["plain"] * 6 == len(exchanges)
    each = ("nested", "list", "classification", "call", "table", "repair", "arithmetic", "format")
    assert {kinds[kind] for kind in each} == {len(exchanges) // 12}
    assert len({scenario.thing for scenario in scenarios() if scenario.language == "en"}) >= 25
    assert {exchange.task.language for exchange in exchanges} == {"en", "de", "fr", "es"}
    assert len(wordings("en")["openers"]) >= 30
    several = sum(sum(turn["role"] == "user" for turn in exchange.conversation) > 1 for exchange in exchanges)
    assert 0.15 < several / len(exchanges) < 0.3
    system = sum(exchange.conversation[0]["role"] == "system" for exchange in exchanges)
    assert 0.3 < system / len(exchanges) < 0.7
    for exchange in exchanges:
        roles = [turn["role"] for turn in exchange.conversation if turn["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for turn in exchange.conversation:
            assert turn["content"].strip() == turn["content"] != ""
            assert not re.search(r"\{(thing|shape|keys|text|key|what|head)\}", turn["content"])
    words = [sum(len(turn["content"].split()) for turn in exchange.conversation) for exchange in exchanges]
    assert 40 < sum(words) / len(words) < 150


def test_a_seed_gives_the_same_conversations_and_another_seed_others() -> None:
    def take(seed: int, count: int) -> list[str]:
        return [json.dumps(turns) for turns in itertools.islice(generate_conversations(count * 200, seed), count)]

    first, other = take(1, 600), take(2, 600)
    assert take(1, 200) == first[:200]
    assert len(set(first)) > 594
    assert len(set(first) & set(other)) < 12


def test_a_share_of_any_size_is_filled(model: ModelSource) -> None:
    def build(num_tokens: int, **more: Any) -> Any:
        sources = [{"kind": "structured_chat", "share": 0.75}, {"kind": "text", "path": "builtin", "share": 0.25}]
        settings = {"sources": sources, "num_tokens": num_tokens, "window_tokens": 128} | more
        return build_calibration(Calibration.model_validate(settings), model).to_record()

    for num_tokens in (400, 8000):
        record = build(num_tokens)["sources"][0]
        assert record["tokens_used"] == num_tokens * 3 // 4
        assert (record["kind"], record["name"]) == ("structured_chat", "structured_chat")
    assert build(1000) == build(1000)
    assert build(1000)["sha256"] != build(1000, seed=1)["sha256"]
    assert build(1000, pack_documents=True)["num_tokens"] == 1000


def test_a_longer_draw_begins_with_the_shorter(model: ModelSource) -> None:
    settings = Calibration.model_validate({"num_tokens": 2000, "window_tokens": 128})
    source, tokenizer = StructuredChatSource(kind="structured_chat"), DocumentTokenizer(model.tokenizer())
    short, long = (draw_pieces(tokenizer, source, 0, n, settings, model, lambda *_: None)[0] for n in (1000, 3000))
    assert long[: len(short) - 1] == short[:-1]


def test_only_answers_count_if_asked(model: ModelSource) -> None:
    sources = [{"kind": "structured_chat", "count": "assistant"}]
    made = build_calibration(
        Calibration.model_validate({"sources": sources, "num_tokens": 3000, "window_tokens": 512}), model
    )
    assert 0 < int(made.token_mask.sum()) < made.num_tokens / 2
