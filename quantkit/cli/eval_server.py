"""The options of ``quantkit eval`` that name a model behind a URL."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quantkit.cli.number_range import NumberRange
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit_eval.targets import OpenAIServer

Command = TypeVar("Command", bound=Callable[..., Any])
SERVER_OPTIONS = {
    "model_name": click.option("--model", "model_name", help="Of a URL: which of the models it serves."),
    "api_key_env": click.option("--api-key-env", metavar="VAR", help="Of a URL: environment variable with the key."),
    "tokenizer": click.option(
        "--tokenizer",
        metavar="FOLDER",
        help="Of a URL: tokenizer and chat template of the model, where the server has no /tokenize.",
    ),
    "concurrency": click.option(
        "--concurrency", type=click.IntRange(min=1), help="Of a URL: requests at a time.  [default: 8]"
    ),
    "request_timeout": click.option(
        "--request-timeout",
        type=NumberRange(0, min_open=True),
        help="Of a URL: seconds that one request may take, all its tries together.  [default: 600]",
    ),
}


def server_options(command: Command) -> Command:
    """Add the options; the command gets them by name."""
    for option in reversed(SERVER_OPTIONS.values()):
        command = option(command)
    return command


def refuse_server_options(server: Mapping[str, Any]) -> None:
    """Raises click.UsageError if one is given where MODEL is no URL."""
    for name, value in server.items():
        if value is not None:
            option = "--model" if name == "model_name" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for a MODEL that is a URL, such as http://127.0.0.1:8000/v1")


def open_server(url: str, server: Mapping[str, Any]) -> "OpenAIServer":
    """Connect to a server.

    Args:
        url: of its interface.
        server: the values of ``SERVER_OPTIONS``.

    Raises:
        UsageError: the variable of the key is not set, or holds what is no key.
        SourceError: no tokenizer loads.
        EvalError: no such model, or no server.
    """
    from quantkit.serve.evaluated import FolderTokenizer
    from quantkit_eval.targets import OpenAIServer, RequestLimits

    limits: dict[str, Any] = {}
    if server["concurrency"] is not None:
        limits["concurrency"] = server["concurrency"]
    if server["request_timeout"] is not None:
        seconds = server["request_timeout"]
        limits |= {"total_timeout_s": seconds, "timeout_s": min(seconds, RequestLimits().timeout_s)}
    return OpenAIServer(
        url,
        server["model_name"],
        api_key=_read_key(server["api_key_env"]),
        tokenizer=FolderTokenizer(server["tokenizer"]) if server["tokenizer"] else None,
        limits=RequestLimits(**limits),
    )


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(f"--api-key-env {variable}: the variable is not set or empty")
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"--api-key-env {variable}: the key holds characters that no key may have")
    return key
