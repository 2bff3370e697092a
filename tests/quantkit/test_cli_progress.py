import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

import quantkit.recipe
from quantkit.cli import main
from quantkit.cli.output import emit, size, table
from quantkit.cli.progress import PLAIN_SECONDS, PlainLines, show_progress
from quantkit.cli.quiet import OURS, WarningLines


def test_plain_lines_at_the_start_at_the_end_and_now_and_then() -> None:
    times: Iterator[float] = iter([0.0, 0.0, 1.0, PLAIN_SECONDS, PLAIN_SECONDS + 1, 40.0, 41.0, 61.0, 62.0])
    stream = io.StringIO()
    progress = PlainLines(stream, clock=lambda: next(times))
    for done in (0, 1, 2, 3, 4, 4):
        progress("quantize", done, 4)
    progress("evaluate", 5, 10)  # first heard of after its first batch, which began at 41
    progress("measure", 5, 0)
    assert stream.getvalue().splitlines() == [
        "quantize: 0/4 after 0:00",
        "quantize: 2/4 after 0:10, about 0:10 left",
        "quantize: 4/4 after 0:40",
        "evaluate: 5/10 after 0:20, about 0:20 left",
        "measure: 5 after 0:01",
    ]


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    stream = io.StringIO()
    with show_progress(stream) as progress:
        progress("read", 1, 1)
    assert stream.getvalue() == "read: 1/1 after 0:00\n"


def test_a_terminal_gets_a_bar_with_elapsed_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with show_progress(stream) as progress:
        progress("quantize", 1, 4)
        progress("quantize", 4, 4)
        progress("evaluate", 0, 0)
    text = stream.getvalue()
    assert "quantize" in text
    assert "4/4" in text
    assert "0:00:00" in text
    assert "evaluate" in text


def test_json_is_one_document_without_nan(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"größe": [1, 2]}, ["never"], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"größe": [1, 2]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit({"value": float("nan")}, [], as_json=True)
    emit({}, ["one", "two"], as_json=False)
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_table_aligns_numbers_to_the_right() -> None:
    assert table([("a", 5), ("long", 1000)], header=("name", "bytes")) == [
        "name  bytes",
        "a         5",
        "long   1000",
    ]
    assert table([]) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (269_060_552, "256.6 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes(given: int, said: str) -> None:
    assert size(given) == said


def test_our_warnings_are_lines_and_those_of_others_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantkit.recipe.load_recipe

    def talkative(name: str) -> quantkit.recipe.Recipe:
        logging.getLogger("quantkit.recipe").warning("the pattern %s is odd", "x")
        logging.getLogger("quantkit.recipe").info("not worth a line")
        warnings.warn_explicit("old", DeprecationWarning, "theirs.py", 1, module="transformers.models")
        return real(name)

    monkeypatch.setattr(quantkit.recipe, "load_recipe", talkative)
    with warnings.catch_warnings():
        result = CliRunner().invoke(main, ["recipes", "show", "aa"])
    assert result.exit_code == 0
    assert result.stderr == "quantkit: warning: the pattern x is odd\n"
    for name in OURS:
        handlers = [handler for handler in logging.getLogger(name).handlers if isinstance(handler, WarningLines)]
        assert len(handlers) == 1
