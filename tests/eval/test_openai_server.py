"""A server behind a URL as a model: what it answers, and every way in which it can fail."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.compare import compare
from quantkit_eval.errors import IncomparableResults, ModelOutputError, NotOfferedError, OptionError, TargetError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import (
    MESSAGES_ONLY,
    RENDERED_BY_SERVER,
    GenerationRequest,
    Model,
    TokenScorer,
    hash_messages,
    hash_token_ids,
)
from quantkit_eval.records import read_samples
from quantkit_eval.suites.extract_items import generate_items
from quantkit_eval.targets import OpenAIServer, RequestLimits

QUICK = RequestLimits(concurrency=3, timeout_s=5.0, total_timeout_s=20.0, max_retries=2, first_wait_s=0.001)
GOLDS = {item.prompt: json.dumps(item.gold) for item in generate_items(20, 0)}
NO_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}
Answer = tuple[int, Any]  # status, JSON document or bytes; status 0 closes the connection without a word


class FakeServer(ThreadingHTTPServer):
    """Answers each path with a function of the body; ``asked`` holds what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        self.paths: dict[str, Callable[[Any], Answer]] = {
            "/v1/models": lambda body: (200, {"data": [{"id": "tiny", "owned_by": "fake"}]}),
            "/v1/chat/completions": lambda body: chat(GOLDS.get(body["messages"][-1]["content"], "ok")),
        }
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def chats(self) -> list[str]:
        return [body["messages"][-1]["content"] for path, body in self.asked if path.endswith("/chat/completions")]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
        self.server.asked.append((self.path, body))
        self.server.headers.append(dict(self.headers))
        status, document = self.server.paths.get(self.path, lambda _: (404, {"error": {"message": "no"}}))(body)
        if not status:
            self.close_connection = True
            return
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.headers["Content-Length"] = "0"
        self.do_POST()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def chat(text: str, prompt_tokens: int = 7, **choice: Any) -> Answer:
    message = {"role": "assistant", "content": text}
    return 200, {
        "choices": [{"message": message, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 4},
    }


def in_turn(*answers: Answer, last: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """These answers, one a request, and then what ``last`` says."""
    left = list(answers)
    return lambda body: left.pop(0) if left else last(body)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def request(name: str, text: str = "Hi", **settings: Any) -> GenerationRequest:
    return GenerationRequest(name, ({"role": "user", "content": text},), 8, **settings)


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
def test_penalties_are_off_where_the_server_lets_them(
    fake: FakeServer, tmp_path: Path, refused: tuple[str, ...], left: set[str]
) -> None:
    """Some servers have others by default; some refuse names that they do not know."""
    answer = fake.paths["/v1/chat/completions"]

    def strict(body: Any) -> Answer:
        wrong = [name for name in refused if name in body]
        return (422, {"error": {"message": f"unknown: {wrong}"}}) if wrong else answer(body)

    fake.paths["/v1/chat/completions"] = strict
    result = evaluate(OpenAIServer(fake.url, limits=QUICK), {"extract": {"num_items": 6}}, 0, tmp_path)
    assert result["engine"]["neutral"] == {name: NO_PENALTIES[name] for name in left}
    assert result["suites"]["extract"]["metrics"]["exact"]["value"] == 1.0
    assert set(fake.asked[-1][1]) & set(NO_PENALTIES) == left


def test_a_refusal_that_no_penalty_is_to_blame_for_is_said(fake: FakeServer) -> None:
    fake.paths["/v1/chat/completions"] = lambda body: (400, {"error": {"message": f"{len(body)} fields, too long"}})
    with pytest.raises(TargetError, match="5 fields, too long"):  # with none of the penalties
        OpenAIServer(fake.url, limits=QUICK).generate([request("a")])
    fake.paths["/v1/chat/completions"] = in_turn(chat("ok"), last=lambda body: (400, {"error": {"message": "no"}}))
    model = OpenAIServer(fake.url, limits=QUICK)
    model.generate([request("a")])
    asked = len(fake.asked)
    with pytest.raises(TargetError, match="refuses: 400"):
        model.generate([request("b")])
    assert len(fake.asked) == asked + 1  # it has taken them before


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
    assert len(fake.chats()) == 3


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
    fake.paths["/v1/chat/completions"] = lambda body: alive(body) if next(count) < 7 else (0, None)
    out, model = tmp_path / "new" / "out", OpenAIServer(fake.url, limits=QUICK)
    with pytest.raises(TargetError, match=r"7 answers are kept; the same command with --resume goes on from them"):
        evaluate(model, suites, 0, out, batch_items=4, keep_answers=True)
    assert [path.name for path in out.iterdir()] == ["answers.partial.jsonl"]
    with (out / "answers.partial.jsonl").open("a") as file:
        file.write('{"key": "cut o')  # the machine stopped while it wrote
    fake.paths["/v1/chat/completions"], before = alive, len(fake.chats())
    evaluate(OpenAIServer(fake.url, limits=QUICK), suites, 0, out, keep_answers=True, resume=True)
    assert len(fake.chats()) - before == 5
    assert sorted(path.name for path in out.iterdir()) == ["result.json", "samples.jsonl"]
    assert (out / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


def test_prompts_are_hashed_by_what_is_known_of_them(fake: FakeServer, tmp_path: Path) -> None:
    blind = OpenAIServer(fake.url, limits=QUICK)
    assert blind.describe()["template_hash"] == MESSAGES_ONLY
    (generation,) = blind.generate([request("a")])
    assert generation.prompt_hash == hash_messages(request("a").messages, 7) != hash_messages(request("a").messages, 8)
    with pytest.raises(NotOfferedError, match=r"does not tokenize\. Give --tokenizer"):
        blind.tokenize("Hi")
    fake.paths["/tokenize"] = lambda body: (200, {"tokens": list(range(7)) if "messages" in body else [1, 2]})
    shown = OpenAIServer(fake.url, limits=QUICK)
    assert shown.describe()["template_hash"] == RENDERED_BY_SERVER
    assert shown.generate([request("a")])[0].prompt_hash == hash_token_ids(list(range(7)))
    assert shown.tokenize("Hi") == [1, 2]
    fake.paths["/v1/chat/completions"] = lambda body: chat("ok", prompt_tokens=9)
    with pytest.raises(ModelOutputError, match="made 9 tokens of request 'a', its /tokenize makes 7"):
        shown.generate([request("a")])


class Bytes:
    """A tokenizer of bytes that renders like FakeModel."""

    template_hash = "ab" * 32

    def render(self, messages: Any) -> list[int]:
        return list(f"<{messages[-1]['content']}>".encode())

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())


def test_records_of_a_server_compare_with_those_of_an_engine(
    fake: FakeServer, tmp_path: Path, fake_model: Callable[..., Any]
) -> None:
    """Same items, same rendered prompts; another template is refused by name, and so are unknown prompts."""
    suites = {"extract": {"num_items": 6}}
    gates = {"suites": ["extract"], "max_drop_pp": {"extract": 90}}
    local = fake_model(lambda asked: GOLDS[asked.messages[-1]["content"]])
    evaluate(local, suites, 0, tmp_path / "local")
    fake.paths["/v1/chat/completions"] = lambda body: chat(
        GOLDS[body["messages"][-1]["content"]], prompt_tokens=len(body["messages"][-1]["content"].encode()) + 2
    )
    fake.paths["/tokenize"] = lambda body: (200, {"tokens": Bytes().render(body["messages"])})
    evaluate(OpenAIServer(fake.url, limits=QUICK), suites, 0, tmp_path / "shown")
    verdict = compare(tmp_path / "local", tmp_path / "shown", gates)
    assert verdict["candidate"]["template_hash"] == RENDERED_BY_SERVER
    assert [entry["changed"] for entry in verdict["changes"]] == [0]
    del fake.paths["/tokenize"]
    evaluate(OpenAIServer(fake.url, tokenizer=Bytes(), limits=QUICK), suites, 0, tmp_path / "tokenizer")
    with pytest.raises(IncomparableResults, match="template_hash"):
        compare(tmp_path / "local", tmp_path / "tokenizer", gates)
    assert compare(tmp_path / "shown", tmp_path / "tokenizer", gates)["changes"][0]["changed"] == 0
    evaluate(OpenAIServer(fake.url, limits=QUICK), suites, 0, tmp_path / "blind")
    with pytest.raises(IncomparableResults, match=r"template_hash is .*unknown: hashes are of messages"):
        compare(tmp_path / "shown", tmp_path / "blind", gates)


def _prompt_logprobs(body: Any) -> Answer:
    if "prompt_logprobs" not in body:
        return 400, {}
    entries = [None, *({str(token): {"logprob": -token / 8}, "9": {"logprob": -0.1}} for token in body["prompt"][1:])]
    return 200, {"choices": [{"prompt_logprobs": entries}]}


def _echo(body: Any) -> Answer:
    values = [None, *(-token / 8 for token in body["prompt"][1:]), -0.5]
    return 200, {"choices": [{"logprobs": {"token_logprobs": values if body.get("echo") else [-0.5]}}]}


@pytest.mark.parametrize("completions", [_prompt_logprobs, _echo])
def test_the_likelihood_of_given_tokens_is_what_the_server_says(
    fake: FakeServer, tmp_path: Path, completions: Callable[[Any], Answer]
) -> None:
    fake.paths["/v1/completions"] = completions
    model = OpenAIServer(fake.url, tokenizer=Bytes(), limits=QUICK)
    assert model.score_tokens([3, 8, 4, 16]).tolist() == [-1.0, -0.5, -2.0]
    evaluate(model, {"nll": {"max_windows": 2, "window_tokens": 8}}, 0, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "samples.jsonl"]
    for sample in read_samples(tmp_path / "samples.jsonl"):
        assert sample["metrics"].keys() == {"nll_nats", "num_tokens"}


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"prompt_logprobs": [None, {"5": {"logprob": -1.0}}, {"4": {"logprob": -1.0}}]},  # of another token
        {"prompt_logprobs": [None, {"8": {"logprob": -1.0}}]},  # one is missing
        {"prompt_logprobs": [None, {"8": {"logprob": -1.0}}, {"4": {"logprob": -9999.0}}]},  # cut off
        {"prompt_logprobs": [None, {"8": {"logprob": -1.0}}, {"4": {"logprob": 0.5}}]},
        {"logprobs": {"token_logprobs": [None, -1.0, -1.0, -1.0, -1.0]}},  # it made other tokens of them
        {"logprobs": {"token_logprobs": [-1.0, -1.0, -1.0, -1.0]}},
    ],
)
def test_a_likelihood_that_is_not_exact_is_not_offered(fake: FakeServer, choice: dict[str, Any]) -> None:
    fake.paths["/v1/completions"] = lambda body: (200, {"choices": [choice]})
    with pytest.raises(NotOfferedError, match="gives no log-probabilities"):
        OpenAIServer(fake.url, tokenizer=Bytes(), limits=QUICK).score_tokens([3, 8, 4])


