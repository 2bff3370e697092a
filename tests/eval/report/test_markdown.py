"""Markdown as an independent parser reads it: tables and code, and nothing that a model slipped in."""

# ruff: noqa: RUF001 (the report writes real minus and multiplication signs)

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from quantkit_eval.report import ReportInput
from quantkit_eval.report.markdown import plain, render_markdown

OWN_HTML = {"<details>", "</details>", "<sub>", "</sub>"}
EVIL = "| a | <img src=x onerror=1> [x](http://evil.example) @admin #1 `code` ``` **bold** www.evil.example :tada: $x$"
EVIL += "\n\n# head"


def parse(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def rows_of(tokens: list[Token]) -> list[list[str]]:
    rows: list[list[str]] = []
    for index, token in enumerate(tokens):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("th_open", "td_open"):
            rows[-1].append("".join(child.content for child in tokens[index + 1].children or []))
    return rows


def html_of(tokens: list[Token]) -> set[str]:
    found = set()
    for token in tokens:
        for piece in [token, *(token.children or [])]:
            if piece.type in ("html_block", "html_inline"):
                found |= set(re.findall(r"<[^>]+>", piece.content))
    return found


@pytest.mark.parametrize("kind", ["fail", "pass", "inconclusive", "aa"])
def test_gates_are_a_table(kind: str, make_run: Callable[[str], ReportInput]) -> None:
    run = make_run(kind)
    tokens = parse(render_markdown(run.made_visible()))
    head, *rows = rows_of(tokens)
    assert head[:4] == ["Verdict", "Gate", "Baseline", "Candidate"]
    assert len(rows) == len(run.verdict["gates"])
    for row, gate in zip(rows, run.verdict["gates"], strict=True):
        assert len(row) == len(head)
        assert gate["verdict"].capitalize() in row[0]
        assert f"n {gate['n']}" in row[-1]
    assert html_of(tokens) <= OWN_HTML | {"<summary>", "</summary>"}
    heading = next(tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open")
    assert run.verdict["verdict"].capitalize() in heading


def test_failure_reads_well(make_run: Callable[[str], ReportInput]) -> None:
    text = render_markdown(make_run("fail").made_visible())
    assert text.startswith("## ❌ Fail: structured output broke: 29 of 32 → 0 of 32 exactly right; ")
    assert "| −90.6 pp | −99.6 to −81.6 pp, two-sided 90% | at most 5 pp lower |" in text
    assert "29 flipped items, the first 5" in text
    assert "Measured, not judged: nll.perplexity." in text
    assert "29 November 2026, 14:05 UTC" in text
    assert "needs about 310 items" in render_markdown(make_run("inconclusive").made_visible())
    assert "No item flipped." in render_markdown(make_run("aa").made_visible())


def test_flipped_items_are_shown_before_and_after(make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("fail")
    fences = [token for token in parse(render_markdown(run.made_visible())) if token.type == "fence"]
    assert [token.info for token in fences] == ["text", "diff"] * 5
    for flip, before, after in zip(run.verdict["flipped"], fences[::2], fences[1::2], strict=False):
        assert flip["prompt"] in before.content
        old = [line[2:] for line in after.content.splitlines() if line.startswith("- ")]
        new = [line[2:] for line in after.content.splitlines() if line.startswith("+ ")]
        assert "\n".join(old) == flip["baseline_output"]
        assert "\n".join(new) == flip["candidate_output"]


def test_what_a_model_wrote_stays_code(make_run: Callable[[str], ReportInput], make_flip: Callable[..., Any]) -> None:
    run = make_run("fail")
    evil = EVIL + "\n````\n</details>\n<script>@admin</script>\r\n~~~\n\x00"
    *_, flip = make_flip(0, evil, {"name": evil}, evil, evil + "!")
    gate = run.verdict["gates"][0] | {"suite": EVIL, "metric": EVIL, "test": EVIL}
    candidate = run.candidate | {"model": {"name": EVIL, "revision": EVIL}}
    verdict = run.verdict | {"flipped": [flip | {"suite": EVIL, "id": EVIL}], "gates": [gate]}
    text = render_markdown(dataclasses.replace(run, verdict=verdict, candidate=candidate).made_visible())  # type: ignore[arg-type]
    tokens = parse(text)
    assert html_of(tokens) <= OWN_HTML | {"<summary>", "</summary>"}
    assert [len(row) for row in rows_of(tokens)] == [8, 8]
    assert len([token for token in tokens if token.type == "heading_open"]) == 1
    kinds = {child.type for token in tokens for child in token.children or []}
    assert not kinds & {"link_open", "image", "code_inline", "html_block"}
    fences = [token for token in tokens if token.type == "fence"]
    assert len(fences) == 2
    assert "+ </details>" in fences[1].content
    outside = [child.content for token in tokens for child in token.children or []]
    assert not any(re.search(r"(^|\W)[@#]\w", content) for content in outside), "a forge would notify somebody"
    lines = text.splitlines()
    for fence in fences:
        assert fence.map is not None
        lines[fence.map[0] : fence.map[1]] = [""] * (fence.map[1] - fence.map[0])
    assert not any(re.search(r"https?://|www\.", line) for line in lines), "a forge would make it a link"


def test_long_outputs_fit_a_comment(make_run: Callable[[str], ReportInput], make_flip: Callable[..., Any]) -> None:
    run = make_run("fail")
    flips = [make_flip(i, "p" * 9000, {"name": "n"}, "x" * 9000, "y" * 9000)[2] for i in range(500)]
    text = render_markdown(dataclasses.replace(run, verdict=run.verdict | {"flipped": flips}))  # type: ignore[arg-type]
    assert len(text) < 60_000, "GitHub cuts comments at 65,536 characters"
    assert "500 flipped items, the first 5" in text


def test_no_gates(make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("aa")
    text = render_markdown(dataclasses.replace(run, verdict=run.verdict | {"gates": []}))  # type: ignore[arg-type]
    assert "nothing was judged" in text
    assert not rows_of(parse(text))


def test_plain_text_reads_as_it_was() -> None:
    tokens = MarkdownIt("commonmark").parse(plain("a*b* <c> & [d](e) `f` \\g ~h~ 1:2"))
    assert "".join(child.content for child in tokens[1].children or []) == "a*b* <c> & [d](e) `f` \\g ~\u2060h~ 1:2"
