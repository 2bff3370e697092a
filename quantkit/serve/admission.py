"""From a prompt and its parameters to requests: everything that can be wrong is found before one of them waits."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from quantkit.errors import UsageError
from quantkit.serve.chat import require_text
from quantkit.serve.config import EngineConfig
from quantkit.serve.detokenizer import Decode, IncrementalDetokenizer
from quantkit.serve.penalties import TokenCounts
from quantkit.serve.prefix_hash import hash_root
from quantkit.serve.request import Matcher, Request
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.structured.spec import StructuredOutput

StartMatcher = Callable[[StructuredOutput], Callable[[], Matcher]]  # compiles a form; each call begins a text


class Admission:
    """Makes requests.

    Args:
        config: of the engine.
        tokenizer: of the model.
        decode: token ids -> text.
        vocab_size: of the model's logits.
        stop_token_ids: the model's own.
        resolve_max_tokens: (tokens of a prompt, max_tokens) -> most new tokens, or a refusal.
        compile_form: for structured output.
        root: what chains of block hashes start from, without a salt.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        decode: Decode,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        resolve_max_tokens: Callable[[int, int | None], int],
        compile_form: StartMatcher,
        root: bytes,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._decode = decode
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids
        self._resolve_max_tokens = resolve_max_tokens
        self._compile_form = compile_form
        self._root = root

    def token_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The tokens of a prompt.

        Raises:
            UsageError: there is none, one is unknown, or the text is no text.
        """
        if isinstance(prompt, str):
            require_text(prompt, "the prompt")
        token_ids = tuple(self._tokenizer(prompt).input_ids) if isinstance(prompt, str) else tuple(prompt)
        if not token_ids:
            raise UsageError("the prompt is empty", fix="give it at least one token")
        for token_id in token_ids:
            self._require_token(token_id, "the prompt holds token")
        return token_ids

    def make(
        self,
        name: str,
        number: int,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        stream: bool,
        priority: int,
        cache_salt: str | None,
    ) -> Request:
        """The first of the continuations of a prompt, with the others as its followers.

        Args:
            name: of the request.
            number: of the request in this engine, for its random numbers if it has no seed.
            prompt: text or token ids.
            params: how to continue.
            stream: text in pieces.
            priority: the lower ones come first.
            cache_salt: only requests with the same salt share what is cached.

        Raises:
            UsageError: something cannot be done.
        """
        if priority and self._config.scheduling_policy != "priority":
            raise UsageError(f"priority={priority} needs scheduling_policy='priority'")
        if cache_salt is not None:
            require_text(cache_salt, "cache_salt")
        token_ids = self.token_ids(prompt)
        for field, named in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in named:
                self._require_token(token_id, f"{field} holds")
        max_tokens = self._resolve_max_tokens(len(token_ids), params.max_tokens)
        if params.min_tokens > max_tokens:
            raise UsageError(f"min_tokens={params.min_tokens} is more than the {max_tokens} tokens there is room for")
        goes_on = params.ignore_eos and params.structured is None  # a form that is complete allows nothing but an end
        own_end = frozenset() if goes_on else self._stop_token_ids
        start_matcher = None if params.structured is None else self._compile_form(params.structured)
        seed = params.seed if params.seed is not None else _mix(self._config.seed, number)
        continuations: list[Request] = []
        for index in range(params.n):
            detokenizer = IncrementalDetokenizer(self._decode, params.stop) if stream or params.stop else None
            request = Request(
                request_id=name,
                prompt_token_ids=token_ids,
                params=params,
                max_tokens=max_tokens,
                stop_token_ids=frozenset(params.stop_token_ids) | own_end,
                detokenizer=detokenizer,
                generator=None if params.is_greedy else torch.Generator().manual_seed(seed + index),
                index=index,
                priority=priority,
                hash_root=self._root if cache_salt is None else hash_root(self._root, cache_salt),
                matcher=None if start_matcher is None else start_matcher(),
                counts=TokenCounts(token_ids, self._vocab_size) if params.counts_tokens else None,
                is_held=index > 0,
            )
            continuations.append(request)
        continuations[0].followers = tuple(continuations[1:])
        return continuations[0]

    def _require_token(self, token_id: int, where: str) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise UsageError(f"{where} {token_id}, the vocabulary has {self._vocab_size} tokens")


def _mix(seed: int, number: int) -> int:
    """A seed of its own for each request of an engine."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
