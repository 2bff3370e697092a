"""The group of verbs: loads a verb when it is called, and turns what goes wrong into one line and an exit code."""

import difflib
import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from quantkit.cli.quiet import quiet_libraries
from quantkit.errors import QuantkitError
from quantkit_eval.errors import EvalError

DEBUG = "quantkit.debug"  # key of Context.meta, which a verb and its group share
INTERRUPTED, TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, made an exception so that whatever is half-written is cleaned up as on Ctrl-C."""


class KnownFailure(click.ClickException):
    """A failure whose line the library has written; ``code`` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class LazyGroup(click.Group):
    """A group whose verbs are imported on first use.

    Args:
        verbs: name -> ``module:command``, in the order of the help page.
    """

    def __init__(self, *args: Any, verbs: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.verbs = dict(verbs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the verbs."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb; None if there is no such one."""
        if cmd_name not in self.verbs:
            return None
        module, _, name = self.verbs[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        _add_debug(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that the first argument names.

        Raises:
            click.UsageError: there is no such verb; the nearest one is named.
        """
        if args and args[0] not in self.verbs and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], list(self.verbs), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(self.verbs)}"
            raise click.UsageError(f"there is no verb {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. A known failure becomes a :class:`KnownFailure`; with ``--debug`` its traceback is shown."""
        try:
            with _sigterm_raises():
                return super().invoke(ctx)
        except (QuantkitError, EvalError) as error:
            _show_traceback(ctx)
            raise KnownFailure(str(error), error.exit_code) from error
        except BrokenPipeError:  # the reader of stdout has gone; click ends quietly
            raise
        except OSError as error:  # a full disk, a folder without permission
            _show_traceback(ctx)
            place = f": {error.filename}" if error.filename else ""
            raise KnownFailure(f"{error.strerror or error}{place}", code=1) from error
        except KeyboardInterrupt as interrupt:
            _show_traceback(ctx)
            is_terminated = isinstance(interrupt, Terminated)
            _say("; ".join(["terminated" if is_terminated else "interrupted", *interrupt.args]))
            ctx.exit(TERMINATED if is_terminated else INTERRUPTED)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, standalone_mode: bool = True, **settings: Any
    ) -> Any:
        """Parse, run, and leave with the verb's exit code; every error is one line on stderr."""
        settings["prog_name"] = "quantkit"
        try:
            code = super().main(args, standalone_mode=False, **settings)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else "quantkit"
            hint = _recipe_hint(error, sys.argv[1:] if args is None else args)
            _say(f"{error.format_message().removesuffix('.').replace('?.', '?')}{hint} (see {path} --help)")
            code = error.exit_code
        except click.ClickException as error:
            _say(error.format_message())
            code = error.code if isinstance(error, KnownFailure) else error.exit_code
        except click.Abort:
            _say("interrupted")
            code = INTERRUPTED
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _recipe_hint(error: click.UsageError, args: Sequence[str]) -> str:
    """``; did you mean -r mine.yaml?`` if the recipe is missing and an argument is the name of one."""
    is_missing = isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "recipe"
    files = [word for word in args if word.endswith((".yaml", ".yml"))] if is_missing else []
    return f"; did you mean -r {files[0]}?" if files else ""


@contextmanager
def if_interrupted(consequence: str) -> Iterator[None]:
    """Say after ``interrupted`` or ``terminated`` what became of the work in this block, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.args = (consequence,)
        raise


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return

    def terminate(_signal: int, _frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(message: str) -> None:
    click.echo(f"quantkit: {' '.join(message.splitlines())}", err=True)


def _show_traceback(ctx: click.Context) -> None:
    if ctx.meta.get(DEBUG):
        traceback.print_exc()


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    ctx.meta[DEBUG] = value
    if not value:
        quiet_libraries()


def _add_debug(command: click.Command) -> None:
    """Every verb, also one below a group of its own, knows ``--debug``."""
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _add_debug(below)
    elif all(parameter.name != "debug" for parameter in command.params):
        text = "Show the traceback of a failure, and what the libraries below say."
        command.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, callback=_set_debug, help=text)
        )
