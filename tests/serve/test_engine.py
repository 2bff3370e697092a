"""The engine's promises: how requests end, what is refused, seeds, streaming, errors that stay where they belong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantkit.errors import EngineError, UsageError
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Step to the end; every output of each request, with exactly one last one."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    for found in outputs.values():
        assert [output.finish_reason is not None for output in found] == [False] * (len(found) - 1) + [True]
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_max_tokens_ends_with_length(engine: Any, random_prompt: Any) -> None:
    for count in (1, 2, 17):
        (completion,) = engine.generate([random_prompt(5, 1)], SamplingParams(temperature=0, max_tokens=count))
        assert len(completion.token_ids) == count
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_without_max_tokens_a_request_fills_the_model(engine: Any, random_prompt: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (completion,) = engine.generate([random_prompt(200, 1)], params)
    assert len(completion.token_ids) == engine.max_model_len - 200
    assert completion.finish_reason == "length"


def test_the_models_own_stop_tokens_end_a_request(make_tiny_model: Any, tmp_path: Path, random_prompt: Any) -> None:
    """generation_config.json has a list, the tokenizer another one: each of them ends the text."""
    folder = make_tiny_model("llama", tmp_path / "model")
    plain = Engine(folder, EngineConfig(max_model_len=128))
    prompts = [random_prompt(4, seed) for seed in range(12)]
    free = plain.generate(prompts, GREEDY)
    third = free[0].token_ids[2]
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [third, 319]}))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    second = free[1].token_ids[1]
    token = plain.tokenizer.convert_ids_to_tokens(second)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | {"eos_token": token}))
    engine = Engine(folder, EngineConfig(max_model_len=128))
    for before, after in zip(free, engine.generate(prompts, GREEDY), strict=True):
        ends = [index for index, token_id in enumerate(before.token_ids) if token_id in (second, third, 319)]
        if ends:
            assert after.token_ids == before.token_ids[: ends[0] + 1]
            assert (after.finish_reason, after.stop_reason) == ("stop", before.token_ids[ends[0]])
        else:
            assert after.token_ids == before.token_ids
    assert engine.generate(prompts[:1], GREEDY)[0].finish_reason == "stop"
    ignoring = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert engine.generate(prompts[:1], ignoring)[0].token_ids == free[0].token_ids


def test_stop_token_ids_end_a_request_and_leave_no_text(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(6, 2)
    (free,) = engine.generate([prompt], GREEDY)
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(stop,), ignore_eos=True)
    (completion,) = engine.generate([prompt], params)
    assert completion.token_ids == free.token_ids[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == engine.tokenizer.decode(list(free.token_ids[:first]), skip_special_tokens=True)


def test_a_stop_string_over_several_tokens_is_never_streamed(engine: Any, random_prompt: Any) -> None:
    found = 0
    for seed in range(20):
        prompt = random_prompt(6, seed)
        (free,) = engine.generate([prompt], GREEDY)
        pieces = [engine.tokenizer.decode([token_id]) for token_id in free.token_ids]
        stop = (pieces[8][-1:] + pieces[9] + pieces[10][:1]) if len(pieces) > 10 else ""
        if len(stop) < 3 or "\ufffd" in stop:
            continue
        found += 1
        params = SamplingParams(temperature=0, max_tokens=20, stop=stop)
        cut = free.text.index(stop)
        (completion,) = engine.generate([prompt], params)
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (free.text[:cut], "stop", stop)
        name = engine.add_request(prompt, params)
        outputs = run(engine)[name]
        assert text_of(outputs) == completion.text
        assert tokens_of(outputs) == list(completion.token_ids)
        assert outputs[-1].stop_reason == stop
    assert found >= 3


def test_streamed_text_is_the_whole_text(engine: Any, random_prompt: Any) -> None:
    prompts = [random_prompt(5, seed) for seed in range(6)]
    params = SamplingParams(temperature=1.5, max_tokens=40, seed=3, ignore_eos=True)
    whole = engine.generate(prompts, params)
    names = [engine.add_request(prompt, params, stream=True) for prompt in prompts]
    outputs = run(engine)
    for name, completion in zip(names, whole, strict=True):
        assert text_of(outputs[name]) == completion.text
        assert tokens_of(outputs[name]) == list(completion.token_ids)
        assert sum(bool(output.text) for output in outputs[name]) > 5  # in pieces indeed
        assert completion.text == engine.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(make_engine: Any, random_prompt: Any) -> None:
    """With a pool so small that the seeded request is preempted too."""
    roomy, tight = make_engine("llama"), make_engine("llama", num_blocks=8, max_num_batched_tokens=24)
    prompt = random_prompt(20, 1)
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=42, max_tokens=40, ignore_eos=True)
    (alone,) = roomy.generate([prompt], params)
    others = [random_prompt(10 + seed, seed) for seed in range(2, 6)]
    other_params = [SamplingParams(temperature=0.8, max_tokens=30, seed=seed, ignore_eos=True) for seed in range(4)]
    for engine in (roomy, tight):
        before = engine.scheduler.num_preemptions
        *_, together = engine.generate([*others, prompt], [*other_params, params])
        assert together.token_ids == alone.token_ids
        assert (engine.scheduler.num_preemptions > before) == (engine is tight)
    (again,) = roomy.generate([prompt], params)
    assert again.token_ids == alone.token_ids
    different = SamplingParams(temperature=1.3, top_p=0.95, seed=43, max_tokens=40, ignore_eos=True)
    assert roomy.generate([prompt], different)[0].token_ids != alone.token_ids


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_is_honoured_at_every_temperature(engine: Any, random_prompt: Any, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, max_tokens=30, seed=seed) for seed in (1, 1, 2)]
    first, second, third = engine.generate([random_prompt(8, 1)] * 3, params)
    assert first.token_ids == second.token_ids != third.token_ids


def test_without_a_seed_the_engines_seed_decides(tiny_llama_folder: Path, random_prompt: Any) -> None:
    def sampled(seed: int) -> list[tuple[int, ...]]:
        engine = Engine(tiny_llama_folder, EngineConfig(max_model_len=64, seed=seed))
        return [completion.token_ids for completion in engine.generate([random_prompt(8, 1)] * 2)]

    assert sampled(0) == sampled(0)
    assert sampled(0) != sampled(1)
    assert sampled(0)[0] != sampled(0)[1]  # two requests have two streams of random numbers


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_gives_the_blocks_back_whenever_it_comes(make_engine: Any, random_prompt: Any, steps: int) -> None:
    """While waiting, in the middle of the prompt, while decoding; the others go on undisturbed."""
    engine = make_engine("llama", max_num_batched_tokens=16, max_num_seqs=2)
    kept_prompt = random_prompt(7, 1)
    (wanted,) = engine.generate([kept_prompt], GREEDY)
    kept = engine.add_request(kept_prompt, GREEDY)
    aborted = [engine.add_request(random_prompt(40, seed), GREEDY) for seed in (2, 3, 4)]
    outputs: list[RequestOutput] = []
    for _ in range(steps):
        outputs += engine.step()
    for name in aborted:
        (last,) = engine.abort(name)
        assert (last.request_id, last.finish_reason, last.error) == (name, "abort", None)
        assert engine.abort(name) == []  # exactly one last output
        engine.check_blocks()
    outputs += run(engine)[kept]
    assert tokens_of([output for output in outputs if output.request_id == kept]) == list(wanted.token_ids)
    engine.check_all_free()


def test_abort_gives_out_the_text_that_was_held_back(engine: Any, random_prompt: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (free,) = engine.generate([random_prompt(5, 1)], params)
    stop = free.text[:3] + "never"
    held = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop)
    name = engine.add_request(random_prompt(5, 1), held)
    text = ""
    for _ in range(3):
        text += text_of(engine.step())
    (last,) = engine.abort(name)
    assert free.text.startswith(text + last.text)
    assert text + last.text


def test_an_abort_of_an_unknown_request_gives_nothing(engine: Any) -> None:
    assert engine.abort("nobody") == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([3, 320], "the prompt holds token 320, the vocabulary has 320 tokens"),
        ([-1], "the prompt holds token -1"),
        ([5] * 250, "a prompt of 250 tokens and max_tokens=20 are 270 tokens, more than max_model_len=256"),
    ],
)
def test_prompts_that_cannot_run_are_refused_and_nothing_is_left(engine: Any, prompt: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.add_request(prompt, GREEDY)
    with pytest.raises(UsageError, match=message):
        engine.generate([[5, 6, 7], prompt], GREEDY)
    assert not engine.has_unfinished


def test_an_empty_text_is_refused(engine: Any) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        engine.add_request("", GREEDY)


def test_a_request_larger_than_the_whole_cache_is_refused_and_the_queue_moves_on(
    make_engine: Any, random_prompt: Any
) -> None:
    engine = make_engine("llama", num_blocks=4)  # 3 blocks of 16
    name = engine.add_request(random_prompt(20, 1), GREEDY)
    message = "a prompt of 40 tokens and max_tokens=20 need 4 cache blocks of 16 tokens, the whole cache has 3"
    with pytest.raises(UsageError, match=message):
        engine.add_request(random_prompt(40, 1), GREEDY)
    assert run(engine)[name][-1].finish_reason == "length"
    engine.check_all_free()


def test_a_name_can_be_used_again_only_when_it_is_free(engine: Any) -> None:
    engine.add_request([5, 6], GREEDY, request_id="mine")
    with pytest.raises(UsageError, match="a request named mine is running already"):
        engine.add_request([5, 6], GREEDY, request_id="mine")
    assert set(run(engine)) == {"mine"}
    assert engine.add_request([5, 6], GREEDY, request_id="mine") == "mine"
    run(engine)


def test_generate_wants_the_engine_for_itself_and_one_setting_a_prompt(engine: Any) -> None:
    with pytest.raises(UsageError, match="2 prompts and 1 sampling parameters"):
        engine.generate([[5], [6]], [GREEDY])
    assert engine.generate([], GREEDY) == []
    name = engine.add_request([5, 6], GREEDY)
    with pytest.raises(UsageError, match="1 requests are running already"):
        engine.generate([[5]], GREEDY)
    assert set(run(engine)) == {name}


def test_an_unknown_stop_token_is_refused(engine: Any) -> None:
    with pytest.raises(UsageError, match="stop_token_ids holds 320, the vocabulary has 320 tokens"):
        engine.add_request([5], SamplingParams(stop_token_ids=(320,)))


def test_text_prompts_get_the_models_special_tokens(engine: Any) -> None:
    (completion,) = engine.generate(["The quick brown fox"], GREEDY)
    assert list(completion.prompt_token_ids) == engine.tokenizer("The quick brown fox").input_ids


def test_an_error_in_a_step_ends_its_requests_and_the_engine_goes_on(
    make_engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine("llama", max_num_seqs=2)
    prompts = [random_prompt(20, seed) for seed in range(3)]
    wanted = engine.generate(prompts[2:], GREEDY)[0].token_ids
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    engine.step()

    def broken(batch: Any) -> None:
        raise RuntimeError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", broken)
        failed = engine.step()
    assert [(output.request_id, output.finish_reason, output.error) for output in failed] == [
        (name, "error", "RuntimeError: no memory left") for name in names[:2]
    ]
    assert "a step of 2 requests failed" in caplog.text
    outputs = run(engine)
    assert set(outputs) == {names[2]}
    assert tuple(tokens_of(outputs[names[2]])) == wanted
    engine.check_all_free()


def test_nan_logits_end_one_request_and_poison_nobody_else(
    make_engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in the cache would reach the next owner of the block even through a masked key."""
    engine = make_engine("llama", num_blocks=6)
    wanted = engine.generate([random_prompt(20, 2)], GREEDY)[0].token_ids
    victim = engine.add_request(random_prompt(20, 1), GREEDY)
    engine.step()
    block = engine._requests[victim][0].block_table[0]
    engine._cache.caches[0][1][block] = float("nan")
    (last,) = engine.step()
    assert (last.finish_reason, last.token_ids, last.text) == ("error", (), "")
    assert last.error is not None
    assert "are not finite (NaN or infinity), and its weights are: its activations overflow" in last.error
    engine.check_all_free()
    for _ in range(2):
        completions = engine.generate([random_prompt(20, 2)] * 2, GREEDY)
        assert [completion.token_ids for completion in completions] == [wanted] * 2


