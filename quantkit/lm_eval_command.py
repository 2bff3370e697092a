"""``quantkit-lm-eval``: lm-eval's own command, which knows our engine; without lm-eval it says what to install."""

import importlib.util
import sys

from quantkit.extras import install_command


def main() -> None:
    """Run lm-eval's command."""
    if importlib.util.find_spec("lm_eval") is None:
        sys.exit(f"quantkit-lm-eval: lm-eval is not installed. {install_command('lm-eval')}")
    from quantkit import lm_eval_model  # registers the engine, for which it needs lm-eval

    lm_eval_model.main()
