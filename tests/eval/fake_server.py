"""A server with OpenAI's interface that answers as a test tells it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quantkit_eval.protocol import GenerationRequest
from quantkit_eval.suites.extract_items import generate_items
from quantkit_eval.targets import RequestLimits

QUICK = RequestLimits(concurrency=3, timeout_s=5.0, total_timeout_s=20.0, max_retries=2, first_wait_s=0.001)
GOLDS = {item.prompt: json.dumps(item.gold) for item in generate_items(20, 0)}
Answer = tuple[int, Any]  # status, JSON document or bytes; status 0 closes the connection without a word


class FakeServer(ThreadingHTTPServer):
    """Answers each path with a function of the body; ``asked`` holds what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        self.paths: dict[str, Callable[[Any], Answer]] = {
            "/v1/models": lambda body: (200, {"data": [{"id": "tiny", "owned_by": "fake"}]}),
            "/v1/chat/completions": lambda body: chat(GOLDS.get(body["messages"][-1]["content"], "ok")),
        }
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def chats(self) -> list[str]:
        return [body["messages"][-1]["content"] for path, body in self.asked if path.endswith("/chat/completions")]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
        self.server.asked.append((self.path, body))
        self.server.headers.append(dict(self.headers))
        status, document = self.server.paths.get(self.path, lambda _: (404, {"error": {"message": "no"}}))(body)
        if not status:
            self.close_connection = True
            return
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.headers["Content-Length"] = "0"
        self.do_POST()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def chat(text: str, prompt_tokens: int = 7, **choice: Any) -> Answer:
    message = {"role": "assistant", "content": text}
    return 200, {
        "choices": [{"message": message, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 4},
    }


def in_turn(*answers: Answer, last: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """These answers, one a request, and then what ``last`` says."""
    left = list(answers)
    return lambda body: left.pop(0) if left else last(body)


@contextmanager
def running() -> Iterator[FakeServer]:
    """One that serves."""
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def request(name: str, text: str = "Hi", **settings: Any) -> GenerationRequest:
    return GenerationRequest(name, ({"role": "user", "content": text},), 8, **settings)
