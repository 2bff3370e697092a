import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for
from transformers import AutoTokenizer

from quantkit.errors import UsageError
from quantkit.serve.structured import StructuredOutput
from quantkit.serve.structured.compiler import CompiledGrammar, GrammarCompiler, GrammarLimits
from quantkit.serve.structured.matcher import FormError
from quantkit.serve.structured.post_validation import AnswerValidator
from quantkit.serve.structured.token_bytes import special_token_ids, token_bytes

SCHEMAS = json.loads(Path(__file__).with_name("structured_schemas.json").read_text())
VOCAB_SIZE = 350  # larger than the tokenizer's 320, and no multiple of 32
END = (2, 4)
WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama_folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, end_token_ids=END)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def validator() -> Iterator[AnswerValidator]:
    validator = AnswerValidator()
    yield validator
    validator.close()


def legal(matcher: Any) -> list[int]:
    row = torch.full((WORDS,), -1, dtype=torch.int32)
    matcher.fill(row)
    bits = (row.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
    return [int(token_id) for token_id in bits.flatten().nonzero().flatten()]


def accepts(grammar: CompiledGrammar, tokenizer: Any, text: str) -> bool:
    """Token by token, each of which must be in the mask."""
    matcher = grammar.start()
    for token_id in tokenizer(text, add_special_tokens=False).input_ids:
        if token_id not in legal(matcher):
            return False
        assert matcher.accept(token_id)
    return matcher.is_complete


def reference_fits(schema: Any, value: Any) -> bool:
    validator = validator_for(schema, default=Draft202012Validator)
    return bool(validator(schema, format_checker=FormatChecker()).is_valid(value))


@pytest.mark.parametrize("case", SCHEMAS, ids=[case["name"] for case in SCHEMAS])
def test_schemas(case: Any, compiler: GrammarCompiler, tokenizer: Any, validator: AnswerValidator) -> None:
    """Valid instances are accepted; invalid ones are refused by the grammar, or else what it leaves out is named."""
    schema = case["schema"]
    grammar = compiler.compile(StructuredOutput.json_schema(schema))
    assert list(grammar.unenforced) == case["unenforced"]
    for value in case["valid"]:
        assert reference_fits(schema, value)
        for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2)):
            assert accepts(grammar, tokenizer, text), text
            assert validator.is_valid(grammar, text) is True
    for value in case["invalid"]:
        assert not reference_fits(schema, value)
        text = json.dumps(value)
        assert validator.is_valid(grammar, text) is False
        if not case["unenforced"]:
            assert not accepts(grammar, tokenizer, text), text
    if case["unenforced"]:
        assert any(accepts(grammar, tokenizer, json.dumps(value)) for value in case["invalid"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["invoice", "tree", "shape", "all of two branches", "tuple", "formats", "enum"])
def test_random_paths_through_the_mask_are_valid(
    name: str, seed: int, compiler: GrammarCompiler, tokenizer: Any
) -> None:
    """Whatever is sampled from legal tokens alone, ends at an end of text as an instance of the schema."""
    schema = next(case["schema"] for case in SCHEMAS if case["name"] == name)
    grammar = compiler.compile(StructuredOutput.json_schema(schema))
    texts = token_bytes(tokenizer, VOCAB_SIZE)
    choose = random.Random(f"{name} {seed}")
    matcher, written = grammar.start(), b""
    for _ in range(600):
        tokens = legal(matcher)
        assert tokens, "a mask is never empty"
        nearer = [t for t in tokens if texts[t] in (b'"', b"}", b"]", b"0")] or tokens
        token_id = choose.choice(END if END[0] in tokens else nearer if choose.random() < 0.8 else tokens)
        if token_id in END:
            assert set(END) <= set(tokens)
            break
        assert matcher.accept(token_id)
        assert texts[token_id], "only tokens with a text are legal before the end"
        written += texts[token_id]
    else:
        pytest.fail(f"600 tokens and no end: {written!r}")
    assert matcher.is_complete
    assert reference_fits(schema, json.loads(written.decode())), written
    assert b" " * 9 not in written
    assert matcher.accept(END[1])


def test_the_end(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """Every token of the end is legal where the answer is complete, and nowhere else; then nothing but those."""
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    matcher = compiler.compile(StructuredOutput.regex("^ab?$")).start()
    assert legal(matcher) == [a]
    assert not matcher.is_complete
    assert not matcher.accept(b)
    assert legal(matcher) == [a], "what is not legal changes nothing"
    assert matcher.accept(a)
    assert legal(matcher) == [*END, b]
    assert matcher.is_complete
    assert not matcher.is_finished
    assert matcher.accept(b)
    assert matcher.is_finished
    assert legal(matcher) == list(END)
    assert not matcher.accept(a)


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput.choice(["<|im_end|>x"]),
        StructuredOutput.regex(r"<\|im_end\|>x"),
        StructuredOutput.grammar('start: "<|im_end|>" "x"'),
        StructuredOutput.json_schema({"const": "<|im_start|>"}),
        StructuredOutput.json_schema({"type": "string"}),
        StructuredOutput.regex(r"(.|\n)*z"),
    ],
    ids=lambda form: f"{form.kind}:{form.value}",
)
def test_special_tokens_never_match_text(form: StructuredOutput, compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(form).start()
    special = special_token_ids(tokenizer)
    assert special == {0, 1, 2, 3, 4}
    for _ in range(40):
        tokens = legal(matcher)
        if matcher.is_complete:
            break
        assert not special & set(tokens)
        assert matcher.accept(tokens[-1])


def test_a_special_token_may_be_asked_for_by_name(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutput.grammar('start: <|im_start|> "x"')).start()
    assert legal(matcher) == [3]


def test_a_grammar_is_judged_by_its_tokens(compiler: GrammarCompiler, tokenizer: Any, validator: Any) -> None:
    """A special token has no text, so that the text alone does not show that it was there."""
    grammar = compiler.compile(StructuredOutput.grammar('start: <|im_start|> "x"'))
    x = tokenizer.convert_tokens_to_ids("x")
    assert validator.is_valid(grammar, "x", [3, x]) is True
    assert validator.is_valid(grammar, "x", [x]) is False
    assert validator.is_valid(grammar, "x", [3]) is False


def test_thousands_of_choices(compiler: GrammarCompiler, tokenizer: Any) -> None:
    texts = [f"choice {number}" for number in range(3000)]
    grammar = compiler.compile(StructuredOutput.choice(texts))
    assert accepts(grammar, tokenizer, texts[-1])
    assert grammar.matches(texts[1234])
    assert not grammar.matches("choice 3000")


def test_a_form_that_leads_nowhere_says_so_and_does_not_end_the_answer(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    matcher = compiler.compile(StructuredOutput.grammar('start: "a" start')).start()

    def follow() -> None:
        for _ in range(100):
            legal(matcher)
            assert matcher.accept(tokenizer.convert_tokens_to_ids("a"))
            assert not matcher.is_finished
            assert not matcher.is_complete

    with pytest.raises(FormError, match=r"(?i)cannot be followed further: parser error: Too many items"):
        follow()


def test_grammars_in_both_languages(compiler: GrammarCompiler, tokenizer: Any) -> None:
    lark = compiler.compile(StructuredOutput.grammar('start: "x" (" " NUMBER)+\nNUMBER: /[0-9]+/'))
    gbnf = compiler.compile(StructuredOutput.grammar('root ::= "x" (" " number)+\nnumber ::= [0-9]+\n'))
    for grammar in (lark, gbnf):
        for text, expected in (("x 1 22", True), ("x", False), ("x 1 ", False), ("y 1", False)):
            assert accepts(grammar, tokenizer, text) is expected
            assert grammar.matches(text) is expected


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4, unique=True), st.text(max_size=6))
def test_a_choice_is_one_of_its_texts(compiler: GrammarCompiler, texts: list[str], other: str) -> None:
    grammar = compiler.compile(StructuredOutput.choice(texts))
    for text in texts:
        assert grammar.matches(text)
    assert grammar.matches(other) == (other in texts)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutput.regex(r"\bfoo\b"), "regex cannot be compiled: .*lookarounds not supported"),
        (StructuredOutput.regex(r"(a)\1"), "regex cannot be compiled: .*backreferences are not supported"),
        (StructuredOutput.regex("(a"), "regex cannot be compiled: .*unclosed group"),
        (StructuredOutput.json_schema({"pattern": r"(a)\1"}), "json_schema cannot be compiled: .*backreferences"),
        (StructuredOutput.grammar("start: b"), 'grammar cannot be compiled: .*unknown name: "b"'),
        (StructuredOutput.grammar("root ::= ((("), "grammar cannot be compiled: Expected"),
        (StructuredOutput.json_schema(False), "json_schema=false allows nothing"),
        (StructuredOutput.json_schema({"type": "foo"}), "json_schema is no JSON Schema: at /type: 'foo' is not valid"),
        (StructuredOutput.json_schema({"$ref": "http://x.y/z"}), "json_schema cannot be compiled: .*does not fetch"),
        (StructuredOutput.json_schema({"$ref": "#/nowhere"}), "json_schema cannot be compiled: "),
        (StructuredOutput.json_schema({"$ref": "#"}), "json_schema allows nothing"),
        (
            StructuredOutput.json_schema(
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
            ),
            "json_schema allows nothing",
        ),
        (StructuredOutput.regex(r"[^\s\S]"), "regex allows nothing"),
        (StructuredOutput.grammar("start: start"), "grammar allows nothing"),
        (
            StructuredOutput.json_schema({"type": "string", "minLength": 5, "maxLength": 2}),
            "json_schema cannot be compiled: Unsatisfiable schema",
        ),
        (StructuredOutput.regex("x" * 200_000), "regex of 200000 bytes is larger than max_bytes=131072"),
        (StructuredOutput.choice(["é" * 70_000]), "choice of 140000 bytes is larger than max_bytes=131072"),
        (StructuredOutput.regex("(" * 70 + ")" * 70), "regex is nested 70 deep, more than max_depth=64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_compiled_is_named(form: StructuredOutput, message: str, compiler: GrammarCompiler) -> None:
    for _ in range(2):  # from the cache too
        with pytest.raises(UsageError, match=message) as caught:
            compiler.compile(form)
        assert "\n" not in str(caught.value)


def test_depth_of_a_schema(compiler: GrammarCompiler) -> None:
    schema: Any = {"type": "object"}
    for _ in range(63):
        schema = {"items": schema}
    compiler.compile(StructuredOutput.json_schema(schema))
    with pytest.raises(UsageError, match="json_schema is nested 65 deep, more than max_depth=64"):
        compiler.compile(StructuredOutput.json_schema({"items": schema}))


@pytest.mark.parametrize("error", [TimeoutError, ValueError, RuntimeError, MemoryError])
def test_whatever_the_compiler_raises_fails_that_form_alone(
    error: type[Exception], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, end_token_ids=END)

    def compile_or_fail(form: StructuredOutput, compile_it: Callable[..., Any] = compiler._compile) -> CompiledGrammar:
        if form.value == "bad":
            raise error("no")
        return compile_it(form)

    monkeypatch.setattr(compiler, "_compile", compile_or_fail)
    for _ in range(2):
        with pytest.raises(UsageError, match=f"regex cannot be compiled: {error.__name__}: no"):
            compiler.compile(StructuredOutput.regex("bad"))
    assert compiler.compile(StructuredOutput.regex("good")).matches("good")
    compiler.close()


def test_a_form_that_takes_too_long_is_refused_and_others_go_on(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, GrammarLimits(max_seconds=0.3), end_token_ids=END)
    compile_it = compiler._compile

    def slowly(form: StructuredOutput) -> CompiledGrammar:
        if form.value == "slow":
            time.sleep(1.0)
        return compile_it(form)

    monkeypatch.setattr(compiler, "_compile", slowly)
    with pytest.raises(UsageError, match=r"regex takes longer to compile than max_seconds=0.3. make it simpler"):
        compiler.compile(StructuredOutput.regex("slow"))
    assert compiler.compile(StructuredOutput.regex("fast")).matches("fast")
    compiler.close()


def test_the_cache(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, GrammarLimits(max_cached=2), end_token_ids=END)
    made: list[Any] = []
    compile_it = compiler._compile

    def counted(form: StructuredOutput) -> CompiledGrammar:
        made.append(form.value)
        return compile_it(form)

    monkeypatch.setattr(compiler, "_compile", counted)
    with ThreadPoolExecutor(8) as threads:
        same = list(threads.map(compiler.compile, [StructuredOutput.regex("a")] * 16))
    assert len(set(map(id, same))) == 1
    for text in ("b", "a", "c", "a", "b"):
        compiler.compile(StructuredOutput.regex(text))
    assert made == ["a", "b", "c", "b"]
    first, second = same[0].start(), same[0].start()
    assert first.accept(tokenizer.convert_tokens_to_ids("a"))
    assert not second.is_complete, "two answers do not share a state"
    compiler.close()


def test_a_schema_cannot_loosen_its_grammar(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """llguidance reads options from a schema; ours hold, and the key is named."""
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": {"whitespace_pattern": "[ ]*"}}
    grammar = compiler.compile(StructuredOutput.json_schema(schema))
    assert grammar.unenforced == ("/x-guidance",)
    assert accepts(grammar, tokenizer, "[" + " " * 8 + "1]")
    assert not accepts(grammar, tokenizer, "[" + " " * 9 + "1]")


def test_validation_of_other_kinds(compiler: GrammarCompiler, validator: AnswerValidator) -> None:
    choice = compiler.compile(StructuredOutput.choice(["yes", "no"]))
    assert [validator.is_valid(choice, text) for text in ("yes", "ye", "yes ")] == [True, False, False]
    pattern = compiler.compile(StructuredOutput.regex("[0-9]{2}"))
    assert [validator.is_valid(pattern, text) for text in ("12", "1", "123")] == [True, False, False]
    schema = compiler.compile(StructuredOutput.json_schema({"type": "number"}))
    assert [validator.is_valid(schema, text) for text in ("1", "1e", "NaN", "", "[" * 100_000)] == [True, *[False] * 4]


def test_validation_ends_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A pattern that Python's matcher cannot finish costs its answer the verdict, and nobody else."""
    validator = AnswerValidator(time_limit_s=0.5)
    try:
        assert validator.fits({"type": "string", "pattern": "^(a+)+$"}, "a" * 50 + "b") is None
        assert "could not be validated in 0.5 s" in caplog.text
        assert validator.fits({"type": "integer"}, 3) is True
        assert validator.fits({"$ref": "#/nowhere"}, 3) is None
        assert validator.fits({"$ref": "#"}, 3) is None
        assert validator.fits({"type": "integer"}, "3") is False
        process = validator._process
        assert process is not None
        process.kill()
        process.wait()
        assert validator.fits({"type": "integer"}, 3) is True, "it starts again"
    finally:
        validator.close()
    assert process.poll() is not None


def test_bytes_of_tokens(tokenizer: Any) -> None:
    texts = token_bytes(tokenizer, VOCAB_SIZE)
    assert len(texts) == VOCAB_SIZE
    assert all(texts[token_id] == b"" for token_id in (*range(5), *range(320, VOCAB_SIZE)))
    for text in ("Größe 🙂\n", "a b\tc", '{"x": 1}'):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(texts[token_id] for token_id in ids) == text.encode()
    assert sorted(text for text in texts if len(text) == 1) == [bytes([byte]) for byte in range(256)]


def test_bytes_of_a_tokenizer_with_byte_fallback() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "▁the": 1, "cat": 2, "<0xF0>": 3, "</s>": 4}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
    made.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    assert token_bytes(tokenizer, 7) == [b"", b" the", b"cat", b"\xf0", b"", b"<tool>", b""]
    made.decoder = decoders.WordPiece()
    with pytest.raises(UsageError, match="neither byte-level nor with a fallback to bytes"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>"), 7)


def test_without_the_package(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"needs the package llguidance. pip install '"):
        GrammarCompiler(tokenizer, VOCAB_SIZE)
