"""The options of ``quantkit eval`` that name tasks of lm-eval."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
TASK_OPTIONS = {
    "tasks": click.option(
        "--tasks", metavar="A,B", help="Also run these tasks or groups of lm-eval; without -r only these."
    ),
    "limit": click.option("--limit", type=click.IntRange(min=1), help="Of --tasks: the first so many items of each."),
    "num_fewshot": click.option(
        "--num-fewshot",
        type=click.IntRange(min=0),
        help="Of --tasks: examples in a prompt.  [default: as the task says]",
    ),
    "chat_template": click.option(
        "--apply-chat-template", "chat_template", is_flag=True, default=None, help="Of --tasks: ask in a chat."
    ),
    "include_path": click.option(
        "--include-path", metavar="FOLDER", help="Of --tasks: a folder with tasks of your own."
    ),
}


def task_options(command: Command) -> Command:
    """Add the options; the command gets them by name."""
    for option in reversed(TASK_OPTIONS.values()):
        command = option(command)
    return command


def add_tasks(
    suites: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], *, is_alone: bool
) -> dict[str, Mapping[str, Any]]:
    """The suites, and one of kind ``lm-eval`` for each task.

    Args:
        suites: name -> options, as ``evaluate`` takes them.
        given: the values of ``TASK_OPTIONS``.
        is_alone: tasks take the place of the suites.

    Raises:
        click.UsageError: an option of tasks without tasks, or a name that is taken.
    """
    tasks = [name.strip() for name in (given["tasks"] or "").split(",") if name.strip()]
    options = {name: value for name, value in given.items() if value is not None and name != "tasks"}
    if not tasks:
        for name in options:
            option = "--apply-chat-template" if name == "chat_template" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is of --tasks, and there are none")
        return dict(suites)
    found: dict[str, Mapping[str, Any]] = {} if is_alone else dict(suites)
    options["num_items"] = options.pop("limit", 0)
    for task in tasks:
        if task in found:
            raise click.UsageError(f"--tasks: a suite named {task} is there already")
        found[task] = {"kind": "lm-eval", "task": task, **options}
    return found
