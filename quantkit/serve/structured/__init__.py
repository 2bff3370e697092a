"""Answers of a given form: what is asked (`spec`), compiled (`compiler`), followed (`matcher`), and judged after."""

from quantkit.serve.structured.spec import StructuredOutput

__all__ = ["StructuredOutput"]
