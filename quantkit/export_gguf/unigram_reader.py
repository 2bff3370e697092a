"""A Unigram tokenizer of a GGUF file as transformers has it, whose own reader of GGUF knows none."""

from collections.abc import Mapping
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quantkit.errors import SourceError
from quantkit.export_gguf.unigram import NOT_IN_MODEL

_PREFIX = "tokenizer.ggml."
_NUM_BYTES = 256


def read_unigram(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer by the file's metadata.

    Args:
        metadata: of a file whose ``tokenizer.ggml.model`` is ``t5``.

    Raises:
        SourceError: tokens, scores and types do not belong together.
    """
    tokens, scores, types = (list(metadata.get(_PREFIX + key, ())) for key in ("tokens", "scores", "token_type"))
    if not tokens or not len(tokens) == len(scores) == len(types):
        raise SourceError(f"a Unigram of {len(tokens)} tokens, {len(scores)} scores and {len(types)} types is broken")
    unknown = _index(metadata, "unknown_token_id")
    spells_bytes = types.count(int(TokenType.BYTE)) == _NUM_BYTES
    in_model = 1 + max((number for number, score in enumerate(scores) if score != NOT_IN_MODEL), default=-1)
    vocabulary = list(zip(tokens[:in_model], scores[:in_model], strict=True))
    backend = Tokenizer(models.Unigram(vocabulary, unknown, spells_bytes))
    _add_rules(backend, metadata)
    used = [number for number, kind in enumerate(types) if kind != TokenType.UNUSED]
    # one that is not the model's must follow those before it, also if these are no real tokens
    special = (int(TokenType.CONTROL), int(TokenType.UNKNOWN), int(TokenType.USER_DEFINED))
    for number in range(used[-1] + 1 if used else 0):
        if number >= in_model or types[number] in special:
            is_control = types[number] != TokenType.USER_DEFINED
            backend.add_tokens([AddedToken(tokens[number], special=is_control, normalized=False)])
    if any(backend.token_to_id(tokens[number]) != number for number in used):
        raise SourceError("the tokens of the Unigram are not those of their places", fix="Use the original model")
    named = {
        f"{name}_token": tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := _index(metadata, f"{key}_token_id")) is not None
    }
    _add_ends(backend, metadata, named)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _index(metadata: Mapping[str, Any], key: str) -> int | None:
    value = metadata.get(_PREFIX + key)
    return None if value is None else int(value)


def _add_rules(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """How text is normalized and cut, and put together again."""
    steps: list[Any] = []
    charsmap = metadata.get(_PREFIX + "precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(bytes(bytearray(charsmap))))
    if metadata.get(_PREFIX + "remove_extra_whitespaces"):
        steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if metadata.get(_PREFIX + "add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)


def _add_ends(backend: Tokenizer, metadata: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Begin and end of a text, where the file asks for them."""
    ends = [
        named.get(f"{name}_token") if metadata.get(f"{_PREFIX}add_{name}_token") else None for name in ("bos", "eos")
    ]
    begin, end = ends
    if begin is None and end is None:
        return
    single = [*filter(None, (begin,)), "$A", *filter(None, (end,))]
    pair = [*single, *(f"{piece}:1" for piece in single)]
    used = [(token, backend.token_to_id(token)) for token in dict.fromkeys(filter(None, ends))]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
