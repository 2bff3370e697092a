"""How many items a suite will ask, said before any model is asked; so wrong options and files show before the work."""

from collections.abc import Mapping
from typing import Any

from quantkit_eval.suites import CONSTRAINED, load_suite, nll, parse_options
from quantkit_eval.suites.file import FileOptions, check_forms, chosen_items
from quantkit_eval.suites.graded import GeneratedSuite
from quantkit_eval.suites.lm_eval_task import check_task


def count_items(name: str, options: Mapping[str, Any]) -> int | None:
    """Items that a suite would ask; None if it has no right and wrong answers, or nobody knows yet.

    Raises:
        OptionError: an unknown suite, wrong options, or a file of items or a text that cannot be read.
    """
    suite = load_suite(name, options.get("kind"))
    if options.get("kind") == "file":
        items = chosen_items(parse_options(FileOptions, options, name))
        if name.endswith(CONSTRAINED):
            check_forms(name, items)
        return len(items)
    if options.get("kind") == "lm-eval":
        return check_task(name, options).num_items or None  # what a whole task holds only lm-eval knows
    if name == nll.SUITE:
        parse_options(nll.NllOptions, options, name).read_text()
    return suite.options(name, options).num_items if isinstance(suite, GeneratedSuite) else None
