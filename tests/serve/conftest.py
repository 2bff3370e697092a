"""Engines over the tiny models, loaded once for each setting, and what transformers generates."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from quantkit.serve import Engine, EngineConfig, RequestOutput
from quantkit.serve.kv_cache import kv_block_bytes
from quantkit.serve.models.loader import Definition, load_model


class CheckedEngine(Engine):
    """An engine that looks at its books after every step."""

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        self.check_blocks()
        assert len({(output.request_id, output.index) for output in outputs}) == len(outputs)
        return outputs

    def check_blocks(self) -> None:
        """The block tables of all requests account for every block in use."""
        requests = self.unfinished
        self.pool.check_integrity(request.block_table for request in requests)
        queued = [*self.scheduler.running, *self.scheduler.waiting, *(r for r in requests if r.is_held)]
        assert sorted(map(id, queued)) == sorted(map(id, requests))
        swapped = sum(len(request.swapped_blocks) for request in requests)
        assert self._memory.mover.num_free_host_blocks + swapped == self._memory.mover.num_host_blocks

    def check_all_free(self) -> None:
        """No request is left and no block is lost; what is cached is dropped, so that the next test starts anew."""
        assert not self.has_unfinished
        self.pool.check_integrity([])
        assert self._memory.mover.num_free_host_blocks == self._memory.mover.num_host_blocks
        self.reset_prefix_cache()
        assert self.pool.num_free == self.pool.num_usable


@pytest.fixture(scope="session")
def make_engine(tiny_models: Callable[[str], Path]) -> Callable[..., CheckedEngine]:
    """``make_engine(family, *, num_blocks=None, definition="quantkit", **config)``: an engine in float32.

    It is made once for the same arguments. ``definition`` is as in `load_model`.
    """
    made: dict[Any, CheckedEngine] = {}

    def make(
        family: str, *, num_blocks: int | None = None, definition: Definition = "quantkit", **config: Any
    ) -> CheckedEngine:
        key = (family, num_blocks, definition, *sorted(config.items()))
        if key not in made:
            settings = {"max_model_len": 256, "max_num_seqs": 8, "kv_block_size": 16, **config}
            if num_blocks is not None:
                loaded = make(family)._loaded
                block_bytes = kv_block_bytes(loaded.shapes, settings["kv_block_size"], loaded.dtype)
                settings["kv_cache_bytes"] = num_blocks * block_bytes
            with patch("quantkit.serve.engine.load_model", partial(load_model, definition=definition)):
                made[key] = CheckedEngine(tiny_models(family), EngineConfig(**settings))
        made[key].check_all_free()
        return made[key]

    return make


@pytest.fixture
def engine(make_engine: Callable[..., CheckedEngine]) -> Iterator[CheckedEngine]:
    """The tiny Llama's engine; every block must be back at the end of a test."""
    engine = make_engine("llama")
    yield engine
    engine.check_all_free()


@pytest.fixture(scope="session")
def reference_tokens(tiny_models: Callable[[str], Path]) -> Callable[[str, Sequence[int], int], tuple[int, ...]]:
    """``reference_tokens(family, prompt, count)``: transformers' greedy generate, with its own eager attention."""
    models: dict[str, Any] = {}
    known: dict[Any, tuple[int, ...]] = {}

    def generate(family: str, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        from transformers import AutoModelForCausalLM

        key = (family, tuple(prompt), count)
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(
                tiny_models(family), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        if key not in known:
            inputs = torch.tensor([list(prompt)])
            output = models[family].generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False
            )
            known[key] = tuple(output[0, len(prompt) :].tolist())
        return known[key]

    return generate


@pytest.fixture(scope="session")
def random_prompt() -> Callable[[int, int], list[int]]:
    """``random_prompt(length, seed)``: token ids that are no special tokens."""

    def make(length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(token_id) for token_id in torch.randint(5, 320, (length,), generator=generator)]

    return make
