"""Hub ids against a hub of our own that speaks HTTP: which bytes are asked for, and what is said when it refuses."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

COMMIT = "a" * 40
SHAPES = {
    "model.embed_tokens.weight": [320, 64],
    "model.layers.0.self_attn.q_proj.weight": [64, 64],
    "model.layers.0.self_attn.k_proj.weight": [32, 64],
    "model.layers.0.self_attn.v_proj.weight": [32, 64],
    "model.layers.0.self_attn.o_proj.weight": [64, 64],
    "model.layers.0.mlp.gate_proj.weight": [128, 64],
    "model.layers.0.mlp.up_proj.weight": [128, 64],
    "model.layers.0.mlp.down_proj.weight": [64, 128],
    "model.layers.0.input_layernorm.weight": [64],
    "model.layers.0.post_attention_layernorm.weight": [64],
    "model.norm.weight": [64],
    "lm_head.weight": [320, 64],
}
PARAMETERS = 78016  # of these shapes, added up by hand
CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SLOW = 2.5  # seconds until an answer; the client waits for one
SCRIPT = """\
import json, sys
import huggingface_hub.file_download
huggingface_hub.file_download._ETAG_RETRY_TIMEOUT = 1  # of a second try, a minute otherwise
from quantkit.capacity.read_facts import read_facts
from quantkit.errors import QuantkitError
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = read_facts(name).to_dict()
    except QuantkitError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def shard(shapes: dict[str, list[int]], padding: int = 0) -> bytes:
    """The first bytes of a weight file: its header, without a weight."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "padding": "x" * padding}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def sharded() -> dict[str, bytes]:
    names = list(SHAPES)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    index = {"metadata": {"total_size": 2 * PARAMETERS}, "weight_map": {n: f for f, ns in parts.items() for n in ns}}
    return {INDEX: json.dumps(index).encode()} | {f: shard({n: SHAPES[n] for n in ns}) for f, ns in parts.items()}


config = json.dumps(CONFIG).encode()
REPOSITORIES: dict[str, dict[str, bytes | float]] = {  # a number: seconds until the answer
    "lab/single": {"config.json": config, SINGLE: shard(SHAPES)},
    "lab/long-header": {"config.json": config, SINGLE: shard(SHAPES, padding=150_000)},
    "lab/sharded": {"config.json": config, **sharded()},
    "lab/no-weights": {"config.json": config, "pytorch_model.bin": b"?"},
    "lab/broken": {"config.json": config, SINGLE: (40).to_bytes(8, "little") + b"no JSON" * 20},
    "lab/slow-weights": {"config.json": config, SINGLE: SLOW},
    "lab/slow": {"config.json": SLOW},
    "lab/no-config": {SINGLE: shard(SHAPES)},
    "lab/not-json": {"config.json": b"{model_type"},
}
REFUSED = {  # (status, the hub's word for it)
    "lab/gated": (403, "GatedRepo"),
    "lab/private": (401, "RepoNotFound"),
    "lab/missing": (404, "RepoNotFound"),
    "lab/down": (503, ""),
}
SHARD_BYTES = 5_000_000_000  # that a weight file claims to have


class Hub(BaseHTTPRequestHandler):
    """Serves `REPOSITORIES` as far as huggingface_hub asks for it."""

    asked: ClassVar[list[tuple[str, str, str | None, int]]] = []  # method, path, range, bytes sent

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""

    def _answer(self, *, send: bool) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path)
        name, file = match.groups() if match else (self.path, "")
        if name in REFUSED:
            return self._refuse(*REFUSED[name])
        if file not in REPOSITORIES.get(name, {}):
            return self._refuse(404, "EntryNotFound")
        content = REPOSITORIES[name][file]
        if isinstance(content, float):
            time.sleep(content)
            return self._refuse(503, "")
        is_weights = file.endswith(".safetensors")
        size, wanted = SHARD_BYTES if is_weights else len(content), self.headers.get("range")
        body = content
        if wanted:
            first, last = map(int, re.findall(r"\d+", wanted))
            body = content[first : last + 1]
            if is_weights and last >= len(content):
                body += bytes(last + 1 - max(first, len(content)))
        if send:
            self.asked.append((self.command, self.path, wanted, len(body)))
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(content)):x}"')
        self.send_header("Content-Length", str(len(body) if send else size))
        self.end_headers()
        if send:
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def ask(hub: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """``ask(names)``: what `read_facts` says of each, in a process that knows this hub only."""

    def run(*names: str, **environment: str) -> dict[str, Any]:
        settings = {
            "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "0",
            "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *names], env=os.environ | settings | environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.fixture(scope="module")
def answers(ask: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return ask(*REPOSITORIES, *REFUSED)


@pytest.mark.parametrize("name", ["lab/single", "lab/long-header", "lab/sharded"])
def test_headers_are_read_by_their_range_and_no_weight(name: str, answers: dict[str, Any]) -> None:
    facts = answers[name]
    assert facts["parameters"] == PARAMETERS
    assert facts["stored_bytes"] == 2 * PARAMETERS
    assert facts["counted_from"] == "safetensors headers of the hub"
    assert facts["notes"] == []
    asked = [entry for entry in Hub.asked if f"/{name}/" in entry[1] and entry[1].endswith(".safetensors")]
    assert len(asked) == 2 if name != "lab/single" else 1
    assert all(wanted is not None for _, _, wanted, _ in asked)
    assert sum(sent for *_, sent in asked) < 300_000 < SHARD_BYTES


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("lab/no-weights", "lab/no-weights has no safetensors files: parameters are counted from config.json"),
        ("lab/broken", "no header could be read (Failed to parse safetensors header"),
        ("lab/slow-weights", "no header could be read ("),
    ],
)
def test_without_headers_the_configuration_is_counted_and_said_so(
    name: str, note: str, answers: dict[str, Any]
) -> None:
    facts = answers[name]
    assert (facts["parameters"], facts["stored_bytes"], facts["counted_from"]) == (PARAMETERS, None, "config.json")
    (said,) = facts["notes"]
    assert said.startswith(note)
    assert said.endswith("parameters are counted from config.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lab/gated", "lab/gated is gated. Accept its terms on the hub"),
        ("lab/private", "no folder and no hub model is called lab/private"),
        ("lab/missing", "no folder and no hub model is called lab/missing"),
        ("lab/no-config", "lab/no-config has no config.json on the hub"),
        ("lab/not-json", "config.json is no valid JSON"),
        ("lab/down", "the hub answered 503"),
        ("lab/slow", "the hub took too long to answer"),
    ],
)
def test_a_refusal_is_one_line(name: str, message: str, answers: dict[str, Any]) -> None:
    assert message in answers[name]
    assert "\n" not in answers[name]


def test_what_was_read_once_serves_without_a_network(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    before = ask("lab/single", HF_HOME=str(tmp_path))["lab/single"]
    after = ask("lab/single", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")["lab/single"]
    assert after["parameters"] == before["parameters"] == PARAMETERS
    assert after["counted_from"] == "config.json"
    assert "no header could be read" in after["notes"][0]
