"""What the endpoints share: the engine, its tokenizer, and how a generation begins."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quantkit.errors import UsageError
from quantkit.serve.async_engine import AsyncEngine
from quantkit.serve.chat import require_text
from quantkit.serve.engine import Engine
from quantkit.serve.http.errors import ModelNotFoundError
from quantkit.serve.http.generation import Generation
from quantkit.serve.http.prometheus import ServerMetrics, metrics_page
from quantkit.serve.http.protocol_sampling import GenerationRequest
from quantkit.serve.http.token_text import TokenText
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.structured.post_validation import AnswerValidator
from quantkit.serve.structured.tool_calls import AnswerParser

T = TypeVar("T")


class Service:
    """One served model.

    Args:
        engine: nobody else may use it from now on.
        model_name: under which it is served.

    Attributes:
        engine: for many callers.
        model_name: as given.
        metrics: of the server.
        created: seconds since 1970.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine = AsyncEngine(engine)
        self.model_name = model_name
        self.metrics = ServerMetrics()
        self.created = int(time.time())
        self._validator = AnswerValidator()
        self._token_text: TokenText | None = None
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")  # it is not safe in several

    async def in_tokenizer_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what uses the tokenizer, without holding up anybody."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function, *arguments)

    async def token_text(self) -> TokenText:
        """Texts of single tokens; made when it is asked for first."""
        if self._token_text is None:
            self._token_text = await self.in_tokenizer_thread(TokenText, self.engine.engine)
        return self._token_text

    def require_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ModelNotFoundError: with the name of the one that is here.
        """
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(f"there is no model {name!r} here; this server has {self.model_name!r}")

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            UsageError: it is no text.
        """
        require_text(text, "the prompt")
        tokenizer: Any = self.engine.engine.tokenizer
        encoded = await self.in_tokenizer_thread(lambda: tokenizer(text, add_special_tokens=add_special_tokens))
        return [int(token_id) for token_id in encoded.input_ids]

    async def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Token ids of a chat.

        Raises:
            EngineError: the model has no template.
            UsageError: the template refuses the messages.
        """
        chat = self.engine.engine.chat
        if not chat.is_defined:
            raise UsageError(
                f"{self.model_name} has no chat template", fix="use /v1/completions, or add chat_template.jinja to it"
            )
        return await self.in_tokenizer_thread(chat.render, messages, tools)

    async def begin(
        self,
        request: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        make_parser: Callable[[], AnswerParser],
    ) -> Generation:
        """Hand prompts to the engine.

        Raises:
            QuantkitError: the engine refuses them.
        """
        grammar = None if params.structured is None else await self.engine.compile(params.structured)
        stream = await self.engine.submit(
            prompts, params, priority=request.priority or 0, cache_salt=request.cache_salt
        )
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        return Generation(stream, num_prompt_tokens, make_parser, grammar, self._validator, self.metrics)

    async def metrics_page(self) -> str:
        """What Prometheus reads."""
        engine = self.engine.engine
        return await self.engine.call(lambda: metrics_page(self.model_name, engine.metrics, self.metrics))

    async def close(self, drain_s: float) -> None:
        """Let requests end, then stop everything."""
        await self.engine.drain(drain_s)
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._validator.close)
