"""A tokenizer.json as GGUF's vocabulary: byte-level BPE, and SentencePiece's BPE with byte fallback and Unigram."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerBase

from quantkit.errors import UsageError
from quantkit.export_gguf.pretokenizer import identify_pretokenizer, recognized
from quantkit.export_gguf.sentencepiece_model import read_scores
from quantkit.export_gguf.unigram import Normalization, read_normalization, unigram_scores
from quantkit.source.folder import read_json

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
NAMED = "the pre-tokenizer was named"  # how a note begins
_NEVER_MERGED = -1e6  # score of pieces that no merge makes
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the file says about tokens.

    Attributes:
        model: ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece's BPE) or ``t5`` (its Unigram).
        pretokenizer: llama.cpp's name.
        tokens: by id.
        types: by id.
        scores: by id, for SentencePiece.
        merges: pairs, for byte-level BPE.
        notes: what is left out or filled up, a line each.
        normalization: of text, for Unigram.
        spells_bytes: whether a Unigram spells characters in bytes that are no piece, which llama.cpp cannot.
    """

    model: str
    pretokenizer: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    notes: list[str]
    normalization: Normalization = field(default_factory=Normalization)
    spells_bytes: bool = False


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    embedding_rows: int,
    pretokenizer: str | None = None,
    *,
    has_own_files: bool = True,
) -> Vocabulary:
    """The vocabulary of a tokenizer, filled up to the rows of the embedding.

    Args:
        tokenizer: of the model.
        folder: of the model.
        embedding_rows: as many tokens the file must have.
        pretokenizer: llama.cpp's name, if it is not to be told from the rules.
        has_own_files: the folder's tokenizer files are the model's; not those that transformers made of a .gguf, which
            add tokens.

    Raises:
        UsageError: a kind of tokenizer that is not supported, an unknown pre-tokenizer, or more tokens than rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError("the tokenizer has no tokenizer.json", fix="Convert it with transformers first")
    document = json.loads(backend.to_str())
    model = document["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise UsageError(
            f"a {model['type']} tokenizer cannot be written as GGUF yet", fix="BPE and Unigram tokenizers can"
        )
    added = {entry["content"]: entry for entry in document["added_tokens"]}
    pieces = _pieces(model) | {content: entry["id"] for content, entry in added.items()}
    pieces, notes = _with_rows(pieces, folder if has_own_files else None, embedding_rows)
    tokens = [f"[PAD{index}]" for index in range(embedding_rows)]
    types = [int(TokenType.UNUSED)] * embedding_rows
    sentencepiece = model["type"] == "Unigram" or bool(model.get("byte_fallback"))
    for token, index in pieces.items():
        tokens[index], types[index] = token, _token_type(token, added.get(token), model, sentencepiece)
    padding = embedding_rows - len(set(pieces.values()))
    if padding:
        notes.append(f"{padding} rows of the embedding have no token: the file calls them [PAD...]")
    if model["type"] == "Unigram":
        return _unigram(document, tokens, types, notes)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if sentencepiece:
        scores = _stored_scores(tokens, folder) or _scores(tokens, merges)
        return Vocabulary("llama", pretokenizer or "default", tokens, types, scores, None, notes)
    name = pretokenizer or identify_pretokenizer(document.get("pre_tokenizer"))
    known = recognized(document.get("pre_tokenizer"))
    if has_own_files and known not in (None, name):
        notes.append(f"{NAMED} {name}, but the tokenizer cuts text as llama.cpp's {known}")
    return Vocabulary("gpt2", name, tokens, types, None, merges, notes)


def _pieces(model: dict[str, Any]) -> dict[str, int]:
    """Piece -> id."""
    if model["type"] == "Unigram":
        return {piece: index for index, (piece, _) in enumerate(model["vocab"])}
    return dict(model["vocab"])


def _unigram(document: dict[str, Any], tokens: list[str], types: list[int], notes: list[str]) -> Vocabulary:
    model = document["model"]
    spells_bytes = bool(model.get("byte_fallback"))
    if spells_bytes:
        notes = [*notes, "llama.cpp makes one unknown token of characters that this Unigram tokenizer spells in bytes"]
    scores = unigram_scores(model, tokens)
    return Vocabulary("t5", "default", tokens, types, scores, None, notes, read_normalization(document), spells_bytes)


def _stored_scores(tokens: list[str], folder: Path) -> list[float] | None:
    """What the SentencePiece model in the folder merges by; None if there is none, or it is of other tokens."""
    stored = read_scores(folder)
    if stored is None or not stored.keys() <= set(tokens):
        return None
    return [stored.get(token, _NEVER_MERGED) for token in tokens]


def _with_rows(pieces: dict[str, int], folder: Path | None, rows: int) -> tuple[dict[str, int], list[str]]:
    """The tokens that the embedding has, and a note on those that only transformers' class has added.

    Raises:
        UsageError: a token of the model's own files has no row.
    """
    beyond = sorted(token for token, index in pieces.items() if index >= rows)
    if not beyond:
        return pieces, []
    stored = None
    if folder is not None:
        stored = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else {}
    if stored is not None and (not stored or _own_tokens(stored) & set(beyond)):
        raise UsageError(
            f"the tokenizer has ids up to {max(pieces.values())} and the embedding {rows} rows",
            fix="Model and tokenizer do not belong together",
        )
    kept = {token: index for token, index in pieces.items() if index < rows}
    return kept, [f"tokens without a row in the embedding are left out: {', '.join(beyond)}"]


def _own_tokens(document: dict[str, Any]) -> set[str]:
    added = {entry["content"] for entry in document.get("added_tokens", ())}
    return added | set(document.get("model", {}).get("vocab", ()))


def _token_type(token: str, added: dict[str, Any] | None, model: dict[str, Any], sentencepiece: bool) -> int:
    unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    if sentencepiece and token == unknown:
        return int(TokenType.UNKNOWN)
    if added is not None:
        return int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    return int(TokenType.BYTE if sentencepiece and _BYTE.fullmatch(token) else TokenType.NORMAL)


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """What llama.cpp merges by: earlier merges score higher, as the pieces did in SentencePiece."""
    rank: dict[str, int] = {}
    for number, pair in enumerate(merges):
        rank.setdefault(pair.replace(" ", "", 1), number)
    return [-float(rank[token]) if token in rank else _NEVER_MERGED for token in tokens]


def add_tokenizer(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, eos_ids: list[int]
) -> None:
    """Write vocabulary, special tokens and chat template.

    Args:
        writer: of the file.
        tokenizer: of the model.
        vocabulary: its tokens.
        eos_ids: every token that ends a generation; the first that is no end of a turn is the end of the text.
    """
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pretokenizer)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.model == "t5":
        writer.add_remove_extra_whitespaces(vocabulary.normalization.remove_extra_whitespaces)
        if vocabulary.normalization.charsmap:
            writer.add_precompiled_charsmap(vocabulary.normalization.charsmap)
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(eos_ids), None)
    special = (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, eos),
        (writer.add_eot_token_id, _end_of_turn(vocabulary.tokens, eos_ids, eos)),
        (writer.add_unk_token_id, _unknown(tokenizer, vocabulary)),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    )
    for add, token_id in special:
        if token_id is not None and token_id < len(vocabulary.tokens):
            add(int(token_id))
    around = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    writer.add_add_bos_token(around[:1] != bare[:1] and around[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(around[-1:] != bare[-1:] and around[-1] == tokenizer.eos_token_id)
    if vocabulary.model in ("llama", "t5"):
        pieces = tokenizer.convert_ids_to_tokens(bare)
        writer.add_add_space_prefix(bool(pieces) and pieces[0].startswith("▁"))
    if tokenizer.chat_template:
        _add_chat_template(writer, tokenizer.chat_template)


def _unknown(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary) -> int | None:
    """The token for what has none, also where only the tokenizer's model names it."""
    if int(TokenType.UNKNOWN) in vocabulary.types:
        return vocabulary.types.index(int(TokenType.UNKNOWN))
    return None if tokenizer.unk_token_id is None else int(tokenizer.unk_token_id)


def _end_of_turn(tokens: list[str], eos_ids: list[int], eos: int | None) -> int | None:
    """The token that ends a turn of a chat, if it is another one than the end of the text."""
    others = [token for token in eos_ids if token != eos and token < len(tokens)]
    named = [token for token in others if tokens[token] in _TURN_ENDS]
    return next(iter(named or others), None)


def _add_chat_template(writer: GGUFWriter, template: str | dict[str, str]) -> None:
    if isinstance(template, str):
        writer.add_chat_template(template)
        return
    writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
