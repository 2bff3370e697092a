"""The engine: requests in, tokens out, many at a time."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantkit.checkpoint.stored_weights import check_stored_weights
from quantkit.errors import UsageError
from quantkit.serve.admission import Admission
from quantkit.serve.batch import build_batch
from quantkit.serve.cache_size import resolve_max_model_len
from quantkit.serve.chat import ChatTemplate
from quantkit.serve.config import EngineConfig
from quantkit.serve.describe import describe_engine
from quantkit.serve.detokenizer import decode_all, make_decode
from quantkit.serve.device import resolve_device, runs_triton
from quantkit.serve.device_limits import check_device_limits
from quantkit.serve.metrics import EngineMetrics
from quantkit.serve.models.decoder import Decoder
from quantkit.serve.models.loader import load_model, resolve_dtype
from quantkit.serve.next_tokens import NextToken, choose_tokens, score_prompts
from quantkit.serve.not_finite import why_not_finite
from quantkit.serve.offline import generate_all
from quantkit.serve.outputs import Completion, RequestOutput
from quantkit.serve.paged_memory import PagedMemory
from quantkit.serve.paged_runner import make_runner
from quantkit.serve.prefix_hash import hash_root
from quantkit.serve.reporter import Reporter
from quantkit.serve.request import Matcher, Request, RequestStatus
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.scheduler import Scheduled, Scheduler
from quantkit.serve.stop_tokens import model_stop_token_ids
from quantkit.serve.structured.spec import StructuredOutput
from quantkit.serve.watchdog import Watchdog, dump_state
from quantkit.source import ModelSource, open_source

if TYPE_CHECKING:
    from quantkit.serve.structured.compiler import GrammarCompiler

logger = logging.getLogger(__name__)


class Engine:
    """A model that continues many prompts at the same time. It belongs to one thread.

    Args:
        model: hub id, folder, .gguf file, or an opened source.
        config: settings.

    Attributes:
        source: where the model comes from.
        config: as given.
        max_model_len: most tokens of a request, prompt and continuation together.
        tokenizer: the model's.
        chat: the model's chat template.
        pool: the blocks of its cache.
        scheduler: the requests that wait and run.

    Raises:
        QuantkitError: the model cannot be found, read or run, or there is no memory for a cache; one line.
    """

    def __init__(self, model: str | Path | ModelSource, config: EngineConfig | None = None) -> None:
        self.source = model if isinstance(model, ModelSource) else open_source(model)
        self.config = config if config is not None else EngineConfig()
        check_stored_weights(self.source)
        self.tokenizer: PreTrainedTokenizerBase = self.source.tokenizer()
        self.chat = ChatTemplate(self.tokenizer, self.source.name)
        device = resolve_device(self.config.device)
        if runs_triton(device):
            check_device_limits(self.config, self.source.config)
        loaded = load_model(self.source, resolve_dtype(self.config.dtype, self.source.dtype), device=device)
        self._loaded = loaded
        self.max_model_len = resolve_max_model_len(self.config, loaded)
        self._stop_token_ids = model_stop_token_ids(self.source.folder, self.source.config, self.tokenizer)
        self._decode = make_decode(self.tokenizer)
        self._memory = PagedMemory(self.config, loaded, self.max_model_len)
        self._cache = self._memory.cache
        self.pool = self._memory.pool
        self.scheduler = Scheduler(
            self.pool,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.max_model_len,
            tables=self._memory.tables,
            max_num_waiting=self.config.max_num_waiting,
            chunk=self.config.chunk if self.config.deterministic else None,
        )
        self._admission = Admission(
            self.config,
            self.tokenizer,
            self._decode,
            self.source.config.vocab_size,
            self._stop_token_ids,
            self.scheduler.resolve_max_tokens,
            self._compile_form,
            hash_root(self.source.name, self.source.revision, loaded.scheme, self.config.kv_cache_dtype, None),
        )
        self._runner = make_runner(self.config, loaded, self._cache, self.max_model_len)
        self._watchdog = Watchdog(self.max_model_len)
        self._reporter = Reporter()
        self._grammar_compiler: GrammarCompiler | None = None
        self._requests: dict[str, list[Request]] = {}  # by name, the continuations that have not ended
        self._num_added = 0

    @property
    def has_unfinished(self) -> bool:
        """True while a step has something to do."""
        return bool(self._requests)

    @property
    def unfinished(self) -> list[Request]:
        """The continuations that have not ended, in the order in which they came."""
        return [request for continuations in self._requests.values() for request in continuations]

    @property
    def metrics(self) -> EngineMetrics:
        """What was counted, up to now."""
        self._reporter.measure(self.scheduler, self._memory)
        return self._reporter.metrics

    @property
    def grammar_compiler(self) -> "GrammarCompiler":
        """Compiles forms for structured output; made when it is asked for first.

        Raises:
            UsageError: a package that it needs is not installed.
        """
        if self._grammar_compiler is None:
            from quantkit.serve.structured.compiler import GrammarCompiler

            self._grammar_compiler = GrammarCompiler(
                self.tokenizer, self.source.config.vocab_size, end_token_ids=self._stop_token_ids
            )
        return self._grammar_compiler

    def _compile_form(self, form: StructuredOutput) -> Callable[[], Matcher]:
        return self.grammar_compiler.compile(form).start

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt; `step` then works on it.

        Args:
            prompt: text, tokenized with the model's special tokens in front, or token ids, used as they are.
            params: how to continue.
            request_id: a name; None makes one.
            stream: give the text in pieces as it becomes certain; otherwise only with the last output.
            priority: lower ones come first; needs ``scheduling_policy="priority"``.
            cache_salt: only requests with the same salt share the prefix cache.

        Returns:
            The request's name.

        Raises:
            UsageError: an empty prompt, unknown token ids, a name in use, or a request that can never fit.
            QueueFullError: max_num_waiting requests wait already.
        """
        name = request_id if request_id is not None else f"request-{self._num_added}"
        if name in self._requests:
            raise UsageError(f"a request named {name} is running already")
        request = self._admission.make(
            name,
            self._num_added,
            prompt,
            params if params is not None else SamplingParams(),
            stream=stream,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request)
        self._num_added += 1
        self._requests[name] = [request, *request.followers]
        self._reporter.arrived(request)
        return name

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and give its cache back.

        Returns:
            The last output of each of its continuations; none if there is no such request, for example because it has
            just finished.
        """
        outputs = []
        for request in list(self._requests.get(request_id, ())):
            text = "" if request.detokenizer is None else request.detokenizer.flush()
            outputs.append(self._end(request, RequestStatus.FINISHED_ABORT, text))
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget what is cached for later requests.

        Raises:
            UsageError: requests are running.
        """
        if self._requests:
            raise UsageError(f"{len(self._requests)} requests are running", fix="reset the prefix cache when none is")
        self.pool.forget_cached()

    def step(self) -> list[RequestOutput]:
        """Compute one batch; what is new for each continuation that got a token or ended.

        An error in the computation ends the requests of this step, each with the error as its last output, and leaves
        the engine ready for the others.
        """
        if not self._requests:
            return []
        planned = self.scheduler.schedule()
        if self._watchdog.is_stuck(planned):
            return self._end_the_first(planned)
        involved = [part.request for part in planned]
        try:
            logits, sampled = self._compute(planned)
            rows, takers = [], []
            for row, request in enumerate(sampled):
                followers = self.scheduler.fork(request)
                involved += followers
                takers += [request, *followers]
                rows += [row] * (1 + len(followers))
            chosen = choose_tokens(logits if len(takers) == len(sampled) else logits[rows], takers)
        except Exception as error:
            # Whatever it was, it must not take the requests of other callers down with it.
            logger.exception("a step of %d requests failed", len(planned))
            return [
                output for request in involved for output in self._fail(request, f"{type(error).__name__}: {error}")
            ]
        except BaseException:
            for request in involved:
                self.scheduler.restart(request)
            raise
        return [output for token in chosen for output in self._take(token)]

    def _compute(self, planned: Sequence[Scheduled]) -> tuple[Tensor, list[Request]]:
        """Run the model: [R, V] logits, and the R requests that get a token from them."""
        is_fixed = self.config.deterministic
        sampled: list[Request] = []
        logits: list[Tensor] = []
        for parts in self._passes(planned):
            batch = build_batch(parts, self.config.kv_block_size, has_fixed_shapes=is_fixed)
            found = self._runner.forward(batch)
            score_prompts(batch, found)
            logits.append(found[: len(batch.sampled_rows)])
            sampled += [batch.requests[row] for row in batch.sampled_rows]
        for part in planned:
            part.request.num_computed_tokens += part.num_tokens
        self._reporter.computed(planned)
        return logits[0] if len(logits) == 1 else torch.cat(logits), sampled

    def _passes(self, planned: Sequence[Scheduled]) -> list[Sequence[Scheduled]]:
        """What is computed together: everything, unless numbers must not depend on what else is computed."""
        if not self.config.deterministic:
            return [planned]
        model = self._loaded.model
        is_apart = isinstance(model, Decoder) and model.decodes_apart
        together = [part for part in planned if is_apart and part.num_tokens == 1]
        alone = [[part] for part in planned if not is_apart or part.num_tokens > 1]
        return [together, *alone] if together else [*alone]

    def _take(self, chosen: NextToken) -> list[RequestOutput]:
        """Give a request its next token."""
        request, token = chosen.request, chosen.token_id
        if token is None:
            return self._fail(request, chosen.error or why_not_finite(self.source.name, self._loaded.model))
        if request.matcher is not None and token not in request.stop_token_ids and not request.matcher.accept(token):
            return self._fail(request, f"the structured form does not take token {token}, which its mask allowed")
        text, status, stop_reason = request.append_token(token)
        if status is not None:
            if request.detokenizer is None:
                text = decode_all(self._decode, _text_token_ids(request, status, stop_reason))
            self._remove(request, status)
        return [self._reporter.token(chosen, text, status, stop_reason)]

    def _end_the_first(self, planned: Sequence[Scheduled]) -> list[RequestOutput]:
        """A step leads nowhere: end the request that is next in line, so that the others may get through."""
        state = dump_state(self.scheduler, self.pool)
        logger.error("the engine makes no progress: %s", state)
        for part in planned:
            self.scheduler.restart(part.request)
        first = self.scheduler.waiting.first if self.scheduler.waiting else self.scheduler.running[0]
        return self._fail(first, f"the engine makes no progress ({state}); this is a bug, please report it")

    def _end(self, request: Request, status: RequestStatus, text: str = "", error: str | None = None) -> RequestOutput:
        """The one last output of a request that does not get another token."""
        if status is RequestStatus.FINISHED_ERROR or not request.num_output_tokens:
            first = 0 if status is RequestStatus.FINISHED_ERROR else request.num_found_blocks
            freed = self._remove(request, status, forget_from=first)
            self._cache.erase(freed)  # it may hold a NaN, which would reach the next owner through a masked key
        else:
            self._remove(request, status)
        return self._reporter.ended(request, status, text, error)

    def _fail(self, request: Request, error: str) -> list[RequestOutput]:
        """End a request and those that wait for its prompt."""
        ended = [request, *request.followers]
        request.followers = ()
        return [self._end(one, RequestStatus.FINISHED_ERROR, error=error) for one in ended]

    def _remove(self, request: Request, status: RequestStatus, *, forget_from: int | None = None) -> list[int]:
        freed = self.scheduler.finish(request, status, forget_from=forget_from)
        continuations = self._requests[request.request_id]
        continuations.remove(request)
        if not continuations:
            del self._requests[request.request_id]
        return freed

    def generate(
        self, prompts: Iterable[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue all prompts, as many at a time as fit.

        Args:
            prompts: as in `add_request`.
            params: one for all, or one for each.

        Returns:
            In the order of the prompts; n of each.

        Raises:
            UsageError: as in `add_request`, then nothing is generated; or requests are running already.
            EngineError: a request failed; the others are ended.
        """
        if self._requests:
            raise UsageError(f"{len(self._requests)} requests are running already", fix="call step until they end")
        return generate_all(self, prompts, params if params is not None else SamplingParams())

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities of every next token, from one forward pass through the same model.

        Args:
            token_ids: T tokens, used as they are; at most max_model_len.

        Returns:
            [T, V] float32; row t is the distribution of token t + 1 given tokens 0 to t.

        Raises:
            UsageError: no token, too many, or unknown ones.
        """
        token_ids = self._admission.token_ids(token_ids)
        if len(token_ids) > self.max_model_len:
            raise UsageError(f"{len(token_ids)} tokens to score are more than max_model_len={self.max_model_len}")
        return self._runner.score(token_ids)

    def describe(self) -> dict[str, Any]:
        """What runs here and how, for records; JSON-able."""
        return describe_engine(
            self.source, self.config, self._loaded, self._cache, self.max_model_len, self.chat.sha256
        )


def _text_token_ids(request: Request, status: RequestStatus, stop_reason: str | int | None) -> list[int]:
    """The new tokens that have text: not the one that ended the request."""
    token_ids = request.output_token_ids
    return token_ids[:-1] if status is RequestStatus.FINISHED_STOP and stop_reason is not None else token_ids
