"""The page: complete, escaped, self-contained, the same for the same input."""

# ruff: noqa: RUF001 (the report writes real minus and multiplication signs)

import base64
import copy
import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.report import ReportInput
from quantkit_eval.report.html import render_html

VOID = {"wbr", "meta", "link", "input", "br", "hr", "img", "path"}
LOADING = {"src", "srcset", "href", "action", "formaction", "poster", "data", "background", "xlink:href"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onclick=alert(3) {{ 7*7 }} <!-- ]]> "
EVIL += "\x00\ud800\u202e"


class Page(HTMLParser):
    """Every element with its attributes and text; fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {[tag for tag, _, _ in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"attribute twice in <{tag}>"
        if tag in VOID:
            self.elements.append((tag, dict(attrs), ""))
        else:
            self.open.append((tag, dict(attrs), []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        name, attributes, texts = self.open.pop()
        assert name == tag, f"</{tag}> closes <{name}>"
        text = "".join(texts)
        self.elements.append((name, attributes, text))
        if self.open:
            self.open[-1][2].append(text)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1][2].append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str | None], str]]:
        return [
            (found, text)
            for name, found, text in self.elements
            if name == tag
            and all((found.get(key.rstrip("_").replace("_", "-")) or "") == v for key, v in attributes.items())
        ]

    def text(self, tag: str, **attributes: str) -> str:
        found = self.all(tag, **attributes)
        assert len(found) == 1, f"{len(found)} <{tag}> with {attributes}"
        return " ".join(found[0][1].split())


def page_of(run: ReportInput) -> Page:
    return Page(render_html(run.made_visible()))


@pytest.mark.parametrize("kind", ["fail", "pass", "inconclusive", "aa"])
def test_page_holds_gates_intervals_and_flipped_items(kind: str, make_run: Callable[[str], ReportInput]) -> None:
    run = make_run(kind)
    page = page_of(run)
    gates = run.verdict["gates"]
    rows = [attributes["data-gate"] for attributes, _ in page.all("tr") if "data-gate" in attributes]
    assert sorted(str(row) for row in rows) == sorted(gate["name"] for gate in gates)
    assert len(page.all("span", class_="interval")) == len(gates)
    drawn = [
        attributes for attributes, _ in page.all("svg", role="img") if str(attributes["aria-labelledby"])[:5] == "gate-"
    ]
    assert len(drawn) == len(gates)
    for gate in gates:
        assert any(gate["reason"] in text for _, text in page.all("tr"))
    items = [attributes for attributes, _ in page.all("details", class_="item")]
    assert Counter(item["data-direction"] for item in items) == Counter(f["direction"] for f in run.verdict["flipped"])
    texts = [text for _, text in page.all("details", class_="item")]
    for flip in run.verdict["flipped"]:
        (text,) = (text for text in texts if flip["id"] in text)
        for shown in (flip["prompt"], flip["baseline_output"], flip["candidate_output"]):
            assert shown in text
        assert all(str(value) in text for value in flip["gold"].values()), "the gold value is missing"


def test_verdict_is_one_sentence_at_the_top(make_run: Callable[[str], ReportInput]) -> None:
    heads = {kind: page_of(make_run(kind)).text("h1") for kind in ("fail", "pass", "inconclusive", "aa")}
    assert heads["fail"].startswith("Fail: structured output broke: 29 of 32 → 0 of 32 exactly right")
    assert "KL 0.412 nats, limit 0.1 nats" in heads["fail"]
    assert heads["pass"].startswith("Pass: all 3 gates held: structured output 273 of 300 → 274 of 300")
    assert "32 items are too few to tell whether structured output held (29 of 32 → 28 of 32)" in heads["inconclusive"]
    assert "about 310 would do" in heads["inconclusive"]
    assert heads["aa"] == "Pass: the gate held: structured output 29 of 32 → 29 of 32."


def test_items_are_not_called_too_few_where_no_number_would_do(make_run: Callable[[str], ReportInput]) -> None:
    run = copy.deepcopy(make_run("inconclusive"))
    gate = run.verdict["gates"][0]
    gate.update(baseline=0.0, candidate=0.0, difference=0.0, value=0.0, items_needed=None)
    gate["discordant"] = {"improved": 0, "regressed": 0}
    head = page_of(run).text("h1")
    assert "structured output has no more to lose than is allowed (0 of 32 → 0 of 32)" in head
    assert "too few" not in head


def test_numbers_behind_the_verdict(make_run: Callable[[str], ReportInput]) -> None:
    page = page_of(make_run("fail"))
    (row,) = (
        " ".join(text.split()) for attributes, text in page.all("tr") if attributes.get("data-gate") == "extract.exact"
    )
    for shown in (
        "29 of 32",
        "0 of 32",
        "−90.6 pp",
        "at most 5 pp lower",
        "−99.6 to −81.6 pp, two-sided 90%",
    ):
        assert shown in row
    (tests,) = (text for _, text in page.all("span", class_="test") if "exact McNemar" in text)
    assert "n 32 items" in tests
    assert "29 regressed, 0 improved" in tests
    text = page.text("main")
    for shown in (
        "216 MB → 114 MB",
        "×1.78",
        "0.412 nats",
        "nll.perplexity",
        "damping 0.04 instead of 0.01",
        "Example CPU 8481C",
    ):
        assert shown in text
    inconclusive = page_of(make_run("inconclusive"))
    assert [text for _, text in inconclusive.all("span", class_="needed")] == [
        "needs about 310 items",
        "needs about 90 windows",
    ]
    recipe = page.all("pre", class_="recipe")
    assert [text for _, text in recipe] == [make_run("fail").checkpoint["recipe"]]  # type: ignore[index]


def test_levels_of_confidence_are_explained(make_run: Callable[[str], ReportInput]) -> None:
    text = page_of(make_run("fail")).text("main")
    assert "Intervals are two-sided. At 90% each end alone errs in 5% of cases" in text
    assert "hence 95% where a sentence speaks of one end" in text
    assert "Intervals in brackets are two-sided, 95%." in text
    assert "its two-sided 98.4% interval" in text
    assert "what the pairs give" not in text
    run = make_run("fail")
    gates = [gate | ({"confidence": 0.9375} if gate["kind"] == "ratio" else {}) for gate in run.verdict["gates"]]
    speedy = dataclasses.replace(run, verdict=run.verdict | {"gates": gates})  # type: ignore[arg-type]
    assert "its level is what the pairs give" in page_of(speedy).text("main")


def test_a_proven_loss_within_the_margin_is_not_called_too_large(make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("fail")
    gate = run.verdict["gates"][0]
    small = gate | {"candidate": 0.875, "difference": -0.03125, "value": -0.03125, "interval": [-0.09, -0.01]}
    head = page_of(dataclasses.replace(run, verdict=run.verdict | {"gates": [small]})).text("h1")  # type: ignore[arg-type]
    assert "which is proven; whether by more than the 5 pp allowed is not" in head
    assert "not." not in page_of(run).text("h1")


def test_a_baseline_from_a_gguf_is_called_what_it_is(make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("fail")
    origin = {"file": "tiny-q4_1.gguf", "file_bytes": 98_000_000}
    model = run.baseline["model"] | {"dequantized_from": origin}
    text = page_of(dataclasses.replace(run, baseline=run.baseline | {"model": model})).text("main")  # type: ignore[arg-type]
    assert "dequantized to 16 bits from tiny-q4_1.gguf (98 MB)" in text
    assert "before: 16 bits, dequantized from a file of 98 MB" in text


def test_reasons_are_not_told_twice(make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("fail")
    reason = f"2 of 4 gates failed. {run.verdict['gates'][0]['reason']}"
    page = page_of(dataclasses.replace(run, verdict=run.verdict | {"reason": reason}))  # type: ignore[arg-type]
    assert page.text("p", class_="because") == "2 of 4 gates failed."
    assert page.text("main").count(run.verdict["gates"][0]["reason"]) == 1


def test_nothing_loads(make_run: Callable[[str], ReportInput]) -> None:
    text = render_html(make_run("fail").made_visible())
    page = Page(text)
    for tag, attributes, _ in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in LOADING:
                assert re.fullmatch(r"#[a-z]+|data:,", value or ""), f"<{tag} {name}={value!r}>"
    assert not re.search(r"@import|url\(|https?://|src=", text)
    (policy,) = (a["content"] or "" for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        ((_, content),) = page.all(tag)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy, f"the policy would block the page's own <{tag}>"


def test_page_is_sensible_to_a_screen_reader(make_run: Callable[[str], ReportInput]) -> None:
    page = page_of(make_run("fail"))
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert not [name for name, count in Counter(ids).items() if count > 1]
    for _, attributes, _ in page.elements:
        for name in ("aria-labelledby", "for"):
            assert set((attributes.get(name) or "").split()) <= set(ids)
    assert all((a["href"] or "")[1:] in ids for a, _ in page.all("a"))
    assert len(page.all("main")) == len(page.all("header")) == len(page.all("footer")) == len(page.all("h1")) == 1
    assert page.all("html", lang="en")
    assert all("scope" in attributes for attributes, _ in page.all("th"))
    assert all(a.get("role") == "img" or a.get("aria-hidden") == "true" for a, _ in page.all("svg"))
    for a, _ in page.all("section"):
        assert a.get("aria-labelledby") or "output" in str(a.get("class"))
    assert all(a.get("aria-label") for a, _ in page.all("div") if a.get("role") == "region")
    controls = page.all("select") + page.all("input")
    assert len(page.all("label")) == len(controls)


def test_what_a_model_wrote_stays_text(make_run: Callable[[str], ReportInput], make_flip: Callable[..., Any]) -> None:
    clean = make_run("fail")
    gold = {"name": EVIL.split("\x00")[0], "born": 1, "city": "x"}
    before, after, flip = make_flip(0, EVIL, gold, f"left {EVIL}", f"right {EVIL}")
    gate = clean.verdict["gates"][0] | {"reason": EVIL, "test": EVIL, "suite": EVIL, "metric": EVIL, "name": EVIL}
    model = {"name": EVIL, "scheme": EVIL, "revision": EVIL}
    run = dataclasses.replace(
        clean,
        verdict=clean.verdict | {"flipped": [flip | {"suite": EVIL, "id": EVIL}], "gates": [gate], "reason": EVIL},  # type: ignore[arg-type]
        candidate=clean.candidate | {"model": model},  # type: ignore[arg-type]
        baseline_samples=[before],
        candidate_samples=[after],
        checkpoint={"schema_version": 1, "recipe": EVIL, "layers": [{"name": EVIL, "fallbacks": [EVIL]}], EVIL: EVIL},
    )
    text = render_html(run.made_visible())
    page = Page(text)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not [a for _, a, _ in page.elements if any(name.startswith("on") for name in a)]
    shown = EVIL.replace("\x00", "␀").replace("\ud800", "⟨U+D800⟩").replace("\u202e", "⟨U+202E⟩")
    assert f"left {shown}" in page.all("pre")[2][1]
    assert f"right {shown}" in page.all("pre")[3][1]
    assert "49" not in page.text("h1")
    text.encode("utf-8")


def test_output_starts_and_ends_as_it_is(make_run: Callable[[str], ReportInput], make_flip: Callable[..., Any]) -> None:
    clean = make_run("aa")
    gold = {"name": "a", "born": 1, "city": "b"}
    *_, one = make_flip(0, "\n\n  prompt\n", gold, "\n\n  left\n", "")
    *_, two = make_flip(1, "prompt", gold, "same", "same")
    page = page_of(dataclasses.replace(clean, verdict=clean.verdict | {"flipped": [one, two]}))  # type: ignore[arg-type]
    pres = [text.removeprefix("\n") for attributes, text in page.all("pre") if attributes.get("dir") == "auto"]
    assert pres == ["\n\n  prompt\n", '{"name": "a", "born": 1, "city": "b"}', "\n\n  left\n", "(empty)",
                    "prompt", '{"name": "a", "born": 1, "city": "b"}', "same", "same"]  # fmt: skip
    divergences = [text for _, text in page.all("div") if text.startswith("Divergence")]
    assert divergences == ["Divergenceafter 0 equal characters", "Divergencenone: both outputs are equal"]


def test_divergence_is_marked_where_the_outputs_part(make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("fail")
    text = render_html(run.made_visible())
    for flip in run.verdict["flipped"]:
        sides = re.search(re.escape(flip["id"]) + r"</span>.*?<div class=\"outputs\">(.*?)</div>", text, re.DOTALL)
        assert sides is not None
        before = [
            re.sub(r"<[^>]+>", "", part)
            for part in re.findall(r"<pre dir=\"auto\">\n(.*?)<span class=\"divergence\"", sides[1])
        ]
        assert len(before) == 2, "one mark in each output"
        assert before[0] == before[1]
        plain = before[0].replace("&#34;", '"').replace("&#39;", "'")
        assert flip["baseline_output"].startswith(plain)
        assert flip["candidate_output"].startswith(plain)


def test_five_hundred_long_items_in_many_scripts_fit(
    make_run: Callable[[str], ReportInput], make_flip: Callable[..., Any]
) -> None:
    clean = make_run("fail")
    gold = {"name": "שלום עולם 👩🏽\u200d🚀", "born": 1, "city": "東京"}
    filler = 'مرحبا بالعالم "quoted" <b>&amp; 🙂 हिन्दी ' * 120
    made = [
        make_flip(i, f"{filler} item {i}", gold, f"same start {filler} left {i}", f"same start {filler}  right {i}")
        for i in range(500)
    ]
    run = dataclasses.replace(
        clean, verdict=clean.verdict | {"flipped": [flip for *_, flip in made]},  # type: ignore[arg-type]
        baseline_samples=[before for before, *_ in made], candidate_samples=[after for _, after, _ in made],
    )  # fmt: skip
    text = render_html(run.made_visible())
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    items = page.all("details", class_="item")
    assert len(items) == 500
    for index, (_, shown) in enumerate(items):
        assert f"left {index}" in shown, "the end of the output, where it differs, was cut away"
        assert f"right {index}" in shown
        assert "characters before" in shown, "nothing is cut without saying so"
    assert len(page.all("details", id="more")) == 1


def test_items_beyond_the_budget_are_named(
    make_run: Callable[[str], ReportInput], make_flip: Callable[..., Any]
) -> None:
    clean = make_run("fail")
    gold = {"name": "n", "born": 1, "city": "c"}
    filler = "<&" * 400
    flips = [make_flip(i, filler, gold, f"{filler} l{i}", f"{filler} r{i}")[2] for i in range(1500)]
    text = render_html(dataclasses.replace(clean, verdict=clean.verdict | {"flipped": flips}))  # type: ignore[arg-type]
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    shown, (_, names) = page.all("details", class_="item"), page.all("ul", class_="names")[0]
    assert 100 < len(shown) < 1500
    named = re.findall(r"extract / (extract-\d+)", names)
    assert len(shown) + len(named) == 1500, "every flipped item is somewhere"
    assert f"{len(named)} more by name only" in page.text("main")


def test_runs_with_little_in_them(make_run: Callable[[str], ReportInput]) -> None:
    clean = make_run("aa")
    nothing = {
        "gates": [],
        "flipped": [],
        "unjudged": [{"suite": "x", "metric": "y", "baseline": None, "candidate": None, "unit": ""}],
    }
    page = page_of(dataclasses.replace(clean, verdict=clean.verdict | nothing))  # type: ignore[arg-type]
    text = page.text("main")
    assert page.text("h1") == "Pass: the recipe asked for no gate, so nothing was judged."
    assert "Throughput was not measured" in text
    assert "has no quantkit.json" in text
    assert "x.y" in text
    assert not re.search(r"\bNone\b|\bnan\b|undefined", text)
    bare = {
        "schema_version": 1,
        "layers": [{"name": "lm_head"}, {"name": "model.layers.0.a", "relative_output_error": None}],
    }
    text = page_of(dataclasses.replace(clean, checkpoint=bare)).text("main")
    assert "All 2 layers" in text
    assert not re.search(r"\bnan\b|undefined", text)


def test_same_input_same_page(make_run: Callable[[str], ReportInput]) -> None:
    assert render_html(make_run("fail").made_visible()) == render_html(make_run("fail").made_visible())


def contrast(one: str, two: str) -> float:
    """Contrast ratio of WCAG 2: relative luminances of sRGB colours, (lighter + 0.05) / (darker + 0.05)."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast() -> None:
    css = (
        Path(render_html.__code__.co_filename).with_name("templates").joinpath("report.css").read_text(encoding="utf-8")
    )
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    light, dark, paper = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", block)) for block in blocks)
    for colours in (light, light | dark, light | paper):
        pairs = [(text, ground) for text in ("text", "soft") for ground in ("page", "card", "faint")]
        pairs += [("link", "page"), ("text", "mark"), ("limit", "page"), ("text", "forbidden")]
        pairs += [(tone, f"{tone}-ground") for tone in ("pass", "fail", "inconclusive")]
        pairs += [("card", tone) for tone in ("pass", "fail", "inconclusive")]
        for one, two in pairs:
            assert contrast(colours[one], colours[two]) >= 4.5, (
                f"{one} on {two}: {contrast(colours[one], colours[two]):.2f}"
            )
        for one, two in [(t, "forbidden") for t in ("pass", "fail", "inconclusive")] + [
            ("candidate", "card"),
            ("bar", "card"),
        ]:
            assert contrast(colours[one], colours[two]) >= (3 if two == "forbidden" else 2.5), f"{one} on {two}"
