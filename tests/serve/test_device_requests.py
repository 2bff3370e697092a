"""What requests may ask for, on the path of a GPU in Triton's interpreter: what the CPU's own path gives."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is for Linux")
if torch.cuda.is_available():
    pytest.skip("the kernels are compiled here; scripts/gpu_check proves them", allow_module_level=True)

from quantkit.errors import EngineError, UsageError
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.device_limits import check_device_limits
from quantkit.serve.paged_runner import PagedRunner
from quantkit.serve.structured import StructuredOutput
from quantkit.source import open_source
from quantkit_kernels.interpreter import interpret_triton

BLOCK = 16
BLOCK_BYTES = 2 * BLOCK * 2 * (16 + 16) * 4  # layers, tokens, heads, key and value, float32


def make(folder: Path, **config: Any) -> Engine:
    settings = {"max_model_len": 48, "max_num_seqs": 4, "kv_block_size": BLOCK, "max_num_batched_tokens": 48}
    return Engine(folder, EngineConfig(**{**settings, **config}))


def make_on_device(folder: Path, **config: Any) -> Engine:
    engine = make(folder, **config)
    assert isinstance(engine._runner, PagedRunner)
    return engine


def test_structured_output(tiny_models: Any, random_prompt: Any) -> None:
    """Two forms and a request without one in a batch; one form leaves a single token at times."""
    pytest.importorskip("llguidance", reason="needs llguidance (pip install llguidance)")
    folder, prompt = tiny_models("llama"), random_prompt(3, 5)
    form = StructuredOutput.regex("[ab]{2}c")
    params = [
        SamplingParams(temperature=1, seed=3, structured=form, max_tokens=3, repetition_penalty=1.2),
        SamplingParams(temperature=0, structured=StructuredOutput.choice(["no", "yes"]), max_tokens=3, logprobs=2),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1, presence_penalty=0.5),
    ]
    wanted = make(folder).generate([prompt] * 3, params)
    with interpret_triton():
        found = make_on_device(folder).generate([prompt] * 3, params)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine.token_ids, mine.text, mine.num_forced_tokens) == (
            other.token_ids, other.text, other.num_forced_tokens
        )  # fmt: skip
        for name in ("logprobs", "prompt_logprobs"):
            assert (getattr(mine, name) is None) == (getattr(other, name) is None)
            for entry, own in zip(getattr(mine, name) or (), getattr(other, name) or (), strict=True):
                assert {token: rank for token, (_, rank) in (entry or {}).items()} == {
                    token: rank for token, (_, rank) in (own or {}).items()
                }
                for token in entry or {}:
                    assert entry[token][0] == pytest.approx(own[token][0], abs=1e-3)
    assert found[0].text[:2].strip("ab") == ""
    assert [completion.legal_mass is None for completion in wanted] == [False, False, True]
    for mine, other in zip(found[:2], wanted[:2], strict=True):
        assert mine.legal_mass == pytest.approx(other.legal_mass, rel=1e-3)
    assert found[2].legal_mass is None
    assert found[2].prompt_logprobs is not None


def test_continuations_of_one_prompt_and_a_prefix_that_is_known(tiny_models: Any, random_prompt: Any) -> None:
    """Both continuations write into the block that the prompt has begun; the second request finds the whole one."""
    folder, prompt = tiny_models("llama"), random_prompt(19, 5)
    several = SamplingParams(temperature=20, seed=11, n=2, max_tokens=2, ignore_eos=True)
    again = SamplingParams(temperature=0, max_tokens=1)

    def run(engine: Engine) -> list[Any]:
        return [*engine.generate([prompt], several), *engine.generate([prompt], again)]

    wanted = run(make(folder))
    with interpret_triton():
        found = run(make_on_device(folder))
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in wanted]
    assert found[0].token_ids != found[1].token_ids
    assert [completion.num_cached_tokens for completion in found] == [0, 0, BLOCK]


def test_a_request_that_was_swapped_out(tiny_models: Any, random_prompt: Any) -> None:
    """Three blocks for two requests that want two each: one waits on the host, and its keys come back."""
    folder, prompts = tiny_models("llama"), [random_prompt(BLOCK - 1, seed) for seed in (1, 2)]
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=3, ignore_eos=True) for seed in (5, 6)]
    tight = {"kv_cache_bytes": 4 * BLOCK_BYTES, "swap_space": 4 * BLOCK_BYTES, "enable_prefix_caching": False}
    wanted = [completion.token_ids for completion in make(folder).generate(prompts, params)]
    with interpret_triton():
        engine = make_on_device(folder, **tight)
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == wanted
        assert (engine.metrics.preemptions, engine.metrics.swaps) == (1, 1)


def test_a_seed_gives_the_same_tokens_in_any_batch(tiny_models: Any, random_prompt: Any) -> None:
    folder, prompt = tiny_models("llama"), random_prompt(3, 5)
    params = SamplingParams(temperature=1.2, top_k=40, top_p=0.9, seed=3, max_tokens=2, ignore_eos=True)
    other = SamplingParams(temperature=0.5, seed=4, max_tokens=2, ignore_eos=True)
    with interpret_triton():
        engine = make_on_device(folder, enable_prefix_caching=False)
        (alone,) = engine.generate([prompt], params)
        among = engine.generate([prompt, prompt, prompt], [other, params, other])
    assert among[1].token_ids == alone.token_ids
    assert among[0].token_ids == among[2].token_ids


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("quantkit.source.ModelSource.materialize", read)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("size", [4, 12, 256])
def test_block_sizes_that_the_kernels_do_not_take(size: int, tiny_models: Any) -> None:
    with (
        interpret_triton(),
        pytest.raises(UsageError, match=rf"kv_block_size={size} is not one of 8, 16, 32, 64, 128, .*device=cpu"),
    ):
        make(tiny_models("llama"), kv_block_size=size)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("head_dim", [12, 264])
def test_head_sizes_that_the_kernels_do_not_take(head_dim: int, make_tiny_model: Any, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", head_dim=head_dim, num_hidden_layers=1)
    with (
        interpret_triton(),
        pytest.raises(
            EngineError, match=rf"llama has head_dim={head_dim}, .*multiples of 8 from 8 to 256. give device"
        ),
    ):
        make(folder)


def test_a_cpu_takes_any_block_size(tiny_models: Any) -> None:
    engine = make(tiny_models("llama"), kv_block_size=12)
    assert engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0].token_ids


def test_models_of_transformers_definition_are_left_to_the_loader(make_tiny_model: Any, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=1, hidden_act="relu", head_dim=12)
    check_device_limits(EngineConfig(), open_source(folder).config)
