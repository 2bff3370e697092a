"""A server that speaks OpenAI's HTTP interface (vLLM, SGLang, llama.cpp, ours) as a model under evaluation."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import torch
from torch import Tensor

from quantkit_eval.errors import ModelOutputError, NotOfferedError, OptionError, TargetError
from quantkit_eval.protocol import (
    MESSAGES_ONLY,
    RENDERED_BY_SERVER,
    Generation,
    GenerationRequest,
    Message,
    hash_messages,
    hash_token_ids,
)
from quantkit_eval.targets.completion import read_completion
from quantkit_eval.targets.http_requests import (
    HttpRequests,
    Json,
    RequestLimits,
    RequestRefusedError,
    ServerFaultError,
)
from quantkit_eval.targets.token_logprobs import score_with_echo, score_with_prompt_logprobs

logger = logging.getLogger(__name__)

# What leaves the likelihoods as they are. Servers have other defaults: llama-cpp-python a repeat_penalty of 1.1, vLLM
# those of the model's generation_config.json. A server that refuses a name is asked with the next, which has fewer.
NEUTRAL: tuple[dict[str, float], ...] = (
    {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0},
    {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    {"frequency_penalty": 0.0, "presence_penalty": 0.0},
    {},
)
PROBE: tuple[Message, ...] = ({"role": "user", "content": "Hi"},)


class LocalTokenizer(Protocol):
    """The tokenizer and chat template that a server is said to use, at hand here."""

    @property
    def template_hash(self) -> str:
        """sha256 of the template's text, as ``Model.describe`` has it."""
        ...

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat with a generation prompt."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""
        ...


def is_url(model: str) -> bool:
    """Whether a model is named by the address of a server."""
    return model.startswith(("http://", "https://"))


