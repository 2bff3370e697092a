import json
from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "Where is the station?"}]
CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a place.",
            "parameters": {
                "type": "object",
                "properties": {"kind": {"$ref": "#/$defs/kind"}, "near": {"type": "boolean"}},
                "required": ["kind"],
                "additionalProperties": False,
                "$defs": {"kind": {"enum": ["station", "market"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def test_the_official_client(server: Any) -> None:
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0, "logprobs": True}
    done = server.openai.chat.completions.create(**settings, top_logprobs=2)
    choice = done.choices[0]
    assert done.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert done.usage.prompt_tokens == len(server.engine.chat.render(MESSAGES))
    content = choice.logprobs.content
    assert len(content) == done.usage.completion_tokens
    assert all(entry.bytes and len(entry.top_logprobs) in (2, 3) for entry in content)
    stream = server.openai.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage.completion_tokens == done.usage.completion_tokens
    streamed = [entry.bytes for c in chunks[:-1] if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert streamed == [entry.bytes for entry in content]


def test_messages_of_every_kind(server: Any) -> None:
    """Parts of text, a developer, and what the client's own messages look like when they come back."""
    done = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, temperature=0)
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        done.choices[0].message.model_dump(),
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "here"},
    ]
    assert server.post(CHAT, {"messages": history, "max_completion_tokens": 2}).status_code == 200
    tokens = server.post("/tokenize", {"messages": history[:2]}).json()["tokens"]
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"}]
    assert tokens == server.engine.chat.render(expected)


def test_response_formats(server: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    for name, form in (
        ("json_schema", {"type": "json_schema", "json_schema": {"name": "t", "schema": schema, "strict": True}}),
        ("text", {"type": "text"}),
    ):
        done = server.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=form, max_tokens=60, seed=1
        )
        if name == "text":
            assert not hasattr(done.choices[0], "structured")
        else:
            assert set(json.loads(done.choices[0].message.content)) == {"x"}
            assert done.choices[0].structured["schema_valid"] is True
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 30, "seed": 1}
    choice = server.post(CHAT, body).json()["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    assert choice["structured"]["schema_valid"] is (choice["finish_reason"] == "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_forced_call(server: Any, choice: Any) -> None:
    settings = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 200,
        "seed": 4,
    }
    done = server.openai.chat.completions.create(**settings)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls"
    assert done.choices[0].structured["schema_valid"] is True
    assert message.content is None
    (call,) = message.tool_calls
    assert call.function.name in ("find", "stop") if choice == "required" else call.function.name == "find"
    arguments = json.loads(call.function.arguments)
    assert arguments.get("kind") in ("station", "market") if call.function.name == "find" else arguments == {}
    chunks = list(server.openai.chat.completions.create(**settings, stream=True))
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [
        (0, call.function.name, call.function.arguments)
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_forced_call_that_is_cut_off_is_text(server: Any) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 3, "temperature": 0}
    choice = server.post(CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")
    assert "tool_calls" not in choice["message"]


def test_tools_are_shown_unless_none_is_wanted(server: Any) -> None:
    """The tiny template knows no tools, so that they come in a system message."""
    plain = len(server.engine.chat.render(MESSAGES))
    counts = {}
    for choice in ("none", "auto"):
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 1}
        counts[choice] = server.post(CHAT, body).json()["usage"]["prompt_tokens"]
    assert counts["none"] == plain
    assert counts["auto"] > plain + 100


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: two functions have the same name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice: there is no"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls=false is not supported"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "the answer is a call of a function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: "),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "json_schema is no JSON Schema",
        ),
    ],
)
def test_wrong_tools(server: Any, more: dict[str, Any], message: str) -> None:
    assert server.error(CHAT, {"messages": MESSAGES, **more})["message"].startswith(message)


def test_a_model_without_a_template(make_server: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", None)
    assert "tiny has no chat template. use /v1/completions" in server.error(CHAT, {"messages": MESSAGES})["message"]