def test_a_server_that_fails_at_token_ids_offers_no_likelihood(fake: FakeServer, tmp_path: Path) -> None:
    """As llama-cpp-python's does; one that has scored before is out of order."""
    fake.paths["/v1/completions"] = lambda body: (500, {"error": {"message": "Input should be a valid string"}})
    fake.paths["/v1/chat/completions"] = lambda body: chat("ok", len(Bytes().render(body["messages"])))
    model = OpenAIServer(fake.url, tokenizer=Bytes(), limits=QUICK)
    result = evaluate(model, {"extract": {"num_items": 2}, "nll": {"max_windows": 2}}, 0, tmp_path / "a")
    assert list(result["suites"]) == ["extract"]
    assert "500 Internal Server Error (Input should be a valid string)" in result["not_offered"]["nll"]
    fake.paths["/v1/completions"] = _prompt_logprobs
    assert model.score_tokens([3, 8]).tolist() == [-1.0]
    fake.paths["/v1/completions"] = lambda body: (500, {})
    with pytest.raises(TargetError, match=r"failed .* times"):
        model.score_tokens([3, 8])
    fake.paths["/v1/completions"] = lambda body: (503, {})
    with pytest.raises(TargetError, match=r"failed .* times"):
        OpenAIServer(fake.url, tokenizer=Bytes(), limits=QUICK).score_tokens([3, 8])


def test_a_suite_that_is_not_offered_is_left_out_and_said(fake: FakeServer, tmp_path: Path) -> None:
    model = OpenAIServer(fake.url, limits=QUICK)
    result = evaluate(model, {"extract": {"num_items": 2}, "nll": {}}, 0, tmp_path / "a")
    assert list(result["suites"]) == ["extract"]
    assert result["not_offered"]["nll"].endswith("does not tokenize. Give --tokenizer with the folder of its model")
    with pytest.raises(OptionError, match=r"max_kl_mean_nats asks about suite 'nll', which .*a lacks: .*not tokenize"):
        compare(tmp_path / "a", tmp_path / "a", {"max_kl_mean_nats": 0.1})
    with pytest.raises(NotOfferedError, match=r"none of the suites can be run: .* does not tokenize"):
        evaluate(model, {"nll": {}}, 0, tmp_path / "b")


@pytest.mark.parametrize("name", ["concurrency", "timeout_s", "total_timeout_s", "first_wait_s"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=0 must be"):
        RequestLimits(**{name: 0})
