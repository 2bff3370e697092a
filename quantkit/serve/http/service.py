"""What the endpoints share: the engine, its tokenizer, and how a generation begins."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantkit.errors import UsageError
from quantkit.serve.async_engine import AsyncEngine
from quantkit.serve.chat import ChatTemplate, require_text
from quantkit.serve.engine import Engine
from quantkit.serve.http.errors import ModelNotFoundError, param_of
from quantkit.serve.http.fields import FieldError, about
from quantkit.serve.http.generation import Generation
from quantkit.serve.http.prometheus import ServerMetrics, metrics_page
from quantkit.serve.http.prompt_tokenizer import LONG_TEXT, PromptTokenizer
from quantkit.serve.http.protocol_sampling import GenerationRequest
from quantkit.serve.http.token_text import TokenText
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.structured.post_validation import AnswerValidator
from quantkit.serve.structured.tool_calls import AnswerParser


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
        self._tokenizer = PromptTokenizer(engine.tokenizer, engine.source.config.vocab_size, engine.max_model_len)

    async def token_text(self) -> TokenText:
        """Texts of single tokens; made when it is asked for first."""
        if self._token_text is None:
            self._token_text = await self._tokenizer.run(lambda _: TokenText(self.engine.engine))
        return self._token_text

    def require_running(self) -> None:
        """Refuse what comes while the server ends, before it costs anything.

        Raises:
            EngineStoppedError: no requests are taken.
        """
        self.engine.require_running()

    def require_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ModelNotFoundError: with the name of the one that is here.
        """
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(f"there is no model {name!r} here; this server has {self.model_name!r}")

    async def prompt_tokens(self, text: str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            UsageError: it is no text, or so long that it cannot fit.
        """
        require_text(text, "the prompt")
        await self._tokenizer.require_room(text)
        return await self.tokenize(text)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text of any length.

        Raises:
            UsageError: it is no text.
        """
        require_text(text, "the prompt")

        def encode(tokenizer: Any) -> list[int]:
            return [int(token_id) for token_id in tokenizer(text, add_special_tokens=add_special_tokens).input_ids]

        return await self._tokenizer.run(encode, len(text))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return await self._tokenizer.run(lambda tokenizer: str(tokenizer.decode(token_ids)), len(token_ids))

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
        size = sum(len(text) for message in messages for text in message.values() if isinstance(text, str))

        def render(tokenizer: Any) -> list[int]:
            return ChatTemplate(tokenizer, self.model_name).render(messages, tools)

        if size > LONG_TEXT:

            def render_text(tokenizer: Any) -> str:
                return ChatTemplate(tokenizer, self.model_name).render_text(messages, tools)

            await self._tokenizer.require_room(await self._tokenizer.run(render_text, size))
        return await self._tokenizer.run(render, size)

    async def begin(
        self,
        request: GenerationRequest,
        prompt_field: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        make_parser: Callable[[], AnswerParser],
    ) -> Generation:
        """Hand prompts to the engine.

        Args:
            request: that asks for it.
            prompt_field: of the request, which holds the prompts.
            prompts: token ids of each.
            params: of all of them.
            make_parser: makes the parser of one continuation.

        Raises:
            QuantkitError: the engine refuses them.
        """
        grammar = None
        if params.structured is not None:
            with about(request.form_field):
                grammar = await self.engine.compile(params.structured)
        try:
            stream = await self.engine.submit(
                prompts, params, priority=request.priority or 0, cache_salt=request.cache_salt
            )
        except UsageError as error:
            raise error if param_of(error) is not None else FieldError(prompt_field, str(error)) from error
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        return Generation(stream, num_prompt_tokens, make_parser, grammar, self._validator, self.metrics)

    async def metrics_page(self) -> str:
        """What Prometheus reads."""
        engine = self.engine.engine
        return await self.engine.call(lambda: metrics_page(self.model_name, engine.metrics, self.metrics))

    async def close(self, drain_s: float) -> None:
        """Let requests end, then stop everything."""
        await self.engine.drain(drain_s)
        self._tokenizer.close()
        await asyncio.to_thread(self._validator.close)
