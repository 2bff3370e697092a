"""Settings of the engine and of a request: what they do, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import EngineError, UsageError
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.cache_size import FREE_MEMORY_SHARE


def test_the_cache_has_the_bytes_that_were_asked_for(tiny_llama_folder: Path) -> None:
    engine = Engine(tiny_llama_folder, EngineConfig(max_model_len=64, kv_block_size=16, kv_cache_bytes=100_000))
    block_bytes = 2 * 16 * 2 * (16 + 16) * 4  # layers, tokens, heads, key and value, float32
    assert engine.pool.num_blocks == 100_000 // block_bytes
    assert engine._cache.nbytes == engine.pool.num_blocks * block_bytes
    with pytest.raises(EngineError, match=r"kv_cache_bytes=10000 holds 1 cache blocks of 8192 bytes, at least 2"):
        Engine(tiny_llama_folder, EngineConfig(kv_block_size=16, kv_cache_bytes=10_000))


def test_a_cache_of_unstated_size_holds_all_requests_but_leaves_memory(
    tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_model_len=64, max_num_seqs=4, kv_block_size=16)
    assert Engine(tiny_llama_folder, config).pool.num_usable == 4 * 4
    monkeypatch.setattr("quantkit.serve.device.available_bytes", lambda: 100_000)
    assert Engine(tiny_llama_folder, config).pool.num_blocks == int(100_000 * FREE_MEMORY_SHARE) // 8192


def test_max_model_len_is_the_models_or_less(tiny_llama_folder: Path) -> None:
    assert Engine(tiny_llama_folder, EngineConfig(max_num_seqs=1)).max_model_len == 2048
    with pytest.raises(UsageError, match=r"=4096 is more than the model's 2048\. Ask for at most 2048 "):
        Engine(tiny_llama_folder, EngineConfig(max_model_len=4096))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1 is neither True nor False"),
        ({"deterministic": "yes"}, "deterministic='yes' is neither True nor False"),
        ({"swap_space": -4}, "swap_space=-4 is not an integer of 0 or more"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not one of auto, int8"),
        ({"scheduling_policy": "random"}, "scheduling_policy='random' is not one of fcfs, priority"),
        ({"max_num_waiting": 0}, "max_num_waiting=0 is not an integer of 1 or more"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 is not a number above 0 and up to 1"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_bytes": 9}, "kv_cache_bytes and gpu_memory_utilization exclude"),
        (
            {"deterministic": True, "max_num_batched_tokens": 63},
            "max_num_batched_tokens=63 is less than max_num_seqs . kv_block_size=64",
        ),
        ({"dtype": "float16"}, "dtype='float16' is not one of auto, float32, bfloat16"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is not an integer of 1 or more"),
        ({"max_num_seqs": True}, "max_num_seqs=True is not an integer"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes=-1 is not an integer of 1 or more"),
        ({"max_model_len": 1.5}, "max_model_len=1.5 is not an integer"),
        ({"seed": -1}, "seed=-1 is not an integer of 0 or more"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens=8 is less than max_num_seqs=9"),
    ],
)
def test_settings_that_do_nothing_or_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 is not a number of 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "0"}, "temperature='0'"),
        ({"top_p": 0}, "top_p=0 is not a number above 0 and up to 1"),
        ({"top_p": 1.1}, r"top_p=1\.1"),
        ({"max_tokens": 0}, "max_tokens=0 is neither None nor an integer of 1 or more"),
        ({"stop": ["a", ""]}, "holds '', which is no string with characters"),
        ({"stop": [3]}, "holds 3, which is no string"),
        ({"stop_token_ids": [-2]}, "stop_token_ids holds -2, which is no token id"),
        ({"ignore_eos": 1}, "ignore_eos=1 is neither True nor False"),
        ({"seed": -5}, "seed=-5 is neither None nor an integer from 0 to"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"top_k": -1}, "top_k=-1 is not an integer of 0 or more"),
        ({"min_p": 1.1}, r"min_p=1.1 is not a number from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty=3 is not a number from -2 to 2"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty=-2.1 is not a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is not a number above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf is not"),
        ({"min_tokens": -1}, "min_tokens=-1 is not an integer of 0 or more"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4"),
        ({"n": 0}, "n=0 is not an integer from 1 to 128"),
        ({"n": 512}, "n=512 is not an integer from 1 to 128"),
        ({"logprobs": 21}, "logprobs=21 is neither None nor an integer from 0 to 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs=True is neither None nor an integer"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\] is no mapping from token ids to numbers"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias holds '7', which is no token id"),
        ({"logit_bias": {7: 101}}, "logit_bias=101 of token 7 is not a number from -100 to 100"),
        ({"structured": {"type": "object"}}, "structured=.* is no StructuredOutput"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    for make in (lambda values: SamplingParams(**values), SamplingParams.from_mapping):
        with pytest.raises(UsageError, match=message):
            make(settings)


@pytest.mark.parametrize("name", ["bad_words", "best_of", "guided_json", "no_such_thing"])
def test_a_sampling_parameter_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"the sampling parameter {name} is not supported. choose from temperature, "):
        SamplingParams.from_mapping({"temperature": 0.5, name: 1})
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})
