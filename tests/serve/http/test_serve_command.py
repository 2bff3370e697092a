import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.extras import install_command


@pytest.mark.slow
def test_sigterm_drains(tiny_llama_folder: Path) -> None:
    """A stream that runs ends as it would have, nothing new is taken, and the exit code is 0."""
    command = [
        sys.executable,
        "-m",
        "quantkit",
        "serve",
        str(tiny_llama_folder),
        "--port",
        "0",
        "--drain-seconds",
        "60",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stderr is not None
        try:
            said = ""
            while (found := re.search(r"at (http://127\.0\.0\.1:\d+)", said)) is None:
                line = server.stderr.readline()
                assert line, said
                said += line
            url = found[1]
            rest: list[str] = []
            reader = threading.Thread(target=lambda: rest.append(server.stderr.read() if server.stderr else ""))
            reader.start()
            body = {"prompt": "The quick", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
                lines = response.iter_lines()
                first = next(lines)
                server.send_signal(signal.SIGTERM)
                events = [line.removeprefix("data: ") for line in (first, *lines) if line]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
            assert server.wait(60) == 0
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            reader.join()
            assert "drained" in rest[0]
            assert "Traceback" not in rest[0]
        finally:
            server.kill()


def test_what_is_missing_is_said_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    result = CliRunner().invoke(main, ["serve", "no-such-model"])
    assert result.exit_code == 2
    assert result.stderr == f"quantkit: serve needs uvicorn. {install_command('serve')}\n"


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["serve", "no-such-model", "--port", str(port)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"quantkit: cannot listen on 127.0.0.1:{port}: ")
    assert "Choose another --port" in result.stderr


def test_an_open_address_without_a_key_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(tmp_path / "none"), "--host", "0.0.0.0"])
    assert result.exit_code == 1
    assert result.stderr.startswith("quantkit: 0.0.0.0 can be reached by others, and no --api-key is asked for\n")
    result = CliRunner().invoke(main, ["serve", "m", "--api-key", ""])
    assert result.exit_code == 2
