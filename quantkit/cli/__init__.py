"""The command ``quantkit``: one file a verb, loaded when it is called. A verb parses, calls the library, and prints.

stdout is the result (with ``--json`` one JSON document), stderr is progress and warnings.
Exit codes: 0 done or pass, 1 known failure, 2 usage, 3 quality regression, 4 inconclusive, 130 interrupted (Ctrl-C),
143 terminated (SIGTERM).
"""

import click

from quantkit import __version__
from quantkit.cli.group import LazyGroup

VERBS = {  # in the order of the help page; "module:command"
    "run": "quantkit.cli.run:run_command",
    "quantize": "quantkit.cli.quantize:quantize_command",
    "search": "quantkit.cli.search:search_command",
    "verify": "quantkit.cli.verify:verify_command",
    "inspect": "quantkit.cli.inspect:inspect_command",
    "plan": "quantkit.cli.plan:plan_command",
    "serve": "quantkit.cli.serve:serve_command",
    "generate": "quantkit.cli.generate:generate_command",
    "bench": "quantkit.cli.bench:bench_command",
    "eval": "quantkit.cli.eval:eval_command",
    "compare": "quantkit.cli.compare:compare_command",
    "report": "quantkit.cli.report:report_command",
    "export": "quantkit.cli.export:export_group",
    "recipes": "quantkit.cli.recipes:recipes_group",
    "models": "quantkit.cli.models:models_command",
}


@click.group(cls=LazyGroup, verbs=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantkit")
def main() -> None:
    """Quantize a language model, serve it before and after, and prove that it still works.

    Exit codes: 0 done or pass, 1 known failure, 2 wrong usage or recipe, 3 quality regression, 4 inconclusive,
    130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
    """
