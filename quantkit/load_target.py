"""The engine under load: requests in and out, step by step, and the memory that it takes."""

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.device import DeviceName
from quantkit.source import ModelSource
from quantkit_eval.errors import ModelOutputError
from quantkit_eval.load import LoadSettings
from quantkit_eval.machine import describe_machine


class EngineLoadTarget:
    """Implements `quantkit_eval.protocol.LoadTarget` with an engine.

    Args:
        engine: runs the model; nothing else may use it meanwhile.

    Attributes:
        vocab_size: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.vocab_size = int(engine.source.config.vocab_size)

    def describe(self) -> dict[str, Any]:
        """See `Engine.describe`."""
        return self._engine.describe()

    def submit(self, request_id: str, prompt: Sequence[int], new_tokens: int) -> None:
        """Queue a request that ignores the end of text.

        Raises:
            UsageError: it can never fit.
        """
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        self._engine.add_request(prompt, params, request_id=request_id, stream=False)

    def step(self) -> list[tuple[str, bool]]:
        """One step of the engine.

        Raises:
            ModelOutputError: a request failed.
        """
        news = []
        for output in self._engine.step():
            if output.error is not None:
                raise ModelOutputError(f"{self._engine.source.name}, {output.request_id} failed: {output.error}")
            news.append((output.request_id, output.finish_reason is not None))
        return news

    def memory(self) -> tuple[int, float, int | None]:
        """Bytes of the weights, of the cache for each token, and of the host's or the GPU's memory."""
        about = self._engine.describe()
        settings = about["engine"]
        per_token = settings["kv_cache_bytes"] / (settings["num_kv_blocks"] * settings["kv_block_size"])
        is_gpu = torch.cuda.is_available() and settings["device"] != "cpu"
        total = torch.cuda.get_device_properties(0).total_memory if is_gpu else describe_machine()["memory_bytes"]
        return int(about["model"]["weight_bytes"]), per_token, total


def load_engine_config(source: ModelSource, settings: LoadSettings, device: DeviceName = "auto") -> EngineConfig:
    """An engine for a load: room for the longest prompt and the largest batch, and no prefix cache.

    Args:
        source: of the model.
        settings: of the load.
        device: where it runs.
    """
    longest = max(settings.contexts) + settings.new_tokens
    num_seqs = max((*settings.batches, 32))
    return EngineConfig(
        device=device,
        max_model_len=longest,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(512, num_seqs),
        enable_prefix_caching=False,
    )
