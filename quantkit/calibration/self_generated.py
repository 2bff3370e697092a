"""Conversations in the model's own words: it answers seed prompts on the built-in engine, and what it said calibrates.

The answers are drawn from the distribution that a checkpoint is compared with afterwards, in the chat format that the
deployed model will see. Each answer depends on the seed and its own number only.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.calibration.sources import BUILTIN, BUILTIN_CHAT, Conversation, read_jsonl
from quantkit.errors import CalibrationError
from quantkit.recipe import SelfGeneratedSource
from quantkit.source import ModelSource
from quantkit.source.gguf import cache_folder

Progress = Callable[[str, int, int], None]
MAX_NUM_SEQS = 64


def generate_conversations(
    source: SelfGeneratedSource, model: ModelSource, num_tokens: int, seed: int, progress: Progress
) -> list[Conversation]:
    """Answer the seed prompts, round after round, until prompts and answers have ``num_tokens`` tokens in all.

    What was generated is kept in the cache folder, by model, prompts and settings, and read from there the next time.

    Args:
        source: the recipe's source.
        model: who answers; it is loaded as a whole.
        num_tokens: tokens that are needed, counted as the chat template renders them.
        seed: of the sampling.
        progress: is called with ("self-generate", tokens so far, num_tokens).

    Returns:
        Conversations that end with the model's answer; the same for the same arguments on the same machine.

    Raises:
        CalibrationError: no prompts, or a model without chat template.
    """
    prompts = read_prompts(source, model)
    path = _cache_path(source, model, prompts, num_tokens, seed)
    if path.exists():
        with path.open(
            encoding="utf-8", newline="\n"
        ) as lines:  # an answer may hold what Unicode counts as an end of line
            return [json.loads(line)["messages"] for line in lines]
    conversations = _answer_in_rounds(source, model, prompts, num_tokens, seed, progress)
    _write_cache(path, conversations)
    return conversations


def read_prompts(source: SelfGeneratedSource, model: ModelSource) -> list[Conversation]:
    """The seed conversations, without the answers that they end with.

    Raises:
        CalibrationError: no prompts, or a model without chat template.
    """
    if not model.tokenizer().chat_template:
        raise CalibrationError(
            f"{model.name} has no chat template, so it cannot answer seed prompts", fix="Calibrate with text"
        )
    path = BUILTIN_CHAT if source.seed_prompts == BUILTIN else Path(source.seed_prompts)
    prompts = []
    for document in read_jsonl(path):
        if isinstance(document, str):
            document = [{"role": "user", "content": document}]
        while document and document[-1]["role"] == "assistant":
            document = document[:-1]
        if document:
            prompts.append(document)
    if not prompts:
        raise CalibrationError(f"seed prompts {path.name} hold no user's turn", fix="Give some, or drop the source")
    return prompts


def _answer_in_rounds(
    source: SelfGeneratedSource,
    model: ModelSource,
    prompts: Sequence[Conversation],
    num_tokens: int,
    seed: int,
    progress: Progress,
) -> list[Conversation]:
    from quantkit.serve.chat import ChatTemplate  # the engine is heavy, and most recipes calibrate without it
    from quantkit.serve.config import EngineConfig
    from quantkit.serve.engine import Engine
    from quantkit.serve.request import SamplingParams

    template = ChatTemplate(model.tokenizer(), model.name)
    rendered = [template.render(prompt) for prompt in prompts]
    max_model_len = max(map(len, rendered)) + source.max_answer_tokens
    engine = Engine(model, EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_model_len=max_model_len))
    conversations: list[Conversation] = []
    total = number = 0
    while total < num_tokens:
        for start in range(0, len(prompts), MAX_NUM_SEQS):
            part = range(start, min(start + MAX_NUM_SEQS, len(prompts)))
            params = [
                SamplingParams(
                    temperature=source.temperature,
                    max_tokens=source.max_answer_tokens,
                    seed=_mix(seed, number + offset),
                )
                for offset in range(len(part))
            ]
            number += len(part)
            for i, completion in zip(part, engine.generate([rendered[i] for i in part], params), strict=True):
                total += len(completion.prompt_token_ids) + len(completion.token_ids)
                conversations.append([*prompts[i], {"role": "assistant", "content": completion.text}])
            progress("self-generate", min(total, num_tokens), num_tokens)
            if total >= num_tokens:
                break
        if source.temperature == 0:
            break  # greedy answers repeat themselves; more rounds add nothing
    return conversations


def _mix(seed: int, number: int) -> int:
    """A seed for one answer."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _cache_path(
    source: SelfGeneratedSource, model: ModelSource, prompts: Sequence[Conversation], num_tokens: int, seed: int
) -> Path:
    identity: dict[str, Any] = {
        "quantkit": __version__,
        "model": model.fingerprint(),
        "prompts": prompts,
        "settings": source.model_dump(exclude={"share", "seed_prompts", "count"}),
        "num_tokens": num_tokens,
        "seed": seed,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "self_generated" / f"{digest[:32]}.jsonl"


def _write_cache(path: Path, conversations: Sequence[Conversation]) -> None:
    text = "".join(json.dumps({"messages": turns}, ensure_ascii=False) + "\n" for turns in conversations)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise CalibrationError(
            f"cannot write the cache {path.parent}: {error.strerror}", fix="Set QUANTKIT_CACHE"
        ) from error
