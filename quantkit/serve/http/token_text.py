"""Log-probabilities in OpenAI's words."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.errors import UsageError
from quantkit.serve.engine import Engine
from quantkit.serve.outputs import TokenLogprobs
from quantkit.serve.structured.token_bytes import token_bytes

MIN_LOGPROB = -9999.0  # JSON has no -inf


class TokenText:
    """Texts and bytes of single tokens, each by itself.

    Args:
        engine: whose tokenizer it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._tokenizer: Any = engine.tokenizer
        self._bytes: Sequence[bytes] = []
        try:
            self._bytes = token_bytes(engine.tokenizer, engine.source.config.vocab_size)
        except UsageError:  # another kind of tokenizer: its own decoding of one token is the best there is
            self._bytes = []

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for; a special token stands for its name."""
        found = self._bytes[token_id] if token_id < len(self._bytes) else b""
        return found or str(self._tokenizer.decode([token_id])).encode()

    def text_of(self, token_id: int) -> str:
        """The same as text; part of a character is U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")


def chat_logprobs(texts: TokenText, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The entries of ``logprobs.content`` for some tokens.

    Args:
        texts: of the tokens.
        token_ids: T of them.
        entries: T entries as the engine gives them.
    """
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [_with_bytes(texts, other, logprob) for other, (logprob, _) in _by_rank(entry)]
        content.append({**_with_bytes(texts, token_id, entry[token_id][0]), "top_logprobs": top})
    return content


def completion_logprobs(
    texts: TokenText, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    """The field ``logprobs`` of /v1/completions for some tokens.

    Args:
        texts: of the tokens.
        token_ids: T of them.
        entries: T entries as the engine gives them.
        offset: characters of the tokens before.
    """
    tokens = [texts.text_of(token_id) for token_id in token_ids]
    offsets = [offset + sum(len(token) for token in tokens[:number]) for number in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry[token_id][0]) for token_id, entry in zip(token_ids, entries, strict=True)],
        "top_logprobs": [
            {name: _finite(entry[other][0]) for other, name in _names(texts, token_id, entry).items()}
            for token_id, entry in zip(token_ids, entries, strict=True)
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(texts: TokenText, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """The field ``prompt_logprobs``, as vLLM has it: null for the first token."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text_of(token_id)}
            for token_id, (logprob, rank) in entry.items()
        }
        for entry in entries
    ]


def _names(texts: TokenText, token_id: int, entry: TokenLogprobs) -> dict[int, str]:
    """A name of its own for each token of an entry, the most likely one first.

    It is the token's text. Of tokens that look alike the new one keeps it, or else the most likely one; the others are
    told by their bytes, as OpenAI does it, and if these are the same too, by their number.
    """
    ranked = [other for other, _ in _by_rank(entry)]
    owners: dict[str, int] = {}
    for other in sorted(ranked, key=lambda other: other != token_id):
        written = "".join(f"\\x{byte:02x}" for byte in texts.bytes_of(other))
        names = (texts.text_of(other), f"bytes:{written}", f"token_id:{other}")
        owners[next(name for name in names if name not in owners)] = other
    name_of = {other: name for name, other in owners.items()}
    return {other: name_of[other] for other in ranked}


def _with_bytes(texts: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    found = texts.bytes_of(token_id)
    return {"token": found.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(found)}


def _by_rank(entry: TokenLogprobs) -> list[tuple[int, tuple[float, int]]]:
    items: Mapping[int, tuple[float, int]] = entry
    return sorted(items.items(), key=lambda item: item[1][1])


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
