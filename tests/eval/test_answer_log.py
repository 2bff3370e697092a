"""What an interrupted evaluation leaves, and when the next one may go on with it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.answer_log import AnswerLog
from quantkit_eval.errors import RecordError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import Generation, GenerationRequest

SUITES = {"extract": {"num_items": 10}}


@pytest.fixture
def interrupted(tmp_path: Path, fake_model: Callable[..., Any]) -> Path:
    """The folder of an evaluation that was killed after 8 of 10 items."""

    class Killed(fake_model):  # type: ignore[misc,valid-type]
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().generate(requests)  # type: ignore[no-any-return]

    with pytest.raises(KeyboardInterrupt):
        evaluate(Killed(), SUITES, 0, tmp_path / "out", batch_items=4, keep_answers=True)
    return tmp_path / "out"


def test_only_what_is_missing_is_asked(interrupted: Path, tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    asked: list[str] = []
    model = fake_model(lambda request: asked.append(request.id) or "{}")
    evaluate(model, SUITES, 0, interrupted, batch_items=4, keep_answers=True, resume=True)
    assert len(asked) == 2
    assert sorted(path.name for path in interrupted.iterdir()) == ["result.json", "samples.jsonl"]
    evaluate(fake_model(), SUITES, 0, tmp_path / "whole")
    assert (interrupted / "samples.jsonl").read_bytes() == (tmp_path / "whole" / "samples.jsonl").read_bytes()


def test_what_a_killed_evaluation_left_goes(interrupted: Path, fake_model: Callable[..., Any]) -> None:
    (interrupted / ".evaluate-killed").mkdir()
    (interrupted / ".evaluate-killed" / "samples.jsonl").write_text("half")
    evaluate(fake_model(), SUITES, 0, interrupted, keep_answers=True, resume=True)
    assert sorted(path.name for path in interrupted.iterdir()) == ["result.json", "samples.jsonl"]


def test_without_resume_everything_is_asked_again(
    interrupted: Path, fake_model: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    evaluate(fake_model(lambda r: asked.append(r.id) or "{}"), SUITES, 0, interrupted, keep_answers=True)
    assert len(asked) == 10
    assert "partial.jsonl: answers of an interrupted evaluation; without --resume" in caplog.text


def test_who_forgot_to_resume_loses_nothing_before_the_first_answer(
    interrupted: Path, fake_model: Callable[..., Any]
) -> None:
    class Gone(fake_model):  # type: ignore[misc,valid-type]
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(Gone(), SUITES, 0, interrupted, keep_answers=True)
    assert len(AnswerLog(interrupted / "answers.partial.jsonl", fake_model().describe(), resume=True)) == 8


def test_answers_to_other_questions_do_not_count(interrupted: Path, fake_model: Callable[..., Any]) -> None:
    asked: list[str] = []
    evaluate(fake_model(lambda r: asked.append(r.id) or "{}"), SUITES, 1, interrupted, resume=True)
    assert len(asked) == 10


def test_answers_of_another_model_are_refused(interrupted: Path, fake_model: Callable[..., Any]) -> None:
    for model in (fake_model(name="other"), fake_model(template="[{}]")):
        with pytest.raises(RecordError, match=r"of another model\. Do without --resume"):
            evaluate(model, SUITES, 0, interrupted, resume=True)
    assert (interrupted / "answers.partial.jsonl").exists()


ANSWER = {"id": "a", "text": "b", "finish_reason": "stop", "prompt_hash": "c", "num_prompt_tokens": 1}


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        '{"key": "a", "token_ids": [], "surprise": 1}',
        "no json",
        "[" * 100_000,
        json.dumps({"key": "a", "token_ids": [], **ANSWER, "text": 5}),
        json.dumps({"key": "a", "token_ids": [], **ANSWER, "text": "\ud800"}),
    ],
)
def test_a_damaged_line_is_named(interrupted: Path, fake_model: Callable[..., Any], line: str) -> None:
    path = interrupted / "answers.partial.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    with pytest.raises(RecordError, match=r"partial\.jsonl:4: no answer"):
        AnswerLog(path, fake_model().describe(), resume=True)


@pytest.mark.parametrize("cut", [1, 30])
def test_what_was_being_written_is_asked_for_again(interrupted: Path, fake_model: Callable[..., Any], cut: int) -> None:
    path = interrupted / "answers.partial.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(AnswerLog(path, fake_model().describe(), resume=True)) == 7
    path.write_text('{"model": {"na')
    assert len(AnswerLog(path, fake_model().describe(), resume=True)) == 0
