"""A number within limits, as the value of an option."""

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """``click.FloatRange`` that refuses NaN, which no comparison finds to be out of range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Raises click.BadParameter."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number in the range {self._describe_range()}.", param, ctx)
        return number
