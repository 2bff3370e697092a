"""A server over the tiny Llama in this process: uvicorn in a thread, on a free port of the loopback."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from quantkit.serve import Engine, EngineConfig
from quantkit.serve.http.app import ServerConfig, create_app


class RunningServer:
    """A server that answers until it is stopped."""

    def __init__(self, folder: Path, server: dict[str, Any], **config: Any) -> None:
        settings = {"max_model_len": 1536, "max_num_seqs": 8, "kv_block_size": 16, "max_num_waiting": 64, **config}
        self.engine = Engine(folder, EngineConfig(**settings))
        self.app = create_app(self.engine, ServerConfig("tiny", **{"drain_s": 5.0, **server}))
        self.service = self.app.state.service
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, log_level="error", timeout_graceful_shutdown=10, ws="none")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        self._wait_for(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        headers = {"Authorization": f"Bearer {server['api_key']}"} if "api_key" in server else {}
        self.http = httpx.Client(base_url=self.url, timeout=60, headers=headers)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=server.get("api_key", "none"), max_retries=0, timeout=60
        )

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})

    def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of a request that must fail with this status."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error"}
        found: dict[str, Any] = response.json()["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    def metric(self, name: str, **labels: str) -> float:
        """One value of /metrics."""
        for line in self.http.get("/metrics").text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.startswith(name + "{") and all(f'{label}="{text}"' in key for label, text in labels.items()):
                return float(value)
        raise AssertionError(f"no {name} with {labels}")

    def wait_until_idle(self) -> None:
        """Every block is back and no request is left."""
        self._wait_for(lambda: not self.engine.has_unfinished and self.engine.pool.num_used == 0)

    @staticmethod
    def _wait_for(condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            time.sleep(0.01)
        pytest.fail("it did not happen within 20 s")

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def make_server(tiny_llama_folder: Path) -> Iterator[Callable[..., RunningServer]]:
    """``make_server(api_key=..., **engine)``: started once for the same arguments, stopped at the end."""
    made: dict[Any, RunningServer] = {}

    def make(server: tuple[tuple[str, Any], ...] = (), **config: Any) -> RunningServer:
        key = (server, *sorted(config.items()))
        if key not in made:
            made[key] = RunningServer(tiny_llama_folder, dict(server), **config)
        return made[key]

    yield make
    for running in made.values():
        running.stop()


@pytest.fixture
def server(make_server: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """The server of most tests; every block must be back at the end of one."""
    running = make_server()
    yield running
    running.wait_until_idle()
