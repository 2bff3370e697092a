"""The engine as a model under evaluation, and chat templates."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import EngineError, UsageError
from quantkit.serve import Engine, EngineConfig, EngineModel, SamplingParams
from quantkit_eval.protocol import GenerationRequest, Model, hash_token_ids

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the station?"})


@pytest.fixture
def model(engine: Any) -> EngineModel:
    return EngineModel(engine)


def request(name: str, content: str, **settings: Any) -> GenerationRequest:
    return GenerationRequest(name, ({"role": "user", "content": content},), **{"max_tokens": 8, **settings})


def test_it_is_a_model_of_the_protocol(model: EngineModel) -> None:
    assert isinstance(model, Model)
    described = json.loads(json.dumps(model.describe()))
    assert {"name", "revision", "checkpoint_hash", "scheme"} <= described["model"].keys()
    assert {"model", "engine", "template_hash"} == described.keys()


def test_a_model_from_a_quantized_file_says_so(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.describe()["model"]["dequantized_from"] is None
    source = model.engine.source
    monkeypatch.setattr(source, "file_bytes", 98)
    assert model.describe()["model"]["dequantized_from"] == {"file": source.name, "file_bytes": 98}


def test_a_chat_is_rendered_with_the_models_template(model: EngineModel) -> None:
    (generation,) = model.generate([GenerationRequest("a", CHAT, 6)])
    text = model.engine.tokenizer.apply_chat_template(list(CHAT), tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    wanted = model.engine.tokenizer(text, add_special_tokens=False).input_ids
    assert generation.num_prompt_tokens == len(wanted)
    assert generation.prompt_hash == hash_token_ids(wanted)
    (completion,) = model.engine.generate([wanted], SamplingParams(temperature=0, max_tokens=6))
    assert (generation.id, generation.token_ids, generation.text) == ("a", completion.token_ids, completion.text)


def test_generations_come_in_the_order_of_the_requests_with_their_settings(model: EngineModel) -> None:
    requests = [request(str(number), "x" * number, max_tokens=3 + number % 4, ignore_eos=True) for number in range(12)]
    generations = model.generate(requests)
    assert [generation.id for generation in generations] == [str(number) for number in range(12)]
    assert [len(generation.token_ids) for generation in generations] == [3 + number % 4 for number in range(12)]
    assert {generation.finish_reason for generation in generations} == {"length"}
    seeded = request("s", "text", temperature=1.5, top_p=0.9, seed=7, max_tokens=20)
    first, second = model.generate([seeded, request("other", "else")])[0], model.generate([seeded])[0]
    assert first == second
    assert model.generate([request("s", "text", temperature=1.5, top_p=0.9, seed=8, max_tokens=20)])[0] != first


def test_a_stop_string_ends_a_generation(model: EngineModel) -> None:
    (free,) = model.generate([request("a", "go", max_tokens=20, ignore_eos=True)])
    stop = free.text[4:7]
    (stopped,) = model.generate([request("a", "go", max_tokens=20, ignore_eos=True, stop=(stop,))])
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]


def test_tokenize_adds_no_special_tokens(model: EngineModel) -> None:
    token_ids = model.tokenize("The quick <eos> fox")
    assert model.engine.tokenizer.decode(token_ids) == "The quick <eos> fox"
    assert token_ids[0] != model.engine.tokenizer.bos_token_id


def test_score_is_the_engines(model: EngineModel) -> None:
    token_ids = model.tokenize("A model reads the prompt")
    scores = model.score(token_ids)
    assert scores.shape == (len(token_ids), 320)
    assert torch.equal(scores, model.engine.score(token_ids))


def test_a_model_without_a_template_says_so_and_still_takes_plain_prompts(make_tiny_model: Any, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    model = EngineModel(Engine(folder, EngineConfig(max_model_len=64)))
    with pytest.raises(EngineError, match=r"plain has no chat template\. use plain prompts, or add chat_template"):
        model.generate([GenerationRequest("a", CHAT, 6)])
    assert model.describe()["template_hash"] == hashlib.sha256(b"").hexdigest()
    assert model.engine.generate(["Where"], SamplingParams(max_tokens=2))[0].token_ids


def test_a_template_that_refuses_the_messages_is_a_clear_error(make_tiny_model: Any, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "strict")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    engine = Engine(folder, EngineConfig(max_model_len=64))
    with pytest.raises(UsageError, match="the chat template of strict refuses the messages: no system message, please"):
        engine.chat.render(CHAT)
    with pytest.raises(UsageError, match="a chat needs at least one message"):
        engine.chat.render([])


def test_another_template_has_another_hash(make_tiny_model: Any, tmp_path: Path, engine: Any) -> None:
    folder = make_tiny_model("llama", tmp_path / "other")
    assert Engine(folder, EngineConfig(max_model_len=64)).chat.sha256 == engine.chat.sha256
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert Engine(folder, EngineConfig(max_model_len=64)).chat.sha256 != engine.chat.sha256


def test_a_schema_is_enforced_and_what_that_did_is_told(model: EngineModel) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    forced, free = model.generate([request("f", "Is it?", schema=schema, max_tokens=60), request("g", "Is it?")])
    assert json.loads(forced.text)["a"] in {"yes", "no"}
    assert forced.num_forced_tokens is not None
    assert 0 < forced.num_forced_tokens < forced.num_tokens == len(forced.token_ids)
    assert forced.legal_mass is not None
    assert 0 < forced.legal_mass < 1
    assert (free.num_forced_tokens, free.legal_mass) == (None, None)
