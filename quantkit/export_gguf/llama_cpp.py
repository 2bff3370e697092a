"""llama.cpp itself as a reader, where llama-cpp-python is installed: its token ids, logits and greedy text."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantkit.extras import install_command

SCRIPTS = (
    "Hello, world! It's 12345.67 degrees; they've gone (really?).",
    "Größe, naïve, Dvořák, Łódź, İstanbul",
    "Здравствуй, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم",  # noqa: RUF001
    "東京は日本の首都です。 你好，世界。 안녕하세요 세계",  # noqa: RUF001
    "नमस्ते दुनिया สวัสดีชาวโลก გამარჯობა",
    "🙂👩‍👩‍👧‍👦🇺🇳 and a flag",
    "  two  spaces\n\n\tand a tab\r\n    indented = [1, 2]\n",
)


def why_missing() -> str | None:
    """Why llama.cpp cannot be asked here; None if it can."""
    try:
        import_module("llama_cpp")
    except ImportError:
        return f"llama-cpp-python is not installed: {install_command('interop')}"
    except (OSError, RuntimeError) as error:  # its shared library is missing or not for this machine
        return f"llama-cpp-python cannot be loaded: {error}"
    return None


def version() -> str:
    """Of llama-cpp-python."""
    return str(import_module("llama_cpp").__version__)


def load(path: Path, num_tokens: int = 256, *, all_logits: bool = False) -> Any:
    """A file, or the first of its parts, in llama.cpp.

    Args:
        path: of the file.
        num_tokens: that it can hold.
        all_logits: keep those of every position; see :func:`logits`.

    Raises:
        ValueError: llama.cpp does not load it.
    """
    engine: Any = import_module("llama_cpp").Llama
    return engine(str(path), n_ctx=num_tokens, logits_all=all_logits, verbose=False)


def differing_texts(engine: Any, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[str]:
    """The texts, control tokens among them, of which llama.cpp makes other ids than transformers.

    Args:
        engine: of :func:`load`.
        tokenizer: of the model.
        num_tokens: of the file; control tokens beyond have no row in it.
    """
    control = [
        token
        for token, index in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        if token != tokenizer.unk_token and index < num_tokens
    ]
    return [
        text
        for text in (*SCRIPTS, "".join(f"{token}a b" for token in control))
        if engine.tokenize(text.encode(), add_bos=False, special=True)
        != tokenizer(text, add_special_tokens=False)["input_ids"]
    ]


def write_greedily(engine: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that follow a prompt."""
    written: list[int] = []
    for token in engine.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
        written.append(token)
        if len(written) == num_tokens:
            break
    return written


def logits(engine: Any, ids: Sequence[int]) -> Tensor:
    """[T, V] float32 for T ids; the engine keeps all logits."""
    engine.reset()
    engine.eval(list(ids))
    return torch.from_numpy(engine.scores[: len(ids)].copy())
