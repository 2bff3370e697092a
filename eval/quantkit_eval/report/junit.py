"""The gates as JUnit XML, which every CI system shows beside the tests.

A proven regression is a ``failure``, a gate that the data cannot decide is an ``error`` of type ``inconclusive``: both
stop a pipeline, as the exit codes 3 and 4 do, and the two counts keep them apart. ``skipped`` would show a green report
beside a red job. A run without gates has one skipped case, because several readers reject a file without any.
"""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from quantkit_eval.record_types import Gate
from quantkit_eval.report.gates import change, level, metric_words, needed, requirement, subject
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.provenance import model_name
from quantkit_eval.report.sections import interval_line, test_line
from quantkit_eval.report.wording import headline

SUITE_NAME = "quantkit"


def render_junit(run: ReportInput) -> str:
    """One test case a gate, for a run whose texts were made visible."""
    gates = run.verdict["gates"]
    counts = {
        "tests": str(max(len(gates), 1)),
        "failures": str(sum(gate["verdict"] == "fail" for gate in gates)),
        "errors": str(sum(gate["verdict"] == "inconclusive" for gate in gates)),
        "skipped": "0" if gates else "1",
    }
    root = Element("testsuites", {"name": SUITE_NAME, **counts})
    suite = SubElement(
        root, "testsuite", {"name": SUITE_NAME, **counts, "timestamp": run.verdict["created"].rstrip("Z")}
    )
    properties = SubElement(suite, "properties")
    for name, value in _properties(run):
        SubElement(properties, "property", {"name": name, "value": value})
    for gate in gates:
        _test_case(suite, gate)
    if not gates:
        case = SubElement(suite, "testcase", {"classname": SUITE_NAME, "name": "gates"})
        SubElement(case, "skipped", {"message": "the recipe names no gate, so nothing was judged"})
    SubElement(suite, "system-out").text = _unjudged(run)
    indent(root)
    return "<?xml version='1.0' encoding='UTF-8'?>\n" + tostring(root, encoding="unicode") + "\n"


def _properties(run: ReportInput) -> list[tuple[str, str]]:
    return [
        ("verdict", run.verdict["verdict"]),
        ("summary", headline(run)),
        ("baseline", model_name(run.baseline["model"])),
        ("candidate", model_name(run.candidate["model"])),
        ("flipped", str(len(run.verdict["flipped"]))),
    ]


def _test_case(suite: Element, gate: Gate) -> None:
    # names without the limit, so that a CI system finds the same case again in the next run
    case = SubElement(suite, "testcase", {"classname": f"{SUITE_NAME}.{gate['suite']}", "name": gate["metric"]})
    details = "\n".join(
        [
            f"{subject(gate['suite'])}: {metric_words(gate['metric'])}, {requirement(gate)}",
            f"baseline {level(gate, 'baseline')}, candidate {level(gate, 'candidate')}, difference {change(gate)}",
            f"interval {interval_line(gate)}",
            test_line(gate),
        ]
    )
    if gate["verdict"] == "fail":
        SubElement(case, "failure", {"type": "regression", "message": gate["reason"]}).text = details
    elif gate["verdict"] == "inconclusive":
        message = f"{gate['reason']} ({needed(gate)})" if needed(gate) else gate["reason"]
        SubElement(case, "error", {"type": "inconclusive", "message": message}).text = details
    else:
        SubElement(case, "system-out").text = f"{gate['reason']}\n{details}"


def _unjudged(run: ReportInput) -> str:
    names = [f"{entry['suite']}.{entry['metric']}" for entry in run.verdict["unjudged"]]
    return f"measured, not judged: {', '.join(names)}" if names else "everything measured was judged"