class OpenAIServer:
    """Implements `quantkit_eval.protocol.Model` and `TokenScorer` over HTTP.

    The hash of a prompt is of its token ids: as the tokenizer makes them, else as the server's /tokenize does, else it
    is ``hash_messages``. The server's count of the prompt's tokens has to agree.

    Args:
        url: of the interface, as a rule with ``/v1`` at its end.
        name: of the model at the server; None takes the only one.
        api_key: sent as a bearer token.
        tokenizer: of the model; None asks the server.
        limits: of requests.

    Raises:
        OptionError: no URL, no name where there are several models, or one that is not there.
        TargetError: the server does not answer.
    """

    def __init__(
        self,
        url: str,
        name: str | None = None,
        *,
        api_key: str | None = None,
        tokenizer: LocalTokenizer | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        self.url = _base_url(url)
        self._root = self.url.removesuffix("/v1")
        self._limits = limits if limits is not None else RequestLimits()
        self._http = HttpRequests(self.url, api_key, self._limits)
        self._tokenizer = tokenizer
        self._card = self._find_model(name)
        self.name = str(self._card["id"])
        self._renders = tokenizer is None and self._render_at_server(PROBE) is not None
        self._version = self._find_version()
        self._has_scored = False
        self._neutral: dict[str, float] | None = None  # until the first chat

    def describe(self) -> dict[str, Any]:
        """What the server says of itself; who runs behind it, nobody can tell.

        ``engine.neutral`` holds the penalties that its chats are told to leave off; None before the first chat.
        """
        template_hash = RENDERED_BY_SERVER if self._renders else MESSAGES_ONLY
        return {
            "model": {
                "name": self.name,
                "revision": None,
                "checkpoint_hash": None,
                "scheme": None,
                "root": self._card.get("root"),
                "url": self.url,
            },
            "engine": {
                "name": str(self._card.get("owned_by") or "unknown"),
                "version": self._version,
                "interface": "openai",
                "concurrency": self._limits.concurrency,
                "neutral": self._neutral,
            },
            "template_hash": self._tokenizer.template_hash if self._tokenizer else template_hash,
        }

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Continue every chat, ``concurrency`` at a time; in the order of the requests.

        Raises:
            TargetError: the server failed, or an answer is none; it carries all that are.
            ModelOutputError: the server renders prompts otherwise than the tokenizer.
        """
        prompts = self._prompts([request.messages for request in requests])
        if self._neutral is None:
            self._neutral = self._find_neutral()
        bodies = [{**self._chat_body(request), **self._neutral} for request in requests]
        names = [request.id for request in requests]
        answers, failure = self._http.post_all(f"{self.url}/chat/completions", bodies, names)
        generations = []
        for request, prompt, answer in zip(requests, prompts, answers, strict=True):
            if answer is None and failure is not None:  # it was not asked any more
                continue
            try:
                generations.append(self._generation(request, prompt, answer))
            except TargetError as error:
                failure = failure or error
        if failure is not None:
            raise TargetError(failure.message, fix=failure.fix, finished=generations) from failure
        return generations

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens.

        Raises:
            NotOfferedError: there is no tokenizer, and the server has no /tokenize.
        """
        if self._tokenizer is not None:
            return self._tokenizer.tokenize(text)
        for body in (  # vLLM, SGLang and quantkit; llama.cpp
            {"model": self.name, "prompt": text, "add_special_tokens": False},
            {"content": text, "add_special": False},
        ):
            token_ids = self._tokens(body)
            if token_ids is not None:
                return token_ids
        raise NotOfferedError(f"{self.url} does not tokenize", fix="Give --tokenizer with the folder of its model")

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Raises NotOfferedError: no server gives the probability of every token of the vocabulary."""
        raise NotOfferedError(f"{self.url} gives no whole distributions")

    def score_tokens(self, token_ids: Sequence[int]) -> Tensor:
        """See `TokenScorer`; with ``prompt_logprobs``, else with ``echo`` and ``logprobs``.

        Some servers answer what they do not know with 500. One that has scored tokens before is out of order then.
        """
        url, reason = f"{self.url}/completions", ""
        for score in (score_with_prompt_logprobs, score_with_echo):
            try:
                found = score(self._http, url, self.name, token_ids)
            except (RequestRefusedError, ServerFaultError) as error:
                if self._has_scored and isinstance(error, ServerFaultError):
                    raise
                reason = f" ({error.message})"
                continue
            if found is not None:
                self._has_scored = True
                return torch.tensor(found, dtype=torch.float32)
        raise NotOfferedError(f"{self.url} gives no log-probabilities of a prompt's tokens{reason}")

    def _find_neutral(self) -> dict[str, float]:
        """How many of the penalties the server lets turn off, by a chat of one token that has nothing else to refuse.

        Some servers answer a name that they do not know with 500. One that refuses the chat without any of them too has
        another reason: it is asked with all, and the answer to the first request says which.
        """
        body = self._chat_body(GenerationRequest("probe", PROBE, 1))
        for neutral in NEUTRAL:
            try:
                self._http.post(f"{self.url}/chat/completions", {**body, **neutral})
            except (RequestRefusedError, ServerFaultError):
                continue
            missing = ", ".join(sorted(NEUTRAL[0].keys() - neutral.keys()))
            if missing:
                logger.warning("%s does not take %s: what it does to likelihoods by itself stays on", self.url, missing)
            return neutral
        return NEUTRAL[0]

    def _find_model(self, name: str | None) -> Mapping[str, Any]:
        """The server's card of the model; one with an id alone if it keeps no list."""
        try:
            found = self._http.get(f"{self.url}/models")
        except RequestRefusedError as error:
            if error.status in (401, 403):
                raise TargetError(error.message, fix="Name the variable with the key with --api-key-env") from error
            if name is None:
                raise OptionError(f"{self.url} lists no models ({error.message})", fix="Give --model") from error
            return {"id": name}
        cards = found.get("data") if isinstance(found, dict) else None
        if not isinstance(cards, list) or not all(
            isinstance(card, dict) and _is_name(card.get("id")) for card in cards
        ):
            raise TargetError(f"{self.url}/models gave no list of models", fix="Is it an OpenAI-compatible server?")
        names = [str(card["id"]) for card in cards]
        if name is None and len(names) == 1:
            return dict(cards[0])
        if name not in names:
            if not names:
                raise OptionError(f"{self.url} serves no model", fix="Load one there first")
            wrong = "serves several models" if name is None else f"serves no model {name!r}"
            raise OptionError(f"{self.url} {wrong}", fix=f"Choose --model from {', '.join(names)}")
        return dict(cards[names.index(name)])

    def _find_version(self) -> str | None:
        try:
            found = self._http.get(f"{self._root}/version", max_retries=0)
        except TargetError:  # few servers have it
            return None
        return str(found["version"]) if isinstance(found, dict) and "version" in found else None

    def _prompts(self, chats: Sequence[Sequence[Message]]) -> list[list[int] | None]:
        """Token ids of each rendered chat; None where nobody shows them."""
        if self._tokenizer is not None:
            return [self._tokenizer.render(messages) for messages in chats]
        if not self._renders:
            return [None] * len(chats)
        answers, failure = self._http.post_all(f"{self._root}/tokenize", [self._render_body(chat) for chat in chats])
        if failure is not None:
            raise failure
        prompts = [_token_ids(answer) for answer in answers]
        if None in prompts:
            raise ModelOutputError(f"{self._root}/tokenize gave no tokens of a chat that it took")
        return prompts

    def _render_at_server(self, messages: Sequence[Message]) -> list[int] | None:
        return self._tokens(self._render_body(messages))

    def _render_body(self, messages: Sequence[Message]) -> dict[str, Any]:
        return {"model": self.name, "messages": [dict(message) for message in messages]}

    def _tokens(self, body: Mapping[str, Any]) -> list[int] | None:
        """What /tokenize gives; None if the server has none, or one of another kind."""
        try:
            return _token_ids(self._http.post(f"{self._root}/tokenize", body))
        except RequestRefusedError:
            return None

    def _chat_body(self, request: GenerationRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [dict(message) for message in request.messages],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if request.stop:
            body["stop"] = list(request.stop)
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.schema is not None:
            form = {"name": "answer", "schema": dict(request.schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    def _generation(self, request: GenerationRequest, prompt: Sequence[int] | None, answer: Json) -> Generation:
        try:
            completion = read_completion(answer, len(prompt or ()))
        except ValueError as error:
            raise TargetError(
                f"{self.url}: request {request.id!r} got no chat completion: {error}",
                fix="Is it an OpenAI-compatible server? Its log may say more",
            ) from None
        num_prompt_tokens = completion.num_prompt_tokens
        if prompt is not None and num_prompt_tokens != len(prompt):
            who = "the tokenizer" if self._tokenizer else "its /tokenize"
            raise ModelOutputError(
                f"{self.url} made {num_prompt_tokens} tokens of request {request.id!r}, {who} makes {len(prompt)}",
                fix="They use other chat templates; give --tokenizer with the folder that the server runs",
            )
        return Generation(
            id=request.id,
            text=completion.text,
            token_ids=(),
            finish_reason=completion.finish_reason,
            prompt_hash=hash_messages(request.messages, num_prompt_tokens)
            if prompt is None
            else hash_token_ids(prompt),
            num_prompt_tokens=num_prompt_tokens,
            num_counted_tokens=completion.num_tokens,
            num_forced_tokens=completion.num_forced_tokens,
            legal_mass=completion.legal_mass,
        )


def _token_ids(answer: Json) -> list[int] | None:
    """The ``tokens`` of an answer; llama.cpp gives none for a body that it does not know."""
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) and tokens and all(map(_is_token_id, tokens)) else None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and name.isprintable()


def _is_token_id(token: object) -> bool:
    """Whether a hash of ids can hold it (`hash_token_ids`)."""
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31


def _base_url(url: str) -> str:
    """The address of the interface without secrets; a server alone gets ``/v1``."""
    try:
        parts = urlsplit(url)
        has_host = parts.port != 0 and bool(parts.hostname)
    except ValueError as error:
        raise OptionError(f"{url!r} is no URL ({error})", fix="For example http://127.0.0.1:8000/v1") from None
    if not is_url(url) or not has_host or parts.query or parts.fragment:
        raise OptionError(f"{url!r} is no address of a server", fix="For example http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise OptionError("the URL holds a password, which would stand in the records", fix="Use --api-key-env")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
