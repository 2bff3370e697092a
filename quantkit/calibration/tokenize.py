"""Documents to tokens: special tokens come from the tokenizer and the chat template, never from a document's text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from quantkit.calibration.sources import Conversation, Document
from quantkit.errors import CalibrationError

_STAND_IN = "\ue000"  # private use: stands for a special token's spelling while the template renders


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """Tokens of one document.

    Attributes:
        token_ids: in order.
        counted: whether each token counts in the statistics.
    """

    token_ids: Sequence[int]
    counted: Sequence[bool]


class DocumentTokenizer:
    """Tokenizes texts and conversations as the deployed model sees them.

    Args:
        tokenizer: the model's; conversations need its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        named = {str(token) for token in tokenizer.all_special_tokens}
        # A tokenizer may read tokens as special that its configuration gives no name: those of a chat template.
        named |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        spellings = sorted(named - {""}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be tokenized."""
        return bool(self._tokenizer.chat_template)

    def tokenize(self, document: Document, label: str, *, assistant_only: bool = False) -> TokenizedDocument:
        """Tokens of a document; none if it is blank.

        Args:
            document: a text, which gets the special tokens that the tokenizer puts around a text, or a conversation,
                which gets those of the chat template and no others.
            label: the source, for errors.
            assistant_only: count the assistant's answers only; all of a text counts.

        Raises:
            CalibrationError: a conversation for a tokenizer without template, one that the template refuses, or a
                template that cannot tell the assistant's tokens.
        """
        if isinstance(document, str):
            ids = self._encode(document, literal=True, around=True) if document.strip() else []
            return TokenizedDocument(ids, [True] * len(ids))
        if not self.has_chat_template:
            raise CalibrationError(
                f"calibration source {label} has messages and the model's tokenizer has no chat template",
                fix="Give plain text, or a model with a template",
            )
        if not assistant_only:
            ids = self._encode_rendered(*self._render(document, label))
            return TokenizedDocument(ids, [True] * len(ids))
        return self._assistant_tokens(document, label)

    def _assistant_tokens(self, conversation: Conversation, label: str) -> TokenizedDocument:
        """The rendered conversation, cut before and behind each of the assistant's turns."""
        ids: list[int] = []
        counted: list[bool] = []
        done, done_spellings = "", 0
        for i, turn in enumerate(conversation):
            if turn["role"] != "assistant":
                continue
            asked, asked_spellings = self._render(conversation[:i], label, add_generation_prompt=True)
            answered, answered_spellings = self._render(conversation[: i + 1], label)
            if not (answered.startswith(asked) and asked.startswith(done)):
                raise CalibrationError(
                    f"calibration source {label}: the chat template renders the beginning of a conversation in "
                    "different ways, so the assistant's tokens cannot be told apart",
                    fix="Use count: all",
                )
            for piece, spellings, counts in (
                (asked[len(done) :], asked_spellings[done_spellings:], False),
                (answered[len(asked) :], answered_spellings[len(asked_spellings) :], True),
            ):
                new = self._encode_rendered(piece, spellings)
                ids += new
                counted += [counts] * len(new)
            done, done_spellings = answered, len(answered_spellings)
        return TokenizedDocument(ids, counted)

    def _render(
        self, conversation: Conversation, label: str, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[str]]:
        """The template's text with a stand-in for every special token that a turn spells out, and these spellings."""
        spellings: list[str] = []

        def stand_in(match: re.Match[str]) -> str:
            spellings.append(match.group())
            return _STAND_IN

        turns = [turn | {"content": self._special.sub(stand_in, turn["content"])} for turn in conversation]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is code of the model: it may raise anything
            raise CalibrationError(
                f"calibration source {label}: the chat template refuses a conversation: {error}"
            ) from error
        return str(text), spellings

    def _encode_rendered(self, text: str, spellings: Sequence[str]) -> list[int]:
        """Tokens of a template's text: special tokens are read, those that stood in a turn are spelled."""
        pieces = text.split(_STAND_IN) if spellings else [text]
        if len(pieces) != len(spellings) + 1:  # the template dropped or repeated a turn: spell what it shows
            return self._encode(text.replace(_STAND_IN, ""), literal=False)
        ids = self._encode(pieces[0], literal=False)
        for spelling, piece in zip(spellings, pieces[1:], strict=True):
            ids += self._encode(spelling, literal=True) + self._encode(piece, literal=False)
        return ids

    def _encode(self, text: str, *, literal: bool, around: bool = False) -> list[int]:
        if not text:
            return []
        encoded = self._tokenizer(text, add_special_tokens=around, split_special_tokens=literal, verbose=False)
        return list(encoded["input_ids"])
