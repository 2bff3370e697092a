"""A model's chat template: messages to the token ids of a prompt."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantkit.errors import EngineError, UsageError

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": text}


def require_text(text: str, what: str) -> None:
    """Refuse a text with half a character: bytes of the command line that were no UTF-8 arrive so.

    Raises:
        UsageError: it cannot be written in UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not UTF-8 text (character {error.start})") from error


class ChatTemplate:
    """Renders chats as the model was trained to read them.

    Args:
        tokenizer: of the model, with its template.
        model_name: for errors.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name

    @property
    def is_defined(self) -> bool:
        """True if the model has a template."""
        return bool(self._tokenizer.chat_template)

    @property
    def text(self) -> str:
        """The template itself; empty if there is none."""
        return str(self._tokenizer.get_chat_template()) if self.is_defined else ""

    @property
    def sha256(self) -> str:
        """Hash of the template's text, in hex; of the empty text if there is none."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn.

        Args:
            messages: the chat.
            tools: functions that the assistant may call, as the template wants them.

        Raises:
            EngineError: the model has no template.
            UsageError: the template refuses these messages.
        """
        return [int(token_id) for token_id in self._apply(messages, tools, tokenize=True)]

    def render_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text whose tokens `render` gives; arguments and errors are the same."""
        return str(self._apply(messages, tools, tokenize=False))

    def _apply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, tokenize: bool) -> Any:
        if not self.is_defined:
            raise EngineError(
                f"{self._model_name} has no chat template", fix="use plain prompts, or add chat_template.jinja to it"
            )
        if not messages:
            raise UsageError("a chat needs at least one message")
        for text in (text for message in messages for text in message.values()):
            if isinstance(text, str):
                require_text(text, "a message")
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=tokenize,
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:
            # A template is code that came with the model; whatever it raises, it refuses these messages.
            raise UsageError(f"the chat template of {self._model_name} refuses the messages: {error}") from error
