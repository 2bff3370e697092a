import json
import socket
import threading
import time
from typing import Any

import pytest

LONG = {"prompt": "The quick", "max_tokens": 480, "temperature": 0, "ignore_eos": True}


def send(server: Any, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, unanswered."""
    content = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    head = "".join(line + "\r\n" for line in (*lines, ""))
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(head.encode() + content)
    return connection


@pytest.fixture
def slow(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps wait for ``gate``, so that a request is certainly running when its client goes."""
    gate = threading.Event()
    gate.set()
    step = server.engine.step

    def wait_and_step() -> Any:
        gate.wait(20)
        return step()

    monkeypatch.setattr(server.engine, "step", wait_and_step)
    yield gate
    gate.set()
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_blocks(server: Any, slow: Any, stream: bool) -> None:
    before = (
        server.metric("vllm:generation_tokens_total"),
        server.metric("vllm:request_success_total", finished_reason="abort"),
    )
    connection = send(server, {**LONG, "stream": stream})
    server._wait_for(lambda: server.engine.has_unfinished)
    slow.clear()
    connection.close()
    server._wait_for(lambda: server.service.engine._commands or not server.engine.has_unfinished)
    slow.set()
    server.wait_until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == before[1] + 1
    assert server.metric("vllm:generation_tokens_total") < before[0] + 480
    assert server.http.get("/health").status_code == 200


def test_an_error_in_a_step_fails_the_request_and_not_the_server(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "step", explode)
        found = server.error("/v1/completions", LONG, 500)
        assert found["message"] == "the request failed: RuntimeError: no"
        assert found["type"] == "server_error"
        response = server.post("/v1/completions", {**LONG, "stream": True})
        lines = [line for line in response.text.split("\n\n") if line]
        assert json.loads(lines[0].removeprefix("data: "))["error"]["message"] == "the request failed: RuntimeError: no"
        assert lines[1:] == ["data: [DONE]"]
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_full_queue_is_a_429(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_server(max_num_seqs=1, max_num_waiting=1)
    with monkeypatch.context() as patch:
        patch.setattr(small.engine, "step", lambda: time.sleep(0.01) or [])  # nobody gets from waiting to running
        connection = send(small, LONG)
        small._wait_for(lambda: len(small.engine.unfinished) == 1)
        response = small.post("/v1/completions", LONG)
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        connection.close()
        small.wait_until_idle()
    assert small.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_metrics_page(server: Any) -> None:
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    page = server.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    types = dict(line.split()[2:4] for line in page.text.splitlines() if line.startswith("# TYPE"))
    assert types["vllm:num_requests_running"] == "gauge"
    assert types["vllm:prompt_tokens_total"] == "counter"
    assert types["vllm:time_to_first_token_seconds"] == "histogram"
    for line in page.text.splitlines():
        name = line.split("{")[0]
        family = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert line.startswith("#") or family in types or name in types
        assert line.startswith("#") or 'model_name="tiny"' in line
    name = "vllm:time_to_first_token_seconds"
    buckets = [float(line.rpartition(" ")[2]) for line in page.text.splitlines() if line.startswith(f"{name}_bucket")]
    assert buckets == sorted(buckets)
    assert server.metric(f"{name}_bucket", le="+Inf") == server.metric(f"{name}_count") == buckets[-1]
    assert server.metric("quantkit:http_responses_total", path="/v1/completions", status="200") >= 1
