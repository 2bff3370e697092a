"""Judges an answer after the fact: has it the form that was asked for? A grammar may enforce less than a schema."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from quantkit.serve.structured.compiler import CompiledGrammar

logger = logging.getLogger(__name__)
START_LIMIT_S = 60.0
PROGRAM = Path(__file__).with_name("validation_process.py")
TIME_LIMIT_S = 5.0  # of one answer; a pattern like (a+)+$ would take longer than the universe has been there


class AnswerValidator:
    """Validates answers with jsonschema in a process of its own, which is ended if it takes too long.

    Any thread may call it; answers are judged one after the other.

    Args:
        time_limit_s: seconds for one answer.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[str] | None = None
        self._lines: Queue[str] = Queue()
        self._lock = threading.Lock()

    def is_valid(self, grammar: CompiledGrammar, text: str, token_ids: Sequence[int] | None = None) -> bool | None:
        """True if the answer has the form, False if not, None if that cannot be told in the time limit.

        Args:
            grammar: the form.
            text: the whole answer.
            token_ids: its tokens, if known, without one of the end: a grammar may name special tokens, which have no
                text, and only the tokens show them.
        """
        if grammar.spec.kind == "choice":
            return text in grammar.spec.value
        if grammar.spec.kind != "json_schema":
            return grammar.matches(text) if token_ids is None else grammar.accepts(token_ids)
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return False
        return self.fits(grammar.spec.schema, value)

    def fits(self, schema: Any, value: Any) -> bool | None:
        """Whether a JSON value fits a schema; None if that cannot be told."""
        with self._lock:
            try:
                return self._ask(json.dumps([schema, value]))
            except (Empty, OSError) as error:
                logger.warning("an answer could not be validated in %s s: %r", self._time_limit_s, error)
                self._end()
                return None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, line: str) -> bool | None:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
        self._say(line)
        verdict = json.loads(self._lines.get(timeout=self._time_limit_s))
        return None if verdict is None else bool(verdict)

    def _start(self) -> None:
        """Start the process and wait until it answers; starting does not count against an answer's time."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines = Queue()
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        self._say("[true, null]")
        self._lines.get(timeout=START_LIMIT_S)

    def _say(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)


def _read(process: subprocess.Popen[str], lines: Queue[str]) -> None:
    """Hand on what the process says until it ends."""
    assert process.stdout is not None, "it was started with pipes"
    try:
        for line in process.stdout:
            lines.put(line)
    except ValueError:  # closed while it was read: the process was ended
        return


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was still to be written has no reader any more
        return


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
