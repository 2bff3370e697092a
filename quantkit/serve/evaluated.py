"""The engine as a model under evaluation, and the tokenizer of one that runs elsewhere."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quantkit.errors import SourceError
from quantkit.serve.chat import ChatTemplate, Message
from quantkit.serve.engine import Engine
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.structured.spec import StructuredOutput
from quantkit.source.folder import first_line
from quantkit_eval.protocol import Generation, GenerationRequest, hash_token_ids


class EngineModel:
    """Implements `quantkit_eval.protocol.Model` with an engine.

    Args:
        engine: runs the model; nothing else may use it meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def describe(self) -> dict[str, Any]:
        """See `Engine.describe`."""
        return self.engine.describe()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Continue every chat, as many at a time as fit; in the order of the requests.

        Raises:
            UsageError: a request that the engine refuses.
            EngineError: the model has no chat template, or a request failed.
        """
        prompts = [self.engine.chat.render(request.messages) for request in requests]
        completions = self.engine.generate(prompts, [_sampling_params(request) for request in requests])
        return [
            Generation(
                id=request.id,
                text=completion.text,
                token_ids=completion.token_ids,
                finish_reason=completion.finish_reason,
                prompt_hash=hash_token_ids(completion.prompt_token_ids),
                num_prompt_tokens=len(completion.prompt_token_ids),
                num_forced_tokens=completion.num_forced_tokens,
                legal_mass=completion.legal_mass,
            )
            for request, completion in zip(requests, completions, strict=True)
        ]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""
        return list(self.engine.tokenizer(text, add_special_tokens=False).input_ids)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """See `Engine.score`."""
        return self.engine.score(token_ids)


class FolderTokenizer:
    """The tokenizer and template of a model that runs elsewhere, rendered as the engine renders its own.

    Args:
        folder: with tokenizer files and the chat template; weights are not needed. Or a hub id.

    Raises:
        SourceError: no tokenizer loads from there.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            # Each tokenizer reads its files in its own way; whatever it raises, it does not load.
            raise SourceError(f"no tokenizer loads from {folder}: {first_line(error)}") from error
        self._chat = ChatTemplate(self._tokenizer, folder)

    @property
    def template_hash(self) -> str:
        """See `ChatTemplate.sha256`."""
        return self._chat.sha256

    def render(self, messages: Sequence[Message]) -> list[int]:
        """See `ChatTemplate.render`."""
        return self._chat.render(messages)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _sampling_params(request: GenerationRequest) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_tokens,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        seed=request.seed,
        structured=None if request.schema is None else StructuredOutput.json_schema(request.schema),
    )
