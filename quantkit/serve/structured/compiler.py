"""Makes a grammar over tokens of a form that was asked for: in threads of its own, cached, and within limits."""

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as CompileTimeout
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from quantkit.errors import UsageError
from quantkit.extras import install_command
from quantkit.serve.structured.matcher import FormError, Matcher
from quantkit.serve.structured.schema_check import GRAMMAR_OPTIONS, name_unenforced, nesting_depth, require_schema
from quantkit.serve.structured.spec import StructuredOutput
from quantkit.serve.structured.token_bytes import special_token_ids, token_bytes

NUM_THREADS = 2
GBNF_RULE = "::="
NO_TOKEN = "NoExtension"  # how llguidance says that no token may come next


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What a form may cost.

    Attributes:
        max_bytes: of its text.
        max_depth: of objects and arrays of a schema, or brackets of a pattern, in one another.
        max_seconds: to compile it.
        max_whitespace: characters of whitespace between two parts of a JSON document.
        max_cached: forms that are kept compiled.
    """

    max_bytes: int = 131_072
    max_depth: int = 64
    max_seconds: float = 10.0
    max_whitespace: int = 8
    max_cached: int = 128


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A form, ready to be followed.

    Attributes:
        spec: what was asked.
        unenforced: what of it the grammar does not enforce: JSON pointers to keywords of a schema.
    """

    spec: StructuredOutput
    unenforced: tuple[str, ...]
    _state: Any
    _tokenizer: Any
    _end_token_ids: tuple[int, ...]

    def start(self) -> Matcher:
        """At the beginning of an answer."""
        return Matcher(self._state.deep_copy(), self._end_token_ids)

    def matches(self, text: str) -> bool:
        """True if a whole text, in which no special token counts, has the form."""
        return self.accepts(self._tokenizer.tokenize_str(text))

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """True if the tokens of a whole answer, without one of the end, have the form."""
        state = self._state.deep_copy()
        token_ids = list(token_ids)
        return bool(state.try_consume_tokens(token_ids) == len(token_ids) and state.is_accepting())


class GrammarCompiler:
    """Compiles forms for one model; any thread may call it.

    Args:
        tokenizer: of the model.
        vocab_size: of the model's logits.
        limits: of each form.
        end_token_ids: tokens that may follow a complete answer; None is the tokenizer's own end of text.

    Raises:
        UsageError: llguidance is not installed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        limits: GrammarLimits | None = None,
        *,
        end_token_ids: Collection[int] | None = None,
    ) -> None:
        self.limits = limits if limits is not None else GrammarLimits()
        self._guidance = _import_llguidance()
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        own_end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._end_token_ids = sorted(own_end if end_token_ids is None else end_token_ids)
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutput, Future[CompiledGrammar]] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """The grammar of a form, from the cache if it is known; waits for at most ``limits.max_seconds``.

        Raises:
            UsageError: it is wrong, asks for what grammars cannot do, or exceeds a limit, which is named.
        """
        self._require_size(spec)
        self.prepare()
        with self._cache_lock:
            future = self._cache.get(spec)
            if future is None:
                future = self._cache[spec] = self._threads.submit(self._compile, spec)
            self._cache.move_to_end(spec)
            while len(self._cache) > self.limits.max_cached:
                self._cache.popitem(last=False)
        try:
            return future.result(self.limits.max_seconds)
        except UsageError:
            raise
        except Exception as error:
            # The compiler is third-party code; whatever it raises concerns this form alone.
            if not (isinstance(error, CompileTimeout) and not future.done()):
                raise _refused(spec, f"{type(error).__name__}: {error}") from error
            raise UsageError(
                f"{spec.kind} takes longer to compile than max_seconds={self.limits.max_seconds:g}",
                fix="make it simpler",
            ) from error

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary, which takes a second or two, if that has not been done.

        Raises:
            UsageError: grammars cannot be made for such a tokenizer.
        """
        with self._tokenizer_lock:
            if self._tokenizer is None:
                vocabulary = _Vocabulary(self._hf_tokenizer, self._vocab_size, self._end_token_ids)
                wrapper = self._guidance.TokenizerWrapper(vocabulary)
                self._tokenizer = self._guidance.LLTokenizer(wrapper, eos_token=self._end_token_ids)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _require_size(self, spec: StructuredOutput) -> None:
        size = sum(len(part.encode()) for part in ([spec.value] if isinstance(spec.value, str) else spec.value))
        if size > self.limits.max_bytes:
            raise UsageError(f"{spec.kind} of {size} bytes is larger than max_bytes={self.limits.max_bytes}")
        depth = nesting_depth(spec.schema) if spec.kind == "json_schema" else _bracket_depth("".join(spec.value))
        if spec.kind != "choice" and depth > self.limits.max_depth:
            raise UsageError(f"{spec.kind} is nested {depth} deep, more than max_depth={self.limits.max_depth}")

    def _compile(self, spec: StructuredOutput) -> CompiledGrammar:
        grammar = self._grammar(spec)
        matcher = self._guidance.LLMatcher
        is_wrong, messages = matcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if is_wrong:
            raise _refused(spec, messages[0])
        state = matcher(self._tokenizer, grammar, log_level=0)
        if state.is_error():
            raise _refused(spec, state.get_error())
        _require_a_token(spec, Matcher(state.deep_copy(), self._end_token_ids), self._vocab_size)
        unenforced = name_unenforced(spec.schema, messages) if spec.kind == "json_schema" else tuple(messages)
        return CompiledGrammar(spec, unenforced, state, self._tokenizer, tuple(self._end_token_ids))

    def _grammar(self, spec: StructuredOutput) -> str:
        """The form in llguidance's own words."""
        matcher = self._guidance.LLMatcher
        if spec.kind == "json_schema":
            return self._json_grammar(spec.schema)
        if spec.kind == "choice":
            alternatives = " | ".join(_literal(text) for text in spec.value)
            # One terminal: a rule of so many would have an item of the parser for each text, and those are limited.
            return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}"))
        text = str(spec.value)
        if spec.kind == "regex":
            return str(matcher.grammar_from_regex(_without_anchors(text)))
        if GBNF_RULE in text:
            try:
                text = self._guidance.gbnf_to_lark.any_to_lark(text)
            except Exception as error:  # its parser raises whatever it stumbles over
                raise _refused(spec, str(error)) from error
        return str(matcher.grammar_from_lark(text))

    def _json_grammar(self, schema: Any) -> str:
        require_schema(schema)
        if schema is False:
            raise UsageError("json_schema=false allows nothing")
        plain = {} if schema is True else {key: value for key, value in schema.items() if key != GRAMMAR_OPTIONS}
        whitespace = rf"[\x20\x0A\x0D\x09]{{1,{self.limits.max_whitespace}}}" if self.limits.max_whitespace else None
        options = {"whitespace_flexible": whitespace is not None, "whitespace_pattern": whitespace, "lenient": True}
        return str(self._guidance.LLMatcher.grammar_from_json_schema(json.dumps(plain), overrides=options))


