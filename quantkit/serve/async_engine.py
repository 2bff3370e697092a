"""The engine for many callers at a time: a thread of its own steps it, coroutines hand in requests and read outputs."""

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from quantkit.errors import EngineError
from quantkit.serve.engine import Engine
from quantkit.serve.outputs import RequestOutput
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.structured.compiler import CompiledGrammar
from quantkit.serve.structured.spec import StructuredOutput

T = TypeVar("T")
NUM_THREADS = 2  # that wait for grammars
logger = logging.getLogger(__name__)


class EngineStoppedError(EngineError):
    """The engine takes no requests any more: it is shutting down, or it has failed."""


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of some prompts that were handed in together, as they come.

    It ends after the last output of every continuation; output ``index`` counts the continuations of all prompts,
    those of the first one first. Leave it with ``abort`` unless it has ended.

    Args:
        engine: that computes it.
        request_ids: one for each prompt.
        num_continuations: of each prompt.
    """

    def __init__(self, engine: "AsyncEngine", request_ids: Sequence[str], num_continuations: int) -> None:
        self.request_ids = tuple(request_ids)
        self._engine = engine
        self._num_continuations = num_continuations
        self._open = set(range(len(request_ids) * num_continuations))
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

    async def __anext__(self) -> RequestOutput:
        if not self._open:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if output.finish_reason is not None:
            self._open.discard(output.index)
        return output

    @property
    def is_open(self) -> bool:
        """True until the last output of every continuation has been read."""
        return bool(self._open)

    def put(self, output: RequestOutput) -> None:
        """Hand in an output; for the engine, on the event loop's thread."""
        number = self.request_ids.index(output.request_id)
        self._outputs.put_nowait(replace(output, index=number * self._num_continuations + output.index))

    def abort(self) -> None:
        """End what is not finished and give its cache back; the last outputs still come. Safe to call again."""
        if self._open:
            self._engine.abort(self.request_ids)


class AsyncEngine:
    """Steps an engine in a thread and serves coroutines of one event loop.

    Nothing but that thread touches the engine's requests. An error in a step ends the requests that were running, each
    with the error, and the thread goes on.

    Args:
        engine: nobody else may use it from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._is_draining = False
        self._streams: dict[str, RequestStream] = {}  # by request; the event loop's
        self._open: dict[str, set[int]] = {}  # request -> continuations without a last output; the thread's
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._grammar_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="await-grammar")

    def start(self) -> None:
        """Begin to work; call it on the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True if requests are taken."""
        return self._thread.is_alive() and not self._is_draining

    @property
    def num_unfinished(self) -> int:
        """Prompts that were handed in and have not ended."""
        return len(self._streams)

    async def compile(self, form: StructuredOutput) -> CompiledGrammar:
        """The grammar of a form, without holding up anybody.

        Raises:
            UsageError: it cannot be compiled.
            EngineStoppedError: the engine takes no requests any more.
        """
        self.require_running()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_threads, self.engine.grammar_compiler.compile, form)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Hand in prompts; all of them are taken, or none.

        Args:
            prompts: token ids.
            params: how to continue each.
            priority: see `Engine.add_request`.
            cache_salt: see `Engine.add_request`.

        Raises:
            UsageError: a prompt or parameter is wrong.
            QueueFullError: too many wait already.
            EngineStoppedError: the engine takes no requests any more.
        """
        self.require_running()
        if params.structured is not None:
            await self.compile(params.structured)  # the engine then finds it in the cache
            self.require_running()
        names = [f"request-{next(self._numbers)}" for _ in prompts]
        stream = RequestStream(self, names, params.n)
        self._streams |= dict.fromkeys(names, stream)
        try:
            await self.call(lambda: self._add(names, prompts, params, priority, cache_salt))
        except BaseException:
            self.abort(names)
            for name in names:
                self._streams.pop(name, None)
            raise
        return stream

    def require_running(self) -> None:
        """Refuse what comes when no requests are taken any more.

        Raises:
            EngineStoppedError: with the reason.
        """
        if self._is_draining:
            raise EngineStoppedError("the server is shutting down")
        if not self._thread.is_alive():
            raise EngineStoppedError("the engine has stopped")

    def _add(
        self,
        names: Sequence[str],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
    ) -> None:
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(prompt, params, request_id=name, priority=priority, cache_salt=cache_salt)
            self._open[name] = set(range(params.n))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, wherever they stand; those that have ended are left alone. Any thread may call it."""
        self._post(lambda: self._deliver([output for name in request_ids for output in self._end(name)]))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps, and return what it returns.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        if self._is_stopping or not self._thread.is_alive():
            raise EngineStoppedError("the engine has stopped")  # nobody would run it
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_finish, future, result)

        self._post(run)
        return await future

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, let those that run end, end the rest after a time, and stop. Safe to call again."""
        self._is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._streams and asyncio.get_running_loop().time() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.02)
        self.abort(list(self._streams))
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)  # the last outputs are on their way

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        """The thread: commands, then a step, as long as there is anything to do."""
        while True:
            with self._wake:
                while not (self._commands or self._is_stopping or self._open):
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
                if self._is_stopping and not commands:
                    return
            for command in commands:
                command()
            if self._open:
                self._step()

    def _step(self) -> None:
        try:
            if not self.engine.has_unfinished:
                raise EngineError("the engine has lost requests; this is a bug, please report it")
            outputs = self.engine.step()
        except Exception as error:
            # Whatever it was, it must end these requests and not the server.
            logger.exception("a step failed")
            message = f"{type(error).__name__}: {error}"
            outputs = [output for name in list(self._open) for output in self._end(name, message)]
        self._deliver(outputs)

    def _end(self, name: str, error: str | None = None) -> list[RequestOutput]:
        """The last output of each continuation of a request that has not had one."""
        still_open = self._open.get(name, set())
        try:
            ended = {output.index: output for output in self.engine.abort(name)}
        except Exception:
            logger.exception("request %s could not be ended", name)
            ended = {}
        outputs = []
        for index in sorted(still_open):
            output = ended.get(index, RequestOutput(name, (), "", "abort", index=index))
            outputs.append(output if error is None else replace(output, finish_reason="error", error=error))
        return outputs

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass outputs to the event loop, once for all of them."""
        wanted, ended = [], set()
        for output in outputs:
            still_open = self._open.get(output.request_id, set())
            if output.index not in still_open:
                logger.error("request %s/%d goes on after its end", output.request_id, output.index)
                continue
            wanted.append(output)
            if output.finish_reason is not None:
                still_open.discard(output.index)
                if not still_open:
                    del self._open[output.request_id]
                    ended.add(output.request_id)
        if wanted and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, wanted, ended)

    def _put(self, outputs: list[RequestOutput], ended: set[str]) -> None:
        for output in outputs:
            if output.request_id in self._streams:
                self._streams[output.request_id].put(output)
        for name in ended:
            self._streams.pop(name, None)


def _finish(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
