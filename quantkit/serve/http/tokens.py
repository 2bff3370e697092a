"""The endpoints /tokenize and /detokenize."""

from typing import Any

from fastapi import APIRouter, Request

from quantkit.errors import UsageError
from quantkit.serve.http.fields import FieldError, about
from quantkit.serve.http.protocol_chat import ChatMessage
from quantkit.serve.http.protocol_sampling import Strict
from quantkit.serve.http.service import Service

router = APIRouter()


class TokenizeRequest(Strict):
    """A text or a chat; exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of a text, as /v1/completions takes it, or of a chat."""
    service: Service = request.app.state.service
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("give either prompt or messages")
    if body.prompt is not None:
        with about("prompt"):
            tokens = await service.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        if body.add_special_tokens is not None:
            raise FieldError("add_special_tokens", "add_special_tokens belongs to prompt; a chat template has its own")
        with about("messages"):
            tokens = await service.render([message.for_template() for message in body.messages or ()], None)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.engine.max_model_len}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """The text of tokens, special ones included."""
    service: Service = request.app.state.service
    service.require_model(body.model)
    vocab_size = service.engine.engine.source.config.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            raise FieldError("tokens", f"tokens holds {token_id}, the vocabulary has {vocab_size} tokens")
    return {"prompt": await service.detokenize(body.tokens)}