class _Vocabulary:
    """The tokenizer as llguidance asks for it: special tokens have a name alone, and no text becomes one of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: list[int]) -> None:
        self.tokens = token_bytes(tokenizer, vocab_size)
        special = special_token_ids(tokenizer) | set(end_token_ids)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = str(tokenizer.convert_ids_to_tokens(token_id)).encode()  # a grammar may name it
        self.eos_token_id = end_token_ids[0] if end_token_ids else None
        self.bos_token_id = None
        self._backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.encode_special_tokens = True  # "<|im_end|>" in a schema is ten characters, not an end
        self._backend.no_padding()
        self._backend.no_truncation()

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text.decode() if isinstance(text, bytes) else text
        return list(self._backend.encode(decoded, add_special_tokens=False).ids)


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError("structured output needs the package llguidance", fix=install_command("serve")) from error
    return llguidance


def _refused(spec: StructuredOutput, reason: str) -> UsageError:
    return UsageError(f"{spec.kind} cannot be compiled: {' '.join(reason.split())[:300]}")


def _require_a_token(spec: StructuredOutput, matcher: Matcher, vocab_size: int) -> None:
    """Refuse a form that no token begins: it never ends, or what it asks for does not exist."""
    row = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
    try:
        matcher.fill(row)
    except FormError as error:
        if NO_TOKEN in str(error):
            raise UsageError(f"{spec.kind} allows nothing: no text has this form") from error
        raise _refused(spec, str(error)) from error
    if not bool(row.any()):
        raise UsageError(f"{spec.kind} allows nothing: no text has this form")


def _literal(text: str) -> str:
    """A text in quotes; control characters beyond ASCII's, which a grammar may not hold, are escaped too."""
    return re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def _without_anchors(pattern: str) -> str:
    """The whole text has to match anyway, so anchors at the ends say nothing."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$"):
        body = pattern[:-1]
        if (len(body) - len(body.rstrip("\\"))) % 2 == 0:
            return body
    return pattern


def _bracket_depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth = max(0, depth + (character in "([{") - (character in ")]}"))
        deepest = max(deepest, depth)
    return deepest
