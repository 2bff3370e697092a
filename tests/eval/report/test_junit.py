"""JUnit XML as CI systems read it."""

import dataclasses
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest

from quantkit_eval.report import ReportInput
from quantkit_eval.report.junit import render_junit

# The shape that Jenkins' and GitLab's readers share: what an element may hold, which attributes it must and may have.
SHAPE: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"testsuite"}, set(), {"name", "tests", "failures", "errors", "skipped"}),
    "testsuite": (
        {"properties", "testcase", "system-out"},
        {"name", "tests", "failures", "errors", "skipped"},
        {"timestamp"},
    ),
    "properties": ({"property"}, set(), set()),
    "property": (set(), {"name", "value"}, set()),
    "testcase": ({"failure", "error", "skipped", "system-out"}, {"name", "classname"}, set()),
    "failure": (set(), {"type", "message"}, set()),
    "error": (set(), {"type", "message"}, set()),
    "skipped": (set(), {"message"}, set()),
    "system-out": (set(), set(), set()),
}


def read(run: ReportInput) -> ET.Element:
    root = ET.fromstring(render_junit(run.made_visible()).encode())
    for element in root.iter():
        children, needed, allowed = SHAPE[element.tag]
        assert {child.tag for child in element} <= children
        assert needed <= element.attrib.keys() <= needed | allowed
    (suite,) = root
    cases = suite.findall("testcase")
    counted = {
        "tests": len(cases),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    for element in (root, suite):
        assert {name: int(element.attrib[name]) for name in counted} == counted
    names = [(case.attrib["classname"], case.attrib["name"]) for case in cases]
    assert len(names) == len(set(names)), "two cases of one name are one case to a CI system"
    return root


@pytest.mark.parametrize("kind", ["fail", "pass", "inconclusive", "aa"])
def test_one_case_a_gate_with_its_verdict(kind: str, make_run: Callable[[str], ReportInput]) -> None:
    run = make_run(kind)
    cases = read(run).findall("testsuite/testcase")
    assert len(cases) == len(run.verdict["gates"])
    for case, gate in zip(cases, run.verdict["gates"], strict=True):
        assert f"{case.attrib['classname']}.{case.attrib['name']}" == f"quantkit.{gate['name']}"
        (found,) = case
        assert found.tag == {"fail": "failure", "inconclusive": "error", "pass": "system-out"}[gate["verdict"]]
        assert gate["reason"] in "".join(found.attrib.get("message", found.text) or "")
        assert f"n {gate['n']}" in (found.text or "")


def test_inconclusive_says_how_many_items_it_needs(make_run: Callable[[str], ReportInput]) -> None:
    root = read(make_run("inconclusive"))
    errors = {case.attrib["name"]: case.find("error") for case in root.iter("testcase")}
    error = errors["exact"]
    assert error is not None
    assert error.attrib["type"] == "inconclusive"
    assert "(needs about 310 items)" in error.attrib["message"]
    properties = {entry.attrib["name"]: entry.attrib["value"] for entry in root.iter("property")}
    assert properties["verdict"] == "inconclusive"
    assert "too few" in properties["summary"]


def test_no_gate_is_one_skipped_case(make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("aa")
    root = read(dataclasses.replace(run, verdict=run.verdict | {"gates": []}))  # type: ignore[arg-type]
    (case,) = root.iter("testcase")
    assert case[0].tag == "skipped"
    assert "nll.perplexity" in (root.findtext("testsuite/system-out") or "")


def test_any_text_is_valid_xml(make_run: Callable[[str], ReportInput], make_record: Callable[..., Any]) -> None:
    evil = ']]></failure><x> " & \x00 \x1b \ud800 \ufffe \r\n'
    run = make_run("fail")
    gate = make_record("gates.extract", reason=evil, suite=evil, metric=evil, test=evil)
    root = read(dataclasses.replace(run, verdict=run.verdict | {"gates": [gate]}))  # type: ignore[arg-type]
    (failure,) = root.iter("failure")
    assert failure.attrib["message"].startswith(']]></failure><x> " & ␀ ␛ ⟨U+D800⟩ ⟨U+FFFE⟩ ␍')
