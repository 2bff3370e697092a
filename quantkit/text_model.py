"""The engine for prompts that are no chats: likelihoods of given tokens, and raw continuations."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.serve import Engine, EngineModel, SamplingParams


class EngineTextModel(EngineModel):
    """Implements `quantkit_eval.protocol.Model` and ``TextModel`` with an engine.

    Args:
        engine: runs the model; nothing else may use it meanwhile.

    Attributes:
        tokenizer: the engine's.
        max_model_len: the engine's.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.tokenizer: Any = engine.tokenizer
        self.max_model_len = engine.max_model_len

    def token_logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[tuple[float, bool]]]:
        """See ``TextModel.token_logprobs``; the engine computes as many prompts at a time as fit.

        Raises:
            UsageError: a prompt that the engine refuses.
            EngineError: a request failed.
        """
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        found = []
        for completion in self.engine.generate(prompts, params):
            assert completion.prompt_logprobs is not None, "they were asked for"
            scored = zip(completion.prompt_token_ids, completion.prompt_logprobs, strict=True)
            ranked = [entry[token_id] for token_id, entry in scored if entry is not None]
            found.append([(logprob, rank == 1) for logprob, rank in ranked])
        return found

    def continue_prompts(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, bool]]:
        """See ``TextModel.continue_prompts``; the names in ``sampling`` are those of `SamplingParams`.

        Raises:
            UsageError: a prompt or a parameter that the engine refuses.
            EngineError: a request failed.
        """
        params = [SamplingParams.from_mapping(one) for one in sampling]
        return [(one.text, one.finish_reason == "length") for one in self.engine.generate(prompts, params)]
