"""``quantkit serve``."""

import ipaddress
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.device import device_option
from quantkit.cli.group import Terminated
from quantkit.cli.number_range import NumberRange

if TYPE_CHECKING:
    import uvicorn

KEY_VARIABLE = "QUANTKIT_API_KEY"
MAX_WAITING = 256
LAST_WORDS_S = 5  # that clients have to take the end of their answers, after the drain
COUNT = click.IntRange(min=1)


@click.command("serve")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="Token that requests must carry.")
@click.option("--served-model-name", help="Name of the model for clients.  [default: MODEL]")
@device_option
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True,
              help="Of weights, activations and cache.")  # fmt: skip
@click.option("--max-model-len", type=COUNT, help="Most tokens of a request.")
@click.option("--max-num-seqs", type=COUNT, default=32, show_default=True, help="Most requests at the same time.")
@click.option("--max-num-batched-tokens", type=COUNT, default=512, show_default=True, help="Most tokens of a step.")
@click.option("--max-num-waiting", type=COUNT, default=MAX_WAITING, show_default=True,
              help="Most requests that wait; others get status 429.")  # fmt: skip
@click.option("--kv-block-size", type=COUNT, default=32, show_default=True, help="Tokens of a cache block.")
@click.option("--kv-cache-bytes", type=COUNT, help="Memory for the cache.")
@click.option("--gpu-memory-utilization", type=float, help="Instead: share of the free memory.")
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "int8"]), default="auto", show_default=True,
              help="Of keys and values.")  # fmt: skip
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True,
              help="Keep what is computed for prompts that begin alike.")  # fmt: skip
@click.option("--enforce-eager", is_flag=True, help="Capture no CUDA graphs of decode steps.")
@click.option("--swap-space", type=click.IntRange(min=0), default=0, show_default=True, help="Bytes of host memory.")
@click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True,
              help="Who runs first.")  # fmt: skip
@click.option(
    "--deterministic",
    is_flag=True,
    help="Seeded requests give the same tokens in any batch; prompts are slower.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of requests without one.")
@click.option("--max-body-bytes", type=COUNT, default=4 * 2**20, show_default=True, help="Largest request.")
@click.option("--drain-seconds", type=NumberRange(min=0), default=30.0, show_default=True,
              help="Time that requests have to end after SIGTERM.")  # fmt: skip
def serve_command(
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    max_body_bytes: int,
    drain_seconds: float,
    **engine_options: Any,
) -> None:
    """Serve MODEL over HTTP with OpenAI's interface: completions, chat, tools, structured output, metrics.

    SIGTERM lets running requests end, then leaves with exit code 0.
    """
    if api_key == "":
        raise click.BadParameter("the key is empty", param_hint="'--api-key'")
    if not _is_loopback(host) and api_key is None:
        click.echo(f"quantkit: {host} can be reached by others, and no --api-key is asked for", err=True)
    _require_extra()
    _require_port(host, port)
    import uvicorn

    from quantkit.serve import Engine, EngineConfig
    from quantkit.serve.http.app import ServerConfig, create_app

    engine = Engine(model, EngineConfig(**engine_options))
    name = served_model_name or (Path(model).name if os.path.exists(model) else model)
    app = create_app(engine, ServerConfig(name, api_key, max_body_bytes, drain_seconds))
    settings = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2 * LAST_WORDS_S
    )
    try:
        _server(settings, name, partial(app.state.service.engine.drain, drain_seconds)).run()
    except Terminated:
        click.echo("quantkit: drained", err=True)


def _server(settings: "uvicorn.Config", name: str, drain: Callable[[], Coroutine[Any, Any, None]]) -> "uvicorn.Server":
    """A server that says where it listens once it does, so that port 0 is of use, and drains before it closes.

    While ``drain`` runs it answers, so that new requests get a 503 and not a closed port; afterwards every answer has
    its end, and a connection that does not take it within LAST_WORDS_S is cut. A second Ctrl-C does not wait.
    """
    import asyncio

    import uvicorn

    class Announced(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                address = self.servers[0].sockets[0].getsockname()
                host = f"[{address[0]}]" if ":" in address[0] else address[0]
                click.echo(f"serving {name} at http://{host}:{address[1]}", err=True)

        async def shutdown(self, sockets: Any = None) -> None:
            draining = asyncio.create_task(drain())
            while not draining.done() and not self.force_exit:
                await asyncio.wait((draining,), timeout=0.1)
            draining.cancel()  # nothing, if it is done
            await asyncio.gather(draining, return_exceptions=True)
            cutting = asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut)
            await super().shutdown(sockets)
            cutting.cancel()

        def _cut(self) -> None:
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    return Announced(settings)


def _require_extra() -> None:
    """Say what to install, before a model is loaded.

    Raises:
        UsageError: the extra is not installed.
    """
    import importlib.util

    from quantkit.errors import UsageError
    from quantkit.extras import install_command

    missing = [name for name in ("fastapi", "uvicorn", "llguidance") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs {', '.join(missing)}", fix=install_command("serve"))


def _require_port(host: str, port: int) -> None:
    """Say that nobody can listen there, before a model is loaded.

    Raises:
        EngineError: the address is taken, not this machine's, or not allowed.
    """
    import socket

    from quantkit.errors import EngineError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        fix = "Choose another --port or --host" if port else "Choose another --host"
        raise EngineError(f"cannot listen on {host}:{port}: {error.strerror or error}", fix=fix) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
