import json
from typing import Any

import httpx
import openai
import pytest

TEXT = "The quick brown fox"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}


def events(response: httpx.Response) -> list[Any]:
    """The documents of a stream, which must end with [DONE] and nothing after it."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_official_client(server: Any) -> None:
    done = server.openai.completions.create(model="tiny", prompt=TEXT, max_tokens=12, temperature=0, seed=1)
    expected = server.openai.completions.create(model="tiny", prompt=TEXT, max_tokens=12, temperature=0)
    assert done.object == "text_completion"
    assert done.model == "tiny"
    assert done.choices[0].text == expected.choices[0].text
    assert done.choices[0].finish_reason in ("stop", "length")
    assert done.usage.prompt_tokens == len(server.engine.tokenizer(TEXT).input_ids)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    (model,) = server.openai.models.list()
    assert model.id == "tiny"
    assert server.openai.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'other/one' here; this server has 'tiny'"):
        server.openai.models.retrieve("other/one")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_stream_is_the_whole_in_pieces(server: Any, temperature: float) -> None:
    settings = {
        "model": "tiny",
        "prompt": "Größe 東京 🙂",
        "max_tokens": 60,
        "temperature": temperature,
        "seed": 5,
        "n": 2,
        "stop": ["zq", "\n\n"],
        "logprobs": 2,
        "ignore_eos": True,
    }
    whole = server.post("/v1/completions", settings).json()
    parts = events(
        server.post("/v1/completions", {**settings, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert parts[-1]["choices"] == []
    usage, before = (dict(part["usage"], prompt_tokens_details=None) for part in (parts[-1], whole))
    assert usage == before
    for index in range(2):
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == index]
        expected = whole["choices"][index]
        assert "".join(part["text"] for part in mine) == expected["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [expected["finish_reason"]]
        assert mine[-1]["finish_reason"] == expected["finish_reason"], "nothing comes after the end"
        for field in ("tokens", "token_logprobs", "text_offset"):
            joined = [value for part in mine if part["logprobs"] for value in part["logprobs"][field]]
            wanted = expected["logprobs"][field]
            # Cached prompts are computed in other shapes, which round differently.
            assert joined == (pytest.approx(wanted, abs=1e-4) if field == "token_logprobs" else wanted)


def test_several_prompts(server: Any) -> None:
    prompts = [TEXT, "A model reads", "{"]
    single = [
        server.post("/v1/completions", {"prompt": p, "n": 2, "seed": 3, "max_tokens": 8}).json()["choices"]
        for p in prompts
    ]
    together = server.post("/v1/completions", {"prompt": prompts, "n": 2, "seed": 3, "max_tokens": 8}).json()
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert [c["text"] for c in together["choices"]] == [c["text"] for choices in single for c in choices]
    ids = server.engine.tokenizer(TEXT).input_ids
    by_ids = server.post("/v1/completions", {"prompt": [ids, ids], "temperature": 0}).json()["choices"]
    assert by_ids[0]["text"] == by_ids[1]["text"]
    assert (
        server.post("/v1/completions", {"prompt": ids, "temperature": 0}).json()["choices"][0]["text"]
        == by_ids[0]["text"]
    )


def test_stop_strings_across_tokens(server: Any) -> None:
    """A stop string that lies across tokens ends the text, and no piece of it is seen in a stream."""
    base = {"prompt": TEXT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.post("/v1/completions", base).json()["choices"][0]["text"]
    stop = text[7:12]
    expected = text[: text.find(stop)]
    choice = server.post("/v1/completions", {**base, "stop": stop}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    parts = events(server.post("/v1/completions", {**base, "stop": stop, "stream": True}))
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


def test_logprobs(server: Any) -> None:
    """The values of a full forward pass through the same model."""
    ids = server.engine.tokenizer(TEXT).input_ids
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0, "logprobs": 3, "prompt_logprobs": 1}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"])[: len(choice["text"])] == choice["text"]
    assert found["text_offset"][0] == 0
    assert all(len(top) == 3 for top in found["top_logprobs"]), "tokens that look alike have names of their own"
    assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    for logprob, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert logprob == max(top.values())
    of_prompt = choice["prompt_logprobs"]
    assert len(of_prompt) == len(ids)
    assert of_prompt[0] is None
    server.wait_until_idle()
    rows = server.engine.score(ids)
    for position in range(1, len(ids)):
        entry = of_prompt[position][str(ids[position])]
        assert entry["logprob"] == pytest.approx(float(rows[position - 1, ids[position]]), abs=1e-3)


def test_structured_output(server: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    valid = server.metric("quantkit:structured_schema_valid_total", valid="true")
    for field in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
        body = {"prompt": TEXT, "max_tokens": 200, "seed": 2, **field}
        choice = server.post("/v1/completions", body).json()["choices"][0]
        value = json.loads(choice["text"])
        assert set(value) == {"a", "b"}
        structured = choice["structured"]
        assert structured["schema_valid"] is True
        assert structured["unenforced"] == []
        assert structured["num_forced_tokens"] > 0
        assert 0 < structured["legal_mass"] < 1
    assert server.metric("quantkit:structured_schema_valid_total", valid="true") == valid + 2
    assert server.metric("quantkit:structured_repaired_total") >= 2
    cut = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 3, "guided_json": schema}).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["structured"]["schema_valid"] is False
    assert cut["structured"]["schema_valid"] is False
    assert server.metric("quantkit:structured_truncated_total") >= 1


def test_what_a_grammar_leaves_out_is_said_and_judged(server: Any) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    choice = server.post("/v1/completions", {"prompt": "x", "max_tokens": 100, "guided_json": schema}).json()[
        "choices"
    ][0]
    assert json.loads(choice["text"]) == [1, 1]
    assert choice["structured"]["unenforced"] == ["/uniqueItems"]
    assert choice["structured"]["schema_valid"] is False


def test_other_forms(server: Any) -> None:
    body = {"prompt": TEXT, "max_tokens": 40}
    texts = {
        name: server.post("/v1/completions", {**body, name: value}).json()["choices"][0]["text"]
        for name, value in (
            ("guided_choice", ["yes", "no"]),
            ("guided_regex", "[0-9]{3}"),
            ("guided_grammar", 'root ::= "a" "b"? "c"\n'),
        )
    }
    assert texts["guided_choice"] in ("yes", "no")
    assert texts["guided_regex"].isdigit()
    assert len(texts["guided_regex"]) == 3
    assert texts["guided_grammar"] in ("ac", "abc")


def test_a_character_is_never_split(server: Any) -> None:
    """Its bytes are tokens of their own; the stream waits for the last of them."""
    text = "Größe 東京 🙂👩‍🚀 здравствуй"
    body = {"prompt": "x", "max_tokens": 200, "guided_choice": [text], "stream": True}
    pieces = [part["choices"][0]["text"] for part in events(server.post("/v1/completions", body))]
    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert not any("\ufffd" in piece for piece in pieces)


def test_null_is_as_if_absent(server: Any) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 5}
    extra = {"stop": None, "logprobs": None, "n": None, "frobnicate": None, "stream": None, "seed": None}
    first, second = (server.post(COMPLETIONS, b).json()["choices"][0]["text"] for b in (body, body | extra))
    assert first == second


def test_tokens(server: Any) -> None:
    ids = server.engine.tokenizer(TEXT).input_ids
    assert server.post("/tokenize", {"prompt": TEXT}).json() == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": 1536,
    }
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": TEXT}
    chat = server.post("/tokenize", MESSAGES).json()["tokens"]
    assert chat == server.engine.chat.render(MESSAGES["messages"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_followed_to_an_end_is_the_requests_error(server: Any, stream: bool) -> None:
    """It may begin, and then it leads nowhere: the request learns that its form is the reason."""
    body = {"prompt": "x", "max_tokens": 50, "guided_grammar": 'start: "a" start', "stream": stream}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == (200 if stream else 400)
    error = events(response)[-1]["error"] if stream else response.json()["error"]
    assert error["code"] == "answer_form"
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("the answer's form cannot be followed further")


def test_a_number_that_is_cut_off_is_not_valid(server: Any) -> None:
    """Its digits are a number as far as they go, and the answer is none all the same."""
    body = {"prompt": "x", "max_tokens": 3, "guided_regex": "[0-9]+", "logit_bias": {"2": -100, "4": -100}, "seed": 1}
    invalid = server.metric("quantkit:structured_schema_valid_total", valid="false")
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["structured"]["schema_valid"] is False
    assert server.metric("quantkit:structured_schema_valid_total", valid="false") == invalid + 1


def test_a_grammar_that_names_a_special_token_is_judged_by_tokens(server: Any) -> None:
    body = {"prompt": "x", "max_tokens": 9, "guided_grammar": 'start: <|im_start|> "yes"'}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["text"] == "yes"
    assert choice["structured"]["schema_valid"] is True


def test_thousands_of_choices(server: Any) -> None:
    texts = [f"choice {number}" for number in range(2500)]
    choice = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 30, "guided_choice": texts}).json()["choices"][0]
    assert choice["text"] in texts
