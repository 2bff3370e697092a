"""What a server shows of its tokens: how prompts are hashed, with whose records they compare, and likelihoods."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.compare import compare
from quantkit_eval.errors import IncomparableResults, ModelOutputError, NotOfferedError, OptionError, TargetError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import MESSAGES_ONLY, RENDERED_BY_SERVER, hash_messages, hash_token_ids
from quantkit_eval.records import read_samples
from quantkit_eval.targets import OpenAIServer, RequestLimits
from tests.eval.fake_server import GOLDS, QUICK, Answer, FakeServer, chat, request


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

    def answer(body: Any) -> Answer:
        text = body["messages"][-1]["content"]
        return chat(GOLDS.get(text, "ok"), prompt_tokens=len(text.encode()) + 2)

    fake.paths["/v1/chat/completions"] = answer
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


def test_a_server_that_fails_until_the_time_is_up_offers_no_likelihood(fake: FakeServer) -> None:
    """A short --request-timeout ends the tries before they are counted out."""
    fake.paths["/v1/completions"] = lambda body: (500, {"error": {"message": "no ids"}})
    short = RequestLimits(total_timeout_s=0.3, max_retries=5, first_wait_s=0.05)
    with pytest.raises(NotOfferedError, match=r"within 0\.3 s .500 Internal Server Error .no ids"):
        OpenAIServer(fake.url, tokenizer=Bytes(), limits=short).score_tokens([3, 8])
    fake.paths["/v1/completions"] = lambda body: (503, {})
    with pytest.raises(TargetError, match=r"within 0\.3 s .503"):
        OpenAIServer(fake.url, tokenizer=Bytes(), limits=short).score_tokens([3, 8])


def test_a_suite_that_is_not_offered_is_left_out_and_said(fake: FakeServer, tmp_path: Path) -> None:
    model = OpenAIServer(fake.url, limits=QUICK)
    result = evaluate(model, {"extract": {"num_items": 2}, "nll": {}}, 0, tmp_path / "a")
    assert list(result["suites"]) == ["extract"]
    assert result["not_offered"]["nll"].endswith("does not tokenize. Give --tokenizer with the folder of its model")
    with pytest.raises(OptionError, match=r"max_kl_mean_nats asks about suite 'nll', which .*a lacks: .*not tokenize"):
        compare(tmp_path / "a", tmp_path / "a", {"max_kl_mean_nats": 0.1})
    with pytest.raises(NotOfferedError, match=r"none of the suites can be run: .* does not tokenize"):
        evaluate(model, {"nll": {}}, 0, tmp_path / "b")
