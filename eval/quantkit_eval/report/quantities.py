"""Numbers as people read them: three digits, a real minus sign, the unit; a dash where nothing was measured."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

MISSING = "\u2013"
MINUS = "\u2212"
TIMES = "\u00d7"


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits without zeros at the end, thousands separators; tiny ones as ``1.2e-5``."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", MINUS)
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        text = f"{_without_end_zeros(mantissa)}e{int(power)}"
    else:
        text = _without_end_zeros(f"{value:,.{max(digits - 1 - exponent, 0)}f}")
    return text.replace("-", MINUS)


def _without_end_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def signed(text: str) -> str:
    """The same number with a plus sign if it is above zero."""
    return text if text.startswith((MINUS, MISSING)) or text[:1] not in "0123456789" or _is_zero(text) else f"+{text}"


def _is_zero(text: str) -> bool:
    return not any(character in "123456789" for character in text)


def percent(value: float | None) -> str:
    """A share, 0 to 1, as a percentage."""
    return MISSING if value is None else f"{_trim(100 * value)}%"


def points(value: float | None) -> str:
    """A difference of shares in percentage points, signed."""
    return MISSING if value is None else f"{signed(_trim(100 * value))} pp"


def _trim(value: float) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if _is_zero(text) else text.replace("-", MINUS)


def ratio(value: float | None) -> str:
    """A factor: the sign of multiplication and the number."""
    return MISSING if value is None else f"{TIMES}{number(value)}"


def size(nbytes: float | None) -> str:
    """Bytes in decimal units, as disks and downloads are measured."""
    if nbytes is None:
        return MISSING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= factor:
            return f"{number(round(nbytes / factor, 1) if nbytes / factor < 100 else round(nbytes / factor))} {unit}"
    return f"{number(nbytes)} bytes"


def duration(seconds: float | None) -> str:
    """Seconds, or minutes and seconds, or hours and minutes."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def probability(value: float | None) -> str:
    """A p-value: never a bare zero."""
    if value is None:
        return MISSING
    if value < 0.0001:
        return "<\u00a00.0001"
    return f"{value:.4f}" if value < 0.001 else f"{value:.3f}"


def instant(created: str) -> str:
    """A record's time: ``29 November 2026, 14:05 UTC``."""
    when = datetime.fromisoformat(created)
    return f"{when.day} {when:%B %Y, %H:%M} UTC"


def shorten(text: str, limit: int) -> str:
    """One line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


@dataclass(frozen=True, slots=True)
class Unit:
    """How values of one unit, their differences and the numbers on an axis are written."""

    value: Callable[[float | None], str]
    difference: Callable[[float | None], str]
    tick: Callable[[float], str]

    def interval(self, interval: Sequence[float] | None, *, of_difference: bool = False) -> str:
        """Both ends, with the unit once: ``0.38 to 0.45 nats``."""
        if interval is None:
            return MISSING
        write = self.difference if of_difference else self.value
        low, high = write(interval[0]), write(interval[1])
        tail = high[len(high.partition(" ")[0]) :]
        return f"{low.removesuffix(tail) if tail else low} to {high}"


SHARE = Unit(percent, points, lambda value: f"{signed(_trim(100 * value))}")
RATIO = Unit(ratio, lambda value: signed(number(value)), lambda value: f"{TIMES}{number(value)}")
# A perplexity is a number of its own.
_SHORT_UNITS = {"tok_per_s": "tok/s", "nats_per_token": "nats", "perplexity": "", "number": ""}


def unit_named(name: str) -> Unit:
    """The writing of a unit as records name it; a unit that needs no special writing follows the number."""
    if name == "fraction":
        return SHARE
    if name == "ratio":
        return RATIO
    short = _SHORT_UNITS.get(name, name.replace("_", " "))
    tail = f" {short}" if short else ""

    def value(amount: float | None) -> str:
        return number(amount) + (tail if amount is not None else "")

    return Unit(value, lambda amount: signed(value(amount)), lambda amount: number(amount))
