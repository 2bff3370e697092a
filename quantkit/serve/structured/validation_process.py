"""The child process of `post_validation`: reads a schema and a value a line, answers whether the value fits.

It is run as a file and imports nothing of quantkit's, so that it starts quickly and stays small. It may be killed.
"""

import json
import sys
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

# Only formats that jsonschema checks without further packages, so that the answer does not depend on what is installed.
FORMATS = ("date", "email", "idn-email", "ipv4", "ipv6", "regex", "time", "uuid")


def fits(schema: Any, value: Any) -> bool | None:
    """Whether a value fits a schema, by the draft that it names or else Draft 2020-12; None if that cannot be told."""
    validator = validator_for(schema, default=Draft202012Validator)
    registry: Registry[Any] = Registry()  # fetches nothing: a reference leads into its own schema
    try:
        return bool(validator(schema, format_checker=FormatChecker(FORMATS), registry=registry).is_valid(value))
    except (Unresolvable, RecursionError):
        return None


def main() -> None:
    """Answer line by line until stdin ends."""
    for line in sys.stdin:
        schema, value = json.loads(line)
        try:
            verdict = fits(schema, value)
        except Exception as error:  # the next answer must not suffer from a schema that breaks the library
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            verdict = None
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
