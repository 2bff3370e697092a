"""The engine: requests in, tokens out, many at a time."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantkit import __version__
from quantkit.errors import EngineError, UsageError
from quantkit.serve.batch import build_batch
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.capacity import make_cache, resolve_max_model_len
from quantkit.serve.chat import ChatTemplate, require_text
from quantkit.serve.config import EngineConfig
from quantkit.serve.detokenizer import IncrementalDetokenizer, decode_all, make_decode
from quantkit.serve.models.loader import load_model, resolve_dtype
from quantkit.serve.not_finite import why_not_finite
from quantkit.serve.request import Completion, Request, RequestOutput, RequestStatus, SamplingParams
from quantkit.serve.runner import ModelRunner
from quantkit.serve.sampler import Draw, sample
from quantkit.serve.scheduler import Scheduler
from quantkit.serve.stop_tokens import model_stop_token_ids
from quantkit.source import ModelSource, open_source

logger = logging.getLogger(__name__)


class Engine:
    """A model that continues many prompts at the same time.

    Args:
        model: hub id, folder, .gguf file, or an opened source.
        config: settings.

    Attributes:
        source: where the model comes from.
        config: as given.
        max_model_len: most tokens of a request, prompt and continuation together.
        tokenizer: the model's.
        chat: the model's chat template.

    Raises:
        QuantkitError: the model cannot be found, read or run, or there is no memory for a cache; one line.
    """

    def __init__(self, model: str | Path | ModelSource, config: EngineConfig | None = None) -> None:
        self.source = model if isinstance(model, ModelSource) else open_source(model)
        self.config = config if config is not None else EngineConfig()
        self.tokenizer: PreTrainedTokenizerBase = self.source.tokenizer()
        self.chat = ChatTemplate(self.tokenizer, self.source.name)
        loaded = load_model(self.source, resolve_dtype(self.config.dtype, self.source.dtype))
        self._loaded = loaded
        self.max_model_len = resolve_max_model_len(self.config, loaded)
        self._vocab_size: int = self.source.config.vocab_size
        self._stop_token_ids = model_stop_token_ids(self.source.folder, self.source.config, self.tokenizer)
        self._decode = make_decode(self.tokenizer)
        self._cache = make_cache(self.config, loaded, self.max_model_len)
        self.pool = BlockPool(self._cache.num_blocks, self._cache.kv_block_size)
        self.scheduler = Scheduler(
            self.pool, self.config.max_num_seqs, self.config.max_num_batched_tokens, self.max_model_len
        )
        self._runner = ModelRunner(loaded.model, self._cache, loaded.dtype)
        self._requests: dict[str, Request] = {}
        self._num_added = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """True while a step has something to do."""
        return bool(self._requests)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
    ) -> str:
        """Queue a prompt; `step` then works on it.

        Args:
            prompt: text, tokenized with the model's special tokens in front, or token ids, used as they are.
            params: how to continue.
            request_id: a name; None makes one.
            stream: give the text in pieces as it becomes certain; otherwise only with the last output.

        Returns:
            The request's name.

        Raises:
            UsageError: an empty prompt, unknown token ids, a name in use, or a request that can never fit.
        """
        params = params if params is not None else SamplingParams()
        name = request_id if request_id is not None else f"request-{self._num_added}"
        if name in self._requests:
            raise UsageError(f"a request named {name} is running already")
        token_ids = self._prompt_token_ids(prompt)
        for token_id in params.stop_token_ids:
            if token_id >= self._vocab_size:
                raise UsageError(f"stop_token_ids holds {token_id}, the vocabulary has {self._vocab_size} tokens")
        max_tokens = self.scheduler.resolve_max_tokens(len(token_ids), params.max_tokens)
        generator = None
        if not params.is_greedy:
            seed = params.seed if params.seed is not None else _mix(self.config.seed, self._num_added)
            generator = torch.Generator().manual_seed(seed)
        request = Request(
            request_id=name,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            stop_token_ids=frozenset(params.stop_token_ids) | (set() if params.ignore_eos else self._stop_token_ids),
            detokenizer=IncrementalDetokenizer(self._decode, params.stop) if stream or params.stop else None,
            generator=generator,
        )
        self._num_added += 1
        self._requests[name] = request
        self.scheduler.add(request)
        return name

    def _prompt_token_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            require_text(prompt, "the prompt")
        token_ids = tuple(self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else tuple(prompt)
        if not token_ids:
            raise UsageError("the prompt is empty", fix="give it at least one token")
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise UsageError(f"the prompt holds token {token_id}, the vocabulary has {self._vocab_size} tokens")
        return token_ids

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and give its cache back.

        Returns:
            Its last output; None if there is no such request, for example because it has just finished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        text = "" if request.detokenizer is None else request.detokenizer.flush()
        return self._finish(request, RequestStatus.FINISHED_ABORT, (), text)

    def step(self) -> list[RequestOutput]:
        """Compute one batch; what is new for each request that got a token or ended.

        An error in the computation ends the requests of this step, each with the error as its last output, and leaves
        the engine ready for the others.
        """
        planned = self.scheduler.schedule()
        if not planned:
            return []
        try:
            batch = build_batch(planned, self.config.kv_block_size)
            logits = self._runner.forward(batch)
            sampled = [batch.requests[row] for row in batch.sampled_rows]
            tokens = sample(logits, [_draw(request) for request in sampled])
        except Exception as error:
            # Whatever it was, it must not take the requests of other callers down with it.
            logger.exception("a step of %d requests failed", len(planned))
            return [self._fail(part.request, f"{type(error).__name__}: {error}") for part in planned]
        for part in planned:
            part.request.num_computed_tokens += part.num_tokens
        return [self._take(request, token) for request, token in zip(sampled, tokens, strict=True)]

    def _take(self, request: Request, token: int | None) -> RequestOutput:
        """Give a request its next token."""
        if token is None:
            return self._fail(request, why_not_finite(self.source.name, self._loaded.model))
        text, status, stop_reason = request.append_token(token)
        if status is None:
            return RequestOutput(request.request_id, (token,), text)
        if request.detokenizer is None:
            text = decode_all(self._decode, _text_token_ids(request, status))
        return self._finish(request, status, (token,), text, stop_reason)

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        token_ids: tuple[int, ...],
        text: str,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """The one last output of a request."""
        freed = self.scheduler.finish(request, status)
        if status in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_ABORT):
            self._cache.erase(freed)  # it may hold a NaN, which would reach the next owner through a masked key
        del self._requests[request.request_id]
        reason: Any = status.value
        return RequestOutput(request.request_id, token_ids, text, reason, stop_reason, error)

    def _fail(self, request: Request, error: str) -> RequestOutput:
        return self._finish(request, RequestStatus.FINISHED_ERROR, (), "", error=error)

    def generate(
        self, prompts: Iterable[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue all prompts, as many at a time as fit.

        Args:
            prompts: as in `add_request`.
            params: one for all, or one for each.

        Returns:
            In the order of the prompts.

        Raises:
            UsageError: as in `add_request`, then nothing is generated; or requests are running already.
            EngineError: a request failed; the others are ended.
        """
        if self._requests:
            raise UsageError(f"{len(self._requests)} requests are running already", fix="call step until they end")
        prompts = list(prompts)
        params = params if params is not None else SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts and {len(each)} sampling parameters")
        names: list[str] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                names.append(self.add_request(prompt, one, stream=False))
            return self._run(names)
        finally:
            for name in names:  # those that are left when something went wrong
                self.abort(name)

    def _run(self, names: Sequence[str]) -> list[Completion]:
        requests = {name: self._requests[name] for name in names}
        texts: dict[str, list[str]] = {name: [] for name in names}
        done: dict[str, Completion] = {}
        while len(done) < len(names):
            for output in self.step():
                texts[output.request_id].append(output.text)
                if output.finish_reason is None:
                    continue
                if output.error is not None:
                    raise EngineError(f"{output.request_id} failed: {output.error}")
                request = requests[output.request_id]
                done[output.request_id] = Completion(
                    request_id=output.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    token_ids=tuple(request.output_token_ids),
                    text="".join(texts[output.request_id]),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
        return [done[name] for name in names]

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities of every next token, from one forward pass through the same model.

        Args:
            token_ids: T tokens, used as they are; at most max_model_len.

        Returns:
            [T, V] float32; row t is the distribution of token t + 1 given tokens 0 to t.

        Raises:
            UsageError: no token, too many, or unknown ones.
        """
        token_ids = self._prompt_token_ids(token_ids)
        if len(token_ids) > self.max_model_len:
            raise UsageError(f"{len(token_ids)} tokens to score are more than max_model_len={self.max_model_len}")
        return self._runner.score(token_ids)

    def describe(self) -> dict[str, Any]:
        """What runs here and how, for records; JSON-able."""
        source, config, loaded = self.source, self.config, self._loaded
        return {
            "model": {
                "name": source.name,
                "revision": source.revision,
                "checkpoint_hash": source.fingerprint(),
                "scheme": loaded.scheme,
                "weight_bytes": loaded.weight_bytes,
                "dequantized_from": source.file_bytes and {"file": source.name, "file_bytes": source.file_bytes},
            },
            "engine": {
                "name": "quantkit",
                "version": __version__,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "stored_dtype": str(source.dtype).removeprefix("torch."),
                "max_model_len": self.max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "kv_block_size": config.kv_block_size,
                "num_kv_blocks": self.pool.num_blocks,
                "kv_cache_bytes": self._cache.nbytes,
                "seed": config.seed,
                "threads": torch.get_num_threads(),
                "kernels": list(loaded.kernels),
            },
            "template_hash": self.chat.sha256,
        }


def _draw(request: Request) -> Draw:
    return Draw(request.params.temperature, request.params.top_p, request.generator)


def _text_token_ids(request: Request, status: RequestStatus) -> list[int]:
    """The new tokens that have text: not the one that ended the request."""
    token_ids = request.output_token_ids
    return token_ids[:-1] if status is RequestStatus.FINISHED_STOP else token_ids


def _mix(seed: int, number: int) -> int:
    """A seed of its own for each request of an engine."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