def test_generate_says_which_request_failed_and_ends_the_others(
    engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.serve.next_tokens.sample", lambda logits, draws: [None] * len(draws))
    with pytest.raises(EngineError, match=r"request-\d+ failed: the logits of \S+ are not finite"):
        engine.generate([random_prompt(5, 1), random_prompt(500 // 2, 2)], SamplingParams(max_tokens=2))
    assert not engine.has_unfinished


def test_an_interrupt_leaves_the_engine_whole(engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(batch: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([random_prompt(5, 1)], GREEDY)
    assert engine.generate([random_prompt(5, 1)], GREEDY)[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([], "empty"), ([400], "token 400"), ([5] * 257, "257 tokens to score are more than max_model_len=256")],
)
def test_what_cannot_be_scored_is_refused(engine: Any, token_ids: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.score(token_ids)


def test_describe_says_what_runs_and_is_json(engine: Any, tiny_llama_folder: Path) -> None:
    described = json.loads(json.dumps(engine.describe()))
    assert described["model"]["name"] == tiny_llama_folder.name
    assert described["model"]["scheme"] == "float32"
    assert len(described["model"]["checkpoint_hash"]) == 64
    assert len(described["template_hash"]) == 64
    assert described["engine"]["dtype"] == "float32"
    assert described["engine"]["num_kv_blocks"] == engine.pool.num_blocks
    assert any(line.startswith("store_kv_cache: ") for line in described["engine"]["kernels"])
    stored = load_file(tiny_llama_folder / "model.safetensors")
    assert described["model"]["weight_bytes"] == sum(tensor.nbytes for tensor in stored.values())


def test_bfloat16_runs_close_to_transformers(make_tiny_model: Any, tmp_path: Path, random_prompt: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model("llama", tmp_path / "model", dtype=torch.bfloat16)
    engine = Engine(folder, EngineConfig(max_model_len=128))
    assert engine.describe()["engine"]["dtype"] == "bfloat16"
    token_ids = random_prompt(60, 1)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        wanted = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    divergence = (wanted.exp() * (wanted - engine.score(token_ids))).sum(-1).mean()
    assert divergence < 0.05  # nats; the logits of this model spread over about 40
    (completion,) = engine.generate([token_ids], GREEDY)
    agree = (wanted[-1].argmax() == completion.token_ids[0]).item()
    assert agree
