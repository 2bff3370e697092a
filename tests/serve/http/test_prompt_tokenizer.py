import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quantkit.errors import UsageError
from quantkit.serve.http.prompt_tokenizer import LONG_TEXT, PromptTokenizer, least_tokens

VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama_folder)


@pytest.mark.parametrize("text", ["", "a", "the " * 100, "Größe 🙂\n" * 30, "<|im_end|>" * 20, " " * 50])
def test_the_least_is_never_more_than_there_are(tokenizer: Any, text: str) -> None:
    count = least_tokens(tokenizer, VOCAB_SIZE)
    assert count(text) <= len(tokenizer(text, add_special_tokens=False).input_ids)
    assert count("x" * 10_000) >= 500


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(tokenizer: Any) -> None:
    prompts = PromptTokenizer(tokenizer, VOCAB_SIZE, 1000)
    with pytest.raises(
        UsageError, match=r"the prompt of 3000000 characters has at least \d+ tokens, more than max_mod"
    ):
        asyncio.run(prompts.require_room("a" * 3_000_000))
    asyncio.run(PromptTokenizer(tokenizer, VOCAB_SIZE, 10**7).require_room("a" * 3_000_000))
    prompts.close()


def test_a_long_text_does_not_hold_up_a_short_one(tokenizer: Any) -> None:
    prompts = PromptTokenizer(tokenizer, VOCAB_SIZE, 1000)
    gate = threading.Event()

    async def both() -> tuple[bool, bool]:
        long = asyncio.create_task(prompts.run(lambda one: gate.wait(20) and one is not tokenizer, LONG_TEXT + 1))
        short = await prompts.run(lambda one: one is tokenizer, 5)
        gate.set()
        return short, await long

    assert asyncio.run(both()) == (True, True)
    prompts.close()
