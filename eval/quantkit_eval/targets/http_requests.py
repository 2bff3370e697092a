"""Requests to a server: several at a time, tried again where that may help, and never longer than they may take."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from quantkit_eval.errors import OptionError, TargetError

TOO_MANY_REQUESTS, INTERNAL_ERROR, NOT_IMPLEMENTED = 429, 500, 501
LOOK = "Look whether the server runs, and whether its URL ends as it should, mostly in /v1"
LONGEST_WAIT_S = 30.0  # between two tries, unless the server asks for more

Json = Any


class RequestRefusedError(TargetError):
    """The server refuses a request for what it is; asking again would not help.

    Args:
        message: as in `TargetError`.
        status: of the answer.
        fix: likewise.
    """

    def __init__(self, message: str, status: int, *, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.status = status


class ServerFaultError(TargetError):
    """The server answered each try that it answered with 500: it is there, and this request is beyond it."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How a server is asked.

    Attributes:
        concurrency: requests at a time.
        timeout_s: that a server may be silent before a try counts as failed.
        total_timeout_s: that one request may take, all tries and waits together.
        max_retries: tries after the first one: after 429, 5xx but 501, a broken connection or silence.
        first_wait_s: before the second try; it doubles with each, and a Retry-After of the server goes before.

    Raises:
        OptionError: a value out of range.
    """

    concurrency: int = 8
    timeout_s: float = 120.0
    total_timeout_s: float = 600.0
    max_retries: int = 5
    first_wait_s: float = 0.5

    def __post_init__(self) -> None:
        for name, lowest in (("concurrency", 1), ("max_retries", 0)):
            if getattr(self, name) < lowest:
                raise OptionError(f"{name}={getattr(self, name)} must be at least {lowest}")
        for name in ("timeout_s", "total_timeout_s", "first_wait_s"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name}={getattr(self, name)} must be above 0")


class HttpRequests:
    """Asks one server.

    Args:
        url: of the server; how it begins says whether certificates are needed.
        api_key: sent as a bearer token; None sends none.
        limits: of each request.
    """

    def __init__(self, url: str, api_key: str | None, limits: RequestLimits) -> None:
        self._certificates = httpx.create_ssl_context() if url.startswith("https") else False  # slow to load: once
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._limits = limits

    def get(self, url: str, *, max_retries: int | None = None) -> Json:
        """The JSON document at a URL.

        Args:
            url: of the document.
            max_retries: in place of the limits'.

        Raises:
            TargetError: there is none; RequestRefusedError for a status of 300 to 499, but 429, and for 501.
        """
        answers, failure = asyncio.run(self._ask("GET", url, [None], max_retries))
        if failure is not None:
            raise failure
        return answers[0]

    def post(self, url: str, body: Mapping[str, Any]) -> Json:
        """The answer to one request. Raises as ``get``; ServerFaultError if the server answers with 500 only."""
        answers, failure = self.post_all(url, [body])
        if failure is not None:
            raise failure
        return answers[0]

    def post_all(
        self, url: str, bodies: Sequence[Mapping[str, Any]], names: Sequence[str] = ()
    ) -> tuple[list[Json | None], TargetError | None]:
        """The answers to many requests, some at a time.

        Args:
            url: for all of them.
            bodies: of the requests.
            names: of the requests; a refusal says whose it is.

        Returns:
            Their answers in their order, and None; or, if one failed for good, those that had come until then with
            None for the others, and what went wrong.
        """
        return asyncio.run(self._ask("POST", url, bodies, None, names))

    async def _ask(
        self,
        method: str,
        url: str,
        bodies: Sequence[Mapping[str, Any] | None],
        max_retries: int | None,
        names: Sequence[str] = (),
    ) -> tuple[list[Json | None], TargetError | None]:
        answers: list[Json | None] = [None] * len(bodies)
        failure: TargetError | None = None
        turns = asyncio.Semaphore(self._limits.concurrency)
        tries = 1 + (self._limits.max_retries if max_retries is None else max_retries)

        async def one(index: int) -> None:
            async with turns:
                try:
                    answers[index] = await self._until_answered(client, method, url, bodies[index], tries)
                except RequestRefusedError as error:
                    whose = f"request {names[index]!r}: " if names else ""
                    raise RequestRefusedError(f"{whose}{error.message}", error.status, fix=error.fix) from None

        timeout = httpx.Timeout(self._limits.timeout_s)
        async with httpx.AsyncClient(headers=self._headers, timeout=timeout, verify=self._certificates) as client:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for index in range(len(bodies)):
                        tasks.create_task(one(index))
            except* TargetError as failures:
                failure = next(error for error in failures.exceptions if isinstance(error, TargetError))
        return answers, failure

    async def _until_answered(
        self, client: httpx.AsyncClient, method: str, url: str, body: Mapping[str, Any] | None, tries: int
    ) -> Json:
        """Try, wait, and try again, within the total time."""
        begun, trouble, wait = time.monotonic(), "no answer yet", self._limits.first_wait_s
        is_reached, outcomes = True, set[int]()  # statuses, and 0 for a try without one
        try:
            async with asyncio.timeout(self._limits.total_timeout_s):
                for number in range(1, tries + 1):
                    try:
                        response = await client.request(method, url, json=body)
                    except httpx.RequestError as error:
                        trouble = f"{type(error).__name__} {error}".strip()
                        is_reached = not isinstance(error, httpx.ConnectError)
                        outcomes.add(0)
                        asked = 0.0
                    else:
                        is_reached = True
                        if not _may_pass(response.status_code):
                            return _document(url, response)
                        outcomes.add(response.status_code)
                        trouble = _status(response)
                        asked = _retry_after(response)
                    if number < tries:
                        await asyncio.sleep(max(wait, asked))
                        wait = min(2 * wait, LONGEST_WAIT_S)
        except TimeoutError:
            seconds = self._limits.total_timeout_s
            what = "gave no answer within" if is_reached else "could not be reached for"
            raise _failure(f"{url} {what} {seconds:g} s ({trouble})", outcomes) from None
        seconds = time.monotonic() - begun
        how_often = "once" if tries == 1 else f"{tries} times in {seconds:.1f} s, at last"
        raise _failure(f"{url} failed {how_often} with {trouble}", outcomes)


def _failure(message: str, outcomes: set[int]) -> TargetError:
    """What tries that all failed come to."""
    kind = ServerFaultError if outcomes == {INTERNAL_ERROR} else TargetError
    return kind(message, fix=LOOK)


def _may_pass(status: int) -> bool:
    """Whether asking again may help."""
    return status == TOO_MANY_REQUESTS or (status >= 500 and status != NOT_IMPLEMENTED)


def _document(url: str, response: httpx.Response) -> Json:
    """What a server answered that was not out of order."""
    if response.status_code >= 300:  # redirects lead elsewhere; the user should name where
        raise RequestRefusedError(f"{url} refuses: {_status(response)}", response.status_code)
    try:
        return response.json()
    except (ValueError, RecursionError):  # the latter of what is nested without end
        raise TargetError(f"{url} answered {_short(response.text)!r}, which is no JSON", fix=LOOK) from None


def _status(response: httpx.Response) -> str:
    """``429 Too Many Requests (the queue is full)``: OpenAI's error objects and vLLM's older ones have a message."""
    try:
        found = json.loads(response.text)
        error = found.get("error", found)
        message = error.get("message", "") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        message = ""
    return f"{response.status_code} {response.reason_phrase}" + (f" ({_short(str(message))})" if message else "")


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 if it does not say, or says a date."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _short(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
