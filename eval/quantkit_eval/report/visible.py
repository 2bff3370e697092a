"""Text that can be shown anywhere: what a model wrote, with every invisible or forbidden character made visible.

A broken model writes NUL bytes, lone surrogates and direction overrides. HTML replaces some of them silently, XML
forbids them, UTF-8 cannot encode them, and a direction override reorders the text around it. Each becomes something
that a reader can see; letters, line feeds, tabs and joiners stay as they are.
"""

import re
from collections.abc import Mapping
from typing import Any

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks, embeddings, overrides and isolates
    "\u2028\u2029\ufeff\ufff9-\ufffb\ufffe\uffff"  # line separators, byte order mark, annotations, noncharacters
    "\ud800-\udfff\U000e0000-\U000e007f]"  # lone surrogates, invisible tags
)


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures: ␀ ␁ ... ␍ ... ␛
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def visible(text: str) -> str:
    """The same text with every control, direction and unencodable character replaced by a picture or its code point."""
    return _INVISIBLE.sub(_picture, text)


def visible_record(value: Any) -> Any:
    """A copy of a JSON value in which every string, keys included, went through ``visible``."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(key)): visible_record(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [visible_record(item) for item in value]
    return value
