"""What llama.cpp must know of a Unigram tokenizer: how it normalizes text before it looks for the likeliest pieces."""

from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UsageError

NOT_IN_MODEL = -1000.0  # score of tokens that the model itself does not know
_SPACE, _SPACES = (" ", "▁"), {"Regex": " {2,}"}


@dataclass(frozen=True, slots=True)
class Normalization:
    """How text is changed before it is cut.

    Attributes:
        charsmap: SentencePiece's replacements of characters; empty for none.
        remove_extra_whitespaces: whether several spaces count as one, and those at the end as none.
    """

    charsmap: bytes = b""
    remove_extra_whitespaces: bool = False


def read_normalization(document: dict[str, Any]) -> Normalization:
    """The normalization of a tokenizer.json.

    Args:
        document: the whole of it.

    Raises:
        UsageError: a step that llama.cpp cannot do.
    """
    charsmap, removes = b"", False
    for step in _steps(document.get("normalizer"), "normalizers"):
        kind = step["type"]
        if kind == "Precompiled":
            charsmap = b64decode(step["precompiled_charsmap"])
        elif kind == "Replace" and step["pattern"] == _SPACES and step["content"] in _SPACE:
            removes = True
        elif (kind, step.get("content")) != ("Replace", "▁") and (kind, step.get("strip_left")) != ("Strip", False):
            raise UsageError(f"the tokenizer normalizes text by {kind}, which llama.cpp's Unigram tokenizer cannot")
    for step in _steps(document.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "WhitespaceSplit":
            removes = True
        elif step["type"] != "Metaspace":
            raise UsageError(f"the tokenizer cuts text by {step['type']}, which llama.cpp's Unigram tokenizer cannot")
    return Normalization(charsmap, removes)


def _steps(rules: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    if rules is None:
        return
    if rules["type"] != "Sequence":
        yield rules
        return
    for part in rules[inner]:
        yield from _steps(part, inner)


def unigram_scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """The log probability of each token.

    Args:
        model: of a tokenizer.json.
        tokens: by id, filled up and with those that were added.
    """
    known = dict(model["vocab"])
    return [float(known.get(token, NOT_IN_MODEL)) for token in tokens]
