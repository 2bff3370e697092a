"""What a server answered to a chat, checked: what is no answer is said to be none, never guessed at."""

from dataclasses import dataclass

from quantkit_eval.targets.http_requests import Json

FINISHED = ("stop", "length")
HIGHEST_SHARE = 1.000001  # a sum of float32 probabilities may be above 1 by as much


@dataclass(frozen=True, slots=True)
class Completion:
    """A chat completion.

    Attributes:
        text: that the model wrote; empty if it is null.
        finish_reason: ``stop`` or ``length``.
        num_prompt_tokens: as the server counts them.
        num_tokens: new ones; None if the server does not say.
        num_forced_tokens: of these, those for which a form left no choice (`quantkit serve` says it); else None.
        legal_mass: likewise, mean probability of what the form allowed.
    """

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int | None
    num_forced_tokens: int | None
    legal_mass: float | None


def read_completion(answer: Json, num_prompt_tokens: int) -> Completion:
    """Read an answer.

    Args:
        answer: the JSON document.
        num_prompt_tokens: where the server does not count.

    Raises:
        ValueError: it is no completion; says what is wrong, with the value.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict) or "content" not in message:
        raise ValueError("it has no choices[0].message.content")
    usage = _object("usage", answer.get("usage"))
    structured = _object("structured", choice.get("structured"))
    finish_reason = choice.get("finish_reason")
    if finish_reason not in FINISHED:
        raise ValueError(f"finish_reason is {finish_reason!r}, neither 'stop' nor 'length'")
    counted = _count("prompt_tokens", usage.get("prompt_tokens"))
    num_tokens = _count("completion_tokens", usage.get("completion_tokens"))
    num_forced = _count("num_forced_tokens", structured.get("num_forced_tokens"))
    return Completion(
        text=_text(message["content"]),
        finish_reason=finish_reason,
        num_prompt_tokens=num_prompt_tokens if counted is None else counted,
        num_tokens=num_tokens,
        num_forced_tokens=None if num_tokens is None else num_forced,
        legal_mass=_share("legal_mass", structured.get("legal_mass")),
    )


def _object(name: str, value: Json) -> dict[str, Json]:
    if not isinstance(value, dict | None):
        raise ValueError(f"{name} is {_shown(value)}, no object")
    return value or {}


def _text(content: Json) -> str:
    if not isinstance(content, str | None):
        raise ValueError(f"content is {_shown(content)}, no text")
    # half of a surrogate pair has no UTF-8; it becomes what a model's broken bytes become as well
    return (content or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(name: str, value: Json) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"{name} is {_shown(value)}, no number of tokens")
    return value


def _share(name: str, value: Json) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= HIGHEST_SHARE:
        raise ValueError(f"{name} is {_shown(value)}, no probability")
    return float(value)


def _shown(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
