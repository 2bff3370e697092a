"""A server behind a URL as a model: what it is asked, what it answers, and every way in which it can fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.errors import NotOfferedError, OptionError, TargetError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import MESSAGES_ONLY, Model, TokenScorer
from quantkit_eval.records import read_samples
from quantkit_eval.targets import OpenAIServer, RequestLimits
from tests.eval.fake_server import QUICK, Answer, FakeServer, chat, in_turn, request

NO_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}


def test_a_server_is_a_model_and_answers_in_order(fake: FakeServer) -> None:
    fake.paths["/v1/chat/completions"] = lambda body: chat(body["messages"][0]["content"].upper())
    model = OpenAIServer(fake.url, api_key="secret", limits=QUICK)
    assert isinstance(model, Model)
    assert isinstance(model, TokenScorer)
    generations = model.generate([request(str(number), f"word {number}") for number in range(10)])
    assert [(one.id, one.text) for one in generations] == [(str(i), f"WORD {i}") for i in range(10)]
    assert (generations[0].num_prompt_tokens, generations[0].num_tokens, generations[0].token_ids) == (7, 4, ())
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}
    described = model.describe()
    assert (described["model"]["name"], described["model"]["url"]) == ("tiny", fake.url)
    about = {"name": "fake", "version": None, "interface": "openai", "concurrency": 3, "neutral": NO_PENALTIES}
    assert described["engine"] == about
    assert "secret" not in json.dumps(described)


def test_what_is_asked_is_what_the_request_says(fake: FakeServer) -> None:
    schema = {"type": "object"}
    model = OpenAIServer(fake.url, limits=QUICK)
    model.generate([request("a", schema=schema, seed=3, stop=("x",), temperature=0.5)])
    assert fake.asked[-1][1] == {
        "model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0.5,
        "top_p": 1.0, "seed": 3, "stop": ["x"], **NO_PENALTIES, "response_format": {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    }  # fmt: skip
    model.generate([request("a")])
    assert not {"response_format", "seed", "stop", "ignore_eos"} & fake.asked[-1][1].keys()


@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ((), set(NO_PENALTIES)),
        (("repeat_penalty",), set(NO_PENALTIES) - {"repeat_penalty"}),
        (("repeat_penalty", "repetition_penalty"), {"frequency_penalty", "presence_penalty"}),
        (tuple(NO_PENALTIES), set()),
    ],
)
@pytest.mark.parametrize("status", [400, 422, 500])
def test_penalties_are_off_where_the_server_lets_them(
    fake: FakeServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    refused: tuple[str, ...],
    left: set[str],
    status: int,
) -> None:
    """Some servers have others by default; some refuse names that they do not know, or fail at them."""
    answer = fake.paths["/v1/chat/completions"]

    def strict(body: Any) -> Answer:
        wrong = [name for name in refused if name in body]
        return (status, {"error": {"message": f"unknown: {wrong}"}}) if wrong else answer(body)

    fake.paths["/v1/chat/completions"] = strict
    result = evaluate(OpenAIServer(fake.url, limits=QUICK), {"extract": {"num_items": 6}}, 0, tmp_path)
    assert result["engine"]["neutral"] == {name: NO_PENALTIES[name] for name in left}
    assert result["suites"]["extract"]["metrics"]["exact"]["value"] == 1.0
    assert set(fake.asked[-1][1]) & set(NO_PENALTIES) == left
    assert [record.getMessage().split(": ")[0].split(" take ")[1] for record in caplog.records] == (
        [", ".join(sorted(set(NO_PENALTIES) - left))] if refused else []
    )


def test_a_request_that_is_refused_changes_nothing_for_the_next(fake: FakeServer) -> None:
    def answer(body: Any) -> Answer:
        return (400, {"error": {"message": "too long"}}) if "long" in body["messages"][-1]["content"] else chat("ok")

    fake.paths["/v1/chat/completions"] = answer
    model = OpenAIServer(fake.url, limits=QUICK)
    with pytest.raises(TargetError, match="too long"):
        model.generate([request("a", "a long chat")])
    asked = len(fake.asked)
    with pytest.raises(TargetError, match="too long"):
        model.generate([request("b", "a long chat")])
    assert len(fake.asked) == asked + 1  # what the server takes is known
    model.generate([request("c")])
    assert fake.asked[-1][1].keys() >= NO_PENALTIES.keys()
    assert model.describe()["engine"]["neutral"] == NO_PENALTIES


def test_a_refusal_that_no_penalty_is_to_blame_for_is_said(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    fake.paths["/v1/chat/completions"] = lambda body: (401, {"error": {"message": "no key"}})
    model = OpenAIServer(fake.url, limits=QUICK)
    assert model.describe()["engine"]["neutral"] is None  # nothing was asked
    for _ in range(2):
        with pytest.raises(TargetError, match=r"request 'a': .*401 Unauthorized .no key"):
            model.generate([request("a")])
    assert not caplog.records
    fake.paths["/v1/chat/completions"] = lambda body: chat("ok")
    model.generate([request("a")])
    assert fake.asked[-1][1].keys() >= NO_PENALTIES.keys()


def test_what_the_server_says_of_a_forced_answer_is_kept(fake: FakeServer) -> None:
    structured = {"schema_valid": True, "num_forced_tokens": 3, "legal_mass": 0.75}
    fake.paths["/v1/chat/completions"] = lambda body: chat("{}", structured=structured)
    (generation,) = OpenAIServer(fake.url, limits=QUICK).generate([request("a", schema={})])
    assert (generation.num_forced_tokens, generation.num_tokens, generation.legal_mass) == (3, 4, 0.75)


@pytest.mark.parametrize("trouble", [(429, {"error": {"message": "full"}}), (503, {}), (500, b"oops"), (0, None)])
def test_what_passes_is_tried_again(fake: FakeServer, trouble: Answer) -> None:
    fake.paths["/v1/chat/completions"] = in_turn(trouble, trouble, last=lambda body: chat("fine"))
    model = OpenAIServer(fake.url, limits=RequestLimits(concurrency=1, max_retries=2, first_wait_s=0.001))
    assert [one.text for one in model.generate([request("a")])] == ["fine"]
    assert len(fake.chats()) == 4  # what the server takes was found out in the third
    assert model.describe()["engine"]["neutral"] == NO_PENALTIES
    fake.paths["/v1/chat/completions"] = in_turn(trouble, trouble, last=lambda body: chat("again"))
    assert [one.text for one in model.generate([request("a")])] == ["again"]
    assert len(fake.chats()) == 7


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((429, {"error": {"message": "full"}}), r"failed 3 times in .* s, at last with 429 Too Many Requests \(full\)"),
        ((0, None), "failed 3 times in .* s, at last with RemoteProtocolError .*Look whether the server runs"),
        ((200, b"<html>proxy</html>"), "answered '<html>proxy</html>', which is no JSON"),
        ((200, b'{"choices": ['), "which is no JSON"),
        ((400, {"error": {"message": "too long"}}), r"request 'b': .* refuses: 400 Bad Request \(too long\)"),
        ((200, b"[" * 100_000), "which is no JSON"),
    ],
)
def test_what_does_not_pass_is_one_line_and_keeps_what_had_come(fake: FakeServer, answer: Answer, words: str) -> None:
    fake.paths["/v1/chat/completions"] = lambda body: answer if "bad" in str(body) else chat("fine")
    model = OpenAIServer(fake.url, limits=RequestLimits(concurrency=1, max_retries=2, first_wait_s=0.001))
    with pytest.raises(TargetError, match=words) as caught:
        model.generate([request("a"), request("b", "bad"), request("c")])
    assert "\n" not in str(caught.value)
    assert [one.id for one in caught.value.finished] == ["a"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {}), "no choices"),
        ((200, []), "no choices"),
        ((200, None), "no choices"),
        ((200, {"choices": []}), "no choices"),
        ((200, {"choices": [None]}), "no choices"),
        ((200, {"choices": [{"message": {}, "finish_reason": "stop"}]}), "no choices"),
        (chat("a", finish_reason=None), "finish_reason is None, neither 'stop' nor 'length'"),
        (chat("a", finish_reason="content_filter"), "finish_reason is 'content_filter'"),
        (chat([{"type": "text", "text": "a"}]), "content is .*, no text"),  # type: ignore[arg-type]
        (chat(5), "content is 5, no text"),  # type: ignore[arg-type]
        (chat("a", prompt_tokens="7"), "prompt_tokens is '7', no number of tokens"),  # type: ignore[arg-type]
        (chat("a", prompt_tokens=float("inf")), "prompt_tokens is inf"),  # type: ignore[arg-type]
        (chat("a", prompt_tokens=-1), "prompt_tokens is -1"),
        (chat("a", structured="x"), "structured is 'x', no object"),
        (chat("a", structured={"num_forced_tokens": 0.5}), "num_forced_tokens is 0.5"),
        (chat("a", structured={"legal_mass": float("nan")}), "legal_mass is nan, no probability"),
        (chat("a", structured={"legal_mass": True}), "legal_mass is True, no probability"),
        ((200, {"choices": chat("a")[1]["choices"], "usage": [1]}), r"usage is \[1\], no object"),
    ],
)
def test_json_that_is_no_completion_names_the_request(fake: FakeServer, answer: Answer, words: str) -> None:
    """And the answers of the others are kept: a single one that is out of order costs no more than itself."""
    fake.paths["/v1/chat/completions"] = lambda body: answer if "bad" in str(body) else chat("fine")
    with pytest.raises(TargetError, match=f"request 'b' got no chat completion: .*{words}") as caught:
        OpenAIServer(fake.url, limits=QUICK).generate([request("a"), request("b", "bad"), request("c")])
    assert [one.id for one in caught.value.finished] == ["a", "c"]


def test_half_a_character_becomes_a_replacement_and_is_no_reason_to_lose_an_evaluation(
    fake: FakeServer, tmp_path: Path
) -> None:
    fake.paths["/v1/chat/completions"] = lambda body: chat("x \ud83d y \ud83d\ude00")  # as JSON escapes
    evaluate(OpenAIServer(fake.url, limits=QUICK), {"extract": {"num_items": 1}}, 0, tmp_path)
    assert read_samples(tmp_path / "samples.jsonl")[0]["output"] == "x \ufffd y \U0001f600"


@pytest.mark.parametrize("token", [1 << 31, -1, True, 1.0])
def test_tokens_that_are_none_are_not_believed(fake: FakeServer, token: Any) -> None:
    fake.paths["/tokenize"] = lambda body: (200, {"tokens": [token] * 7})
    model = OpenAIServer(fake.url, limits=QUICK)
    assert model.describe()["template_hash"] == MESSAGES_ONLY
    with pytest.raises(NotOfferedError, match="does not tokenize"):
        model.tokenize("abc")


def test_what_is_not_implemented_is_not_asked_again(fake: FakeServer) -> None:
    fake.paths["/tokenize"] = fake.paths["/v1/completions"] = lambda body: (501, {"error": {"message": "no"}})
    model = OpenAIServer(fake.url, limits=QUICK)
    assert model.describe()["template_hash"] == MESSAGES_ONLY
    with pytest.raises(NotOfferedError, match="no log-probabilities"):
        model.score_tokens([1, 2])
    assert [path for path, _ in fake.asked].count("/tokenize") == 1


def test_a_silent_server_costs_no_more_than_the_total_time(fake: FakeServer) -> None:
    def wait(body: Any) -> Answer:
        fake.released.wait(10)
        return 0, None

    fake.paths["/v1/chat/completions"] = wait
    limits = RequestLimits(timeout_s=0.1, total_timeout_s=0.5, max_retries=50, first_wait_s=0.01)
    with pytest.raises(TargetError, match=r"gave no answer within 0\.5 s \(ReadTimeout"):
        OpenAIServer(fake.url, limits=limits).generate([request("a")])


def test_nobody_listens(fake: FakeServer) -> None:
    with FakeServer() as other:
        url = other.url
    with pytest.raises(TargetError, match=r"failed 3 times .* ConnectError"):
        OpenAIServer(url, limits=QUICK)
    limits = RequestLimits(timeout_s=0.1, total_timeout_s=0.3, max_retries=50, first_wait_s=0.01)
    said = (
        r"could not be reached for 0\.3 s \(ConnectError .*\)\. Look whether the server runs, and whether its URL ends"
    )
    with pytest.raises(TargetError, match=said):
        OpenAIServer(url, limits=limits)


def test_the_model_has_to_be_there(fake: FakeServer) -> None:
    with pytest.raises(OptionError, match=r"serves no model 'big'\. Choose --model from tiny"):
        OpenAIServer(fake.url, "big", limits=QUICK)
    fake.paths["/v1/models"] = lambda body: (200, {"data": [{"id": "a"}, {"id": "b"}]})
    with pytest.raises(OptionError, match=r"serves several models\. Choose --model from a, b"):
        OpenAIServer(fake.url, limits=QUICK)
    assert OpenAIServer(fake.url, "b", limits=QUICK).name == "b"
    fake.paths["/v1/models"] = lambda body: (404, {})
    assert OpenAIServer(fake.url, "c", limits=QUICK).name == "c"
    with pytest.raises(OptionError, match=r"lists no models .*Give --model"):
        OpenAIServer(fake.url, limits=QUICK)
    fake.paths["/v1/models"] = lambda body: (401, {"error": {"message": "no key"}})
    with pytest.raises(TargetError, match=r"401 Unauthorized \(no key\)\. Name the variable .* --api-key-env"):
        OpenAIServer(fake.url, "c", limits=QUICK)
    fake.paths["/v1/models"] = lambda body: (200, {"hello": 1})
    with pytest.raises(TargetError, match="gave no list of models"):
        OpenAIServer(fake.url, limits=QUICK)
    fake.paths["/v1/models"] = lambda body: (200, {"data": []})
    with pytest.raises(OptionError, match=r"serves no model\. Load one there first"):
        OpenAIServer(fake.url, limits=QUICK)
    for name in (None, 3, "", "\ud800", "two\nlines"):
        fake.paths["/v1/models"] = lambda body, name=name: (200, {"data": [{"id": name}]})  # type: ignore[misc]
        with pytest.raises(TargetError, match="gave no list of models"):
            OpenAIServer(fake.url, limits=QUICK)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "no address of a server"),
        ("http://host:99999/v1", "no URL"),
        ("http://me:pw@host/v1", r"holds a password, .*Use --api-key-env"),
        ("http://host/v1?key=1", "no address of a server"),
        ("ftp://host/v1", "no address of a server"),
    ],
)
def test_a_wrong_url_is_named(url: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        OpenAIServer(url, limits=QUICK)


def test_a_server_without_a_path_has_its_interface_under_v1(fake: FakeServer) -> None:
    assert OpenAIServer(fake.url.removesuffix("v1"), limits=QUICK).url == fake.url


def test_a_server_that_dies_in_the_middle_is_gone_on_with(fake: FakeServer, tmp_path: Path) -> None:
    suites = {"extract": {"num_items": 12}}
    whole = tmp_path / "whole"
    evaluate(OpenAIServer(fake.url, limits=QUICK), suites, 0, whole)
    alive, count = fake.paths["/v1/chat/completions"], iter(range(100))
    num_alive = 8  # the first is asked to learn what the server takes, the others are items
    fake.paths["/v1/chat/completions"] = lambda body: alive(body) if next(count) < num_alive else (0, None)
    out, model = tmp_path / "new" / "out", OpenAIServer(fake.url, limits=QUICK)
    with pytest.raises(TargetError, match=r"7 answers are kept; the same command with --resume goes on from them"):
        evaluate(model, suites, 0, out, batch_items=4, keep_answers=True)
    assert [path.name for path in out.iterdir()] == ["answers.partial.jsonl"]
    with (out / "answers.partial.jsonl").open("a") as file:
        file.write('{"key": "cut o')  # the machine stopped while it wrote
    fake.paths["/v1/chat/completions"], before = alive, len(fake.chats())
    evaluate(OpenAIServer(fake.url, limits=QUICK), suites, 0, out, keep_answers=True, resume=True)
    assert len(fake.chats()) - before == 1 + 5
    assert sorted(path.name for path in out.iterdir()) == ["result.json", "samples.jsonl"]
    assert (out / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["concurrency", "timeout_s", "total_timeout_s", "first_wait_s"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=0 must be"):
        RequestLimits(**{name: 0})
