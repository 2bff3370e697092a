"""The end of a server: what still runs is told so, what comes meanwhile is refused, and nothing is left behind."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from quantkit.cli import serve
from quantkit.serve import Engine, EngineConfig
from quantkit.serve.http.app import ServerConfig, create_app

LONG = {"prompt": "The quick", "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}


class Ending:
    """A server as the command runs it, in a thread of its own, whose requests take long."""

    def __init__(self, folder: Path, drain_s: float) -> None:
        self.engine = Engine(folder, EngineConfig(max_model_len=512, max_num_seqs=4, kv_block_size=16))
        step = self.engine.step
        self.pause_s = 0.05
        self.engine.step = lambda: (time.sleep(self.pause_s), step())[1]  # type: ignore[method-assign]
        app = create_app(self.engine, ServerConfig("tiny", None, 2**20, drain_s))
        self.front = app.state.service.engine
        settings = uvicorn.Config(app, port=0, log_level="warning", ws="none", timeout_graceful_shutdown=10)
        self.server: Any = serve._server(settings, "tiny", partial(self.front.drain, drain_s))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True


@pytest.fixture
def ending(
    tiny_llama_folder: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> Iterator[Ending]:
    """It must be gone at the end, without a line in the log, and every block must be back."""
    running = Ending(tiny_llama_folder, drain_s=getattr(request, "param", 0.5))
    yield running
    running.stop()
    running.thread.join(30)
    assert not running.thread.is_alive()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert running.engine.pool.num_used == 0


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "The quick"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_a_stream_that_runs_too_long_gets_an_end(ending: Ending, path: str, prompt: dict[str, Any]) -> None:
    body = {key: value for key, value in LONG.items() if key != "prompt"} | prompt
    with httpx.stream("POST", f"{ending.url}{path}", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        ending.stop()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert error["type"] == "service_unavailable_error"
    assert error["message"] == "the server is shutting down and has ended this request"


@pytest.mark.parametrize("ending", [60.0], indirect=True)
def test_new_requests_get_a_503_while_old_ones_end(ending: Ending) -> None:
    with httpx.Client(base_url=ending.url, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            ending.stop()
            while ending.front.is_running:
                time.sleep(0.01)
            for more in ({}, {"guided_regex": "a"}, {"prompt": "a" * 900_000}):
                refused = client.post("/v1/completions", json={"prompt": "a", **more})
                assert refused.status_code == 503
                assert refused.json()["error"]["message"] == "the server is shutting down"
            assert client.get("/health").status_code == 503
            ending.pause_s = 0
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        ending.thread.join(30)
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_a_request_without_a_stream_gets_a_503(ending: Ending) -> None:
    answers: list[httpx.Response] = []
    body = {**LONG, "stream": False}
    asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{ending.url}/v1/completions", json=body)))
    asking.start()
    while not ending.engine.has_unfinished:
        time.sleep(0.01)
    ending.stop()
    asking.join(30)
    assert answers[0].status_code == 503


def test_a_client_that_reads_nothing_holds_nobody_up(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LAST_WORDS_S", 0.5)
    content = json.dumps({**LONG, "logprobs": 20}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", ending.port))
        client.sendall(head.encode() + b"\r\n\r\n" + content)
        while not ending.engine.has_unfinished:
            time.sleep(0.01)
        ending.stop()
        ending.thread.join(20)
        assert not ending.thread.is_alive()
