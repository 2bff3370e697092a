"""Requests that the server refuses: with the right status, the field that is wrong, and what is allowed."""

from typing import Any

import httpx
import openai
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}


def function(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description}}


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "frobnicate": 1}, "frobnicate: there is no such field", "frobnicate"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature=-1", "temperature"),
        (
            COMPLETIONS,
            {"prompt": "a", "temperature": "1"},
            "temperature: Input should be a valid number",
            "temperature",
        ),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p=0", "top_p"),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": 0},
            "max_tokens=0 is neither None nor an integer of 1",
            "max_tokens",
        ),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**30}, "", "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": 512}, "n=512 is not an integer from 1 to 128", "n"),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "65 prompts with n=2 are more than 128 continuations", "prompt"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo=true is not supported", "echo"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix is not supported", "suffix"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of=3 is not supported", "best_of"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs=21", "logprobs"),
        (
            COMPLETIONS,
            {"prompt": "a", "logit_bias": {"x": 1}},
            "logit_bias holds 'x', which is no token id",
            "logit_bias",
        ),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias names token 5 twice", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "guided_choice": []}, "choice=() is no list", "guided_choice"),
        (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs=21", "top_logprobs"),
        (CHAT, {**MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens=0", "max_completion_tokens"),
        (CHAT, {**MESSAGES, "tools": [function("a\ud800")]}, "a function is not UTF-8 text", "tools"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "a message is not UTF-8 text", "messages"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias holds 9999", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids holds 999", "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "priority": 1}, "priority=1 needs scheduling_policy='priority'", "priority"),
        (COMPLETIONS, {"prompt": ""}, "the prompt is empty", "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt is an empty list", "prompt"),
        (COMPLETIONS, {"prompt": [999]}, "the prompt holds token 999", "prompt"),
        (COMPLETIONS, {"prompt": "a\ud800"}, "the prompt is not UTF-8 text", "prompt"),
        (COMPLETIONS, {"prompt": "a " * 2000}, "", "prompt"),
        (COMPLETIONS, {}, "prompt: Field required", "prompt"),
        (COMPLETIONS, [], "the body is no JSON object", None),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options needs stream=true", "stream_options"),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_regex": "a", "ignore_eos": True},
            "ignore_eos=true and a form",
            "ignore_eos",
        ),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "a+", "min_tokens": 2}, "min_tokens=2 and a form", "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "guided_json": {"$ref": "#"}}, "json_schema allows nothing", "guided_json"),
        (COMPLETIONS, {"prompt": "a", "guided_regex": r"[^\s\S]"}, "regex allows nothing", "guided_regex"),
        (COMPLETIONS, {"prompt": "a", "guided_grammar": "start: start"}, "grammar allows nothing", "guided_grammar"),
        (
            COMPLETIONS,
            {"prompt": "a", "temperature": 1e308},
            "temperature=1e+308 is not a number of 0 or more",
            "temperature",
        ),
        (COMPLETIONS, {"prompt": "a", "repetition_penalty": 1e308}, "repetition_penalty=1e+308", "repetition_penalty"),
        (COMPLETIONS, {"prompt": "a", "stop": ["\ud800"]}, "stop is not UTF-8 text", "stop"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "\ud800"}, "cache_salt is not UTF-8 text", "cache_salt"),
        (
            COMPLETIONS,
            {"prompt": "a", "logit_bias": {"\ud800": 1}},
            "logit_bias holds '\\ud800', which is no",
            "logit_bias",
        ),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}, "the body: the name of a field is not UTF-8 text", None),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop: Input should be a valid string; or: Input should be", "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", 5]}, "stop", "stop"),
        (COMPLETIONS, {"prompt": 5}, "prompt: Input should be a valid string; or: ", "prompt"),
        (CHAT, {**MESSAGES, "tool_choice": {"type": "function", "function": {}}}, "tool_choice", "tool_choice"),
        (COMPLETIONS, {"prompt": "a" * 300_000}, "the prompt of 300000 characters has at least ", "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "b" * 300_000}]}, "the prompt of 3000", "messages"),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "(a"}, "regex cannot be compiled", "guided_regex"),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]},
            "the answer can have one form",
            None,
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_json": {"type": "x"}},
            "json_schema is no JSON Schema: at /type",
            "guided_json",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "structured_outputs": {"xml": ""}},
            "structured_outputs.xml: there is no",
            "structured_outputs.xml",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_decoding_backend": "x"},
            "guided_decoding_backend: there is no",
            "guided_decoding_backend",
        ),
        (CHAT, {"messages": []}, "a chat needs at least one message", "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role: Input should be", "messages.0.role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages: a message of the user has no content", "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "messages.0.content",
        ),
        (CHAT, {**MESSAGES, "top_logprobs": 2}, "top_logprobs needs logprobs=true", "top_logprobs"),
        (CHAT, {**MESSAGES, "tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        (
            CHAT,
            {**MESSAGES, "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens and max_completion_tokens",
            "max_tokens",
        ),
        (
            CHAT,
            {**MESSAGES, "response_format": {"type": "json_schema"}},
            "response_format: json_schema belongs",
            "response_format",
        ),
        (
            CHAT,
            {**MESSAGES, "response_format": {"type": "xml"}},
            "response_format.type: Input should be",
            "response_format.type",
        ),
        (
            CHAT,
            {**MESSAGES, "prompt_logprobs": 1, "stream": True},
            "prompt_logprobs cannot be streamed",
            "prompt_logprobs",
        ),
        (CHAT, {**MESSAGES, "audio": {}}, "audio: there is no such field", "audio"),
        ("/tokenize", {}, "give either prompt or messages", None),
        ("/tokenize", {"prompt": "\ud800"}, "the prompt is not UTF-8 text", "prompt"),
        ("/tokenize", {**MESSAGES, "add_special_tokens": True}, "add_special_tokens belongs", "add_special_tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens holds -1", "tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_every_bad_field_is_a_400_that_names_it(
    server: Any, path: str, body: Any, message: str, param: str | None
) -> None:
    found = server.error(path, body)
    assert found["type"] == "invalid_request_error"
    assert found["message"].startswith(message)
    assert found["param"] == param


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"[1", b'{"prompt": ' + b"[" * 5000, b"\xff\xfe", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"],
)
def test_a_body_that_is_no_json_is_a_400(server: Any, content: bytes) -> None:
    response = server.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_numbers_that_json_does_not_know(server: Any) -> None:
    for text in ("NaN", "Infinity", "1e999"):
        content = f'{{"prompt": "a", "temperature": {text}}}'
        response = server.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert "temperature" in response.json()["error"]["message"]


def test_other_errors(server: Any) -> None:
    found = server.error(COMPLETIONS, {"model": "gpt", "prompt": "a"}, 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here"):
        server.openai.completions.create(model="gpt", prompt="a")
    assert server.http.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert server.http.get(COMPLETIONS).status_code == 405
    assert (
        server.error(COMPLETIONS, {"prompt": "a" * 5_000_000}, 413)["message"]
        == "the body is larger than 4194304 bytes"
    )
    chunked = server.http.post(
        COMPLETIONS, content=iter([b" " * 1_000_000] * 5), headers={"Content-Type": "application/json"}
    )
    assert chunked.status_code == 413


def test_the_key(make_server: Any) -> None:
    locked = make_server((("api_key", "secret"),))
    assert locked.openai.models.list().data[0].id == "tiny"
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer \xff"},
    ):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            response = httpx.get(locked.url + path, headers=raw)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["WWW-Authenticate"] == "Bearer"
    assert httpx.get(locked.url + "/v1/models", headers={"Authorization": "bearer  secret"}).status_code == 200
    assert httpx.get(locked.url + "/health").status_code == 200
