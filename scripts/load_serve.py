"""Load a running server with many clients from this process, and print latencies and errors.

Start ``quantkit serve MODEL`` first. Each client streams one completion after the other, with prompts and lengths that
a seed decides, until the time is up; requests that run then are waited for. The table goes to stderr, the JSON document
to stdout.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import click
import httpx

from marked_page import machine_line, write_between_marks
from quantkit_eval.machine import describe_machine

WORDS = "the quick model reads a prompt and predicts next tokens until its answer is complete".split()  # noqa: SIM905


class Measurements:
    """What all clients saw."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.e2e_s: list[float] = []
        self.num_tokens = 0
        self.errors: Counter[str] = Counter()


async def _request(client: httpx.AsyncClient, body: dict[str, Any], found: Measurements) -> None:
    started = last = time.perf_counter()
    first, is_done = True, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            found.errors[f"status {response.status_code}"] += 1
            return
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                is_done = True
                break
            document = json.loads(line.removeprefix("data: "))
            if "error" in document:
                found.errors[str(document["error"]["type"])] += 1
                return
            now = time.perf_counter()
            if document["choices"]:
                (found.ttft_s if first else found.itl_s).append(now - last)
                first, last = False, now
            else:
                found.num_tokens += document["usage"]["completion_tokens"]
    if is_done:
        found.e2e_s.append(time.perf_counter() - started)
    else:
        found.errors["stream without an end"] += 1


async def _client(number: int, url: str, key: str | None, until: float, max_tokens: int, found: Measurements) -> None:
    choose = random.Random(number)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=300, headers=headers) as client:
        while time.monotonic() < until:
            body = {
                "prompt": " ".join(choose.choices(WORDS, k=choose.randint(4, 200))),
                "max_tokens": choose.randint(1, max_tokens),
                "temperature": choose.choice([0.0, 0.8]),
                "seed": choose.randint(0, 2**31),
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                await _request(client, body, found)
            except httpx.HTTPError as error:
                found.errors[type(error).__name__] += 1


def _percentile(values: list[float], percent: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else None


def _row(values: list[float]) -> dict[str, float | None]:
    found = {"p50_ms": _percentile(values, 50), "p99_ms": _percentile(values, 99), "max_ms": max(values, default=None)}
    return {name: None if value is None else round(1000 * value, 1) for name, value in found.items()}


async def _load(url: str, key: str | None, clients: int, seconds: float, max_tokens: int) -> dict[str, Any]:
    found, started = Measurements(), time.monotonic()
    tasks = (_client(n, url, key, started + seconds, max_tokens, found) for n in range(clients))
    await asyncio.gather(*tasks)
    wall_s = time.monotonic() - started
    async with httpx.AsyncClient(base_url=url) as client:
        health = (await client.get("/health")).status_code
    return {
        "schema_version": 1,
        "machine": describe_machine(),
        "clients": clients,
        "seconds": round(wall_s, 1),
        "requests": len(found.e2e_s),
        "errors": dict(found.errors),
        "tokens_per_s": round(found.num_tokens / wall_s, 1),
        "ttft": _row(found.ttft_s),
        "itl": _row(found.itl_s),
        "e2e": _row(found.e2e_s),
        "health_after": health,
    }


def _markdown(record: dict[str, Any]) -> str:
    names = {"ttft": "time to first token", "itl": "between tokens", "e2e": "whole request"}
    return "\n".join([
        f"{machine_line(record['machine'])} {record['clients']} clients for {record['seconds']} s: "
        f"{record['requests']} requests, {record['tokens_per_s']} tokens a second, "
        f"{sum(record['errors'].values())} errors.",
        "",
        "| | p50 ms | p99 ms | max ms |",
        "|---|---|---|---|",
        *(f"| {title} | " + " | ".join(map(str, record[name].values())) + " |" for name, title in names.items()),
    ])  # fmt: skip


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--clients", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=120.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Longest answer.")
@click.option("--api-key", envvar="QUANTKIT_API_KEY")
@click.option("--write", is_flag=True, help="Put the table into docs/BENCHMARKS.md.")
def main(url: str, clients: int, seconds: float, max_tokens: int, api_key: str | None, *, write: bool) -> None:
    """Load the server at URL; exit code 1 if any request failed."""
    record = asyncio.run(_load(url, api_key, clients, seconds, max_tokens))
    click.echo(f"{'':6}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}", err=True)
    for name in ("ttft", "itl", "e2e"):
        cells = "".join(f"{'-' if value is None else value:>10}" for value in record[name].values())
        click.echo(f"{name:6}{cells}", err=True)
    click.echo(f"{record['requests']} requests, {record['tokens_per_s']} tokens/s, errors {record['errors']}", err=True)
    if write:
        write_between_marks("BENCHMARKS.md", "load_serve.py", _markdown(record))
    click.echo(json.dumps(record, indent=2))
    sys.exit(1 if record["errors"] or record["health_after"] != 200 else 0)


if __name__ == "__main__":
    main()
