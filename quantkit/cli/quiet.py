"""Keeps the libraries below from writing over the result and the progress of a command."""

import logging
import os
import sys
import warnings

import click

_SETTINGS = {  # read by the libraries when they are imported; a user's own value wins
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' bars listen to it too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # transformers' reader of GGUF files
    "LOGURU_LEVEL": "ERROR",  # compressed-tensors
}
OURS = ("quantkit", "quantkit_kernels", "quantkit_eval")


class WarningLines(logging.Handler):
    """Writes a record of ours as ``quantkit: warning: ...`` to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        click.echo(f"quantkit: {record.levelname.lower()}: {record.getMessage()}", err=True)


def quiet_libraries() -> None:
    """Silence progress bars, logs and Python warnings of other packages; our own warnings stay, a line each.

    Called when a command starts, before it imports what it needs, and never by the library.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:  # python -W and PYTHONWARNINGS win
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"quantkit(_kernels|_eval)?(\.|$)")
    for name in OURS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, WarningLines) for handler in logger.handlers):
            logger.addHandler(WarningLines(logging.WARNING))
