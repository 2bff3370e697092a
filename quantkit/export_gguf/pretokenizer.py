r"""Which of llama.cpp's pre-tokenizers cuts text as a tokenizer.json does, told from its rules.

llama.cpp knows the ways to cut text before byte pairs are merged by name. Its own converter looks the name up by a hash
of what a tokenizer makes of a test text, so one added token makes a known tokenizer unknown; its rules stay the same.

Source: llama_vocab::impl::load in llama.cpp's llama-vocab.cpp, which refuses a file that gives any other name.
"""

import difflib
from typing import Any

from quantkit.errors import UsageError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
BYTE_LEVEL = "byte level"  # GPT-2's own expression
DIGITS = "digits"  # each digit alone

NAMES: dict[tuple[str, ...], str] = {
    (BYTE_LEVEL,): "gpt-2",
    (DIGITS, BYTE_LEVEL): "smollm",
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",): "llama-bpe",
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",): "qwen2",
    (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_SLASH}",): "tekken",
    (rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_SLASH}",): "gpt-4o",
}

_LLAMA_CPP = """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx
    deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon
    falcon-h1 falcon3 gemma4 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m
    granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code
    jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3
    llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral
    poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2
    starcoder superbpe talkie tekken tiny_aya trillion ufakzeka viking whitespace youtu
    """
LLAMA_CPP_NAMES = frozenset(_LLAMA_CPP.split())


def check_pretokenizer(name: str) -> str:
    """The name itself.

    Raises:
        UsageError: llama.cpp has no pre-tokenizer of this name.
    """
    if name not in LLAMA_CPP_NAMES:
        near = difflib.get_close_matches(name.lower(), sorted(LLAMA_CPP_NAMES), n=3, cutoff=0.4)
        fix = f"The nearest are {', '.join(near)}" if near else f"Among those it has: {', '.join(NAMES.values())}"
        raise UsageError(f"llama.cpp has no pre-tokenizer {name!r} and would not load the file", fix=fix)
    return name


def recognized(rules: dict[str, Any] | None) -> str | None:
    """llama.cpp's name of the pre-tokenizer of a tokenizer.json; None if none that is known cuts like this."""
    return NAMES.get(tuple(_steps(rules)))


def identify_pretokenizer(rules: dict[str, Any] | None) -> str:
    """llama.cpp's name of the pre-tokenizer of a tokenizer.json.

    Args:
        rules: its ``pre_tokenizer``.

    Raises:
        UsageError: none of those that are known cuts like this.
    """
    name = recognized(rules)
    if name is None:
        raise UsageError(
            "the tokenizer cuts text in a way that is none of llama.cpp's known pre-tokenizers",
            fix=f"Name the one that does the same with --pretokenizer ({', '.join(NAMES.values())}, ...)",
        )
    return name


def _steps(rules: dict[str, Any] | None) -> list[str]:
    """What the rules do, a string a step; unknown ones as they are written."""
    if rules is None:
        return []
    kind = rules["type"]
    if kind == "Sequence":
        return [step for inner in rules["pretokenizers"] for step in _steps(inner)]
    if kind == "ByteLevel":
        return [BYTE_LEVEL] if rules.get("use_regex", True) else []
    if kind == "Digits" and rules.get("individual_digits"):
        return [DIGITS]
    if kind == "Split" and rules.get("behavior") == "Isolated" and not rules.get("invert"):
        return [str(rules["pattern"].get("Regex", rules["pattern"]))]
    return [repr(rules)]
