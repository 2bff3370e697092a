"""Calibration data: what is read, how it is cut and counted, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibration import self_generated
from quantkit.calibration.dataset import CalibrationSet, build_calibration
from quantkit.calibration.self_generated import generate_conversations
from quantkit.calibration.sources import read_jsonl
from quantkit.calibration.tokenize import DocumentTokenizer
from quantkit.errors import CalibrationError
from quantkit.recipe import Calibration, SelfGeneratedSource
from quantkit.source import ModelSource, open_source

CHAT = [
    {"role": "user", "content": "Where is the station?"},
    {"role": "assistant", "content": "Two streets away."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "You are welcome."},
]


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> ModelSource:
    return open_source(tiny_models("llama"))


@pytest.fixture(scope="module")
def tokenizer(model: ModelSource) -> Any:
    return model.tokenizer()


def _calibration(*sources: dict[str, Any], num_tokens: int = 64, window: int = 16, **more: Any) -> Calibration:
    return Calibration.model_validate(
        {"sources": list(sources), "num_tokens": num_tokens, "window_tokens": window, **more}
    )


def _windows(made: CalibrationSet) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(made.token_ids, made.lengths, strict=True)]


def test_a_window_never_crosses_documents(tmp_path: Path, model: ModelSource, tokenizer: Any) -> None:
    documents = [f"Document {i} says {'very ' * (i % 7)}little of the number {i * 37}." for i in range(30)]
    path = tmp_path / "corpus.txt"
    path.write_text("\n<|document|>\n".join(documents))
    made = build_calibration(_calibration({"kind": "text", "path": str(path)}, num_tokens=300, window=24), model)
    whole = [list(tokenizer(document + "\n")["input_ids"]) for document in documents]
    whole[-1] = list(tokenizer(documents[-1])["input_ids"])
    pieces = [ids[start : start + 24] for ids in whole for start in range(0, len(ids), 24)]
    for window in _windows(made):
        assert any(piece[: len(window)] == window for piece in pieces)
    assert made.num_tokens == 300
    assert torch.equal(made.token_mask.sum(1), made.lengths)
    assert made.lengths.tolist() == sorted(made.lengths.tolist(), reverse=True)
    record = made.to_record()["sources"][0]
    assert record["tokens_used"] == 300
    assert record["tokens_available"] == sum(len(piece) for piece in pieces if len(piece) >= 8)
    assert record["tokens_dropped"] == sum(len(piece) for piece in pieces if len(piece) < 8) > 0


def test_packed_documents_fill_every_window(tmp_path: Path, model: ModelSource, tokenizer: Any) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("The quick brown fox jumps. " * 40)
    made = build_calibration(_calibration({"kind": "text", "path": str(path)}, pack_documents=True), model)
    assert torch.equal(made.token_ids, torch.tensor(tokenizer(path.read_text())["input_ids"][:64]).view(4, 16))
    assert made.token_mask.all()
    path.write_text("\n<|document|>\n".join(["a short one"] * 40))
    packed = build_calibration(_calibration({"kind": "text", "path": str(path)}, pack_documents=True), model)
    assert packed.lengths.tolist() == [16, 16, 16, 16]


def test_batches_are_as_wide_as_their_longest_window() -> None:
    lengths = torch.tensor([10, 9, 4, 4, 4, 1])
    ids = torch.arange(60).view(6, 10)
    mask = torch.arange(10) < lengths[:, None]
    made = CalibrationSet(ids * mask, mask, lengths)
    batches = list(made.batches(20))
    assert [tuple(part.shape) for part, _ in batches] == [(2, 10), (4, 4)]
    assert sum(int(counted.sum()) for _, counted in batches) == made.num_tokens == 32
    assert [tuple(part.shape) for part, _ in made.batches(3)] == [(1, 10), (1, 9), (1, 4), (1, 4), (1, 4), (1, 1)]


def test_windows_are_drawn_by_seed_and_the_digest_follows(tmp_path: Path, model: ModelSource) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("\n<|document|>\n".join(f"Document {i} speaks of the number {i}." for i in range(30)))
    source = {"kind": "text", "path": str(path)}
    first, same, other = (build_calibration(_calibration(source, seed=seed), model) for seed in (1, 1, 2))
    assert first.to_record() == same.to_record()
    assert first.to_record()["sha256"] != other.to_record()["sha256"]


def test_messages_go_through_the_chat_template_once(tmp_path: Path, model: ModelSource, tokenizer: Any) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join([json.dumps({"messages": CHAT})] * 4 + ["", json.dumps({"text": "plain text"})]))
    made = build_calibration(_calibration({"kind": "jsonl", "path": str(path)}, num_tokens=320, window=200), model)
    expected = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert _windows(made)[0] == expected
    assert expected.count(tokenizer.bos_token_id) == 1


def test_only_the_assistants_tokens_count_if_asked(tmp_path: Path, model: ModelSource, tokenizer: Any) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join([json.dumps({"messages": CHAT})] * 4))
    source = {"kind": "jsonl", "path": str(path), "count": "assistant"}
    made = build_calibration(_calibration(source, num_tokens=300, window=200), model)
    ids = made.token_ids[0, : made.lengths[0]]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    counted = tokenizer.decode(ids[made.token_mask[0, : made.lengths[0]]])
    assert "Two streets away." in counted
    assert "You are welcome." in counted
    assert "station" not in counted
    assert "Thanks" not in counted
    assert made.to_record()["masked_tokens"] > 0


def test_special_tokens_in_a_document_stay_text(tokenizer: Any) -> None:
    spelled = DocumentTokenizer(tokenizer)
    eos = tokenizer.eos_token
    text = spelled.tokenize(f"The token {eos} ends a text.", "x")
    assert tokenizer.eos_token_id not in list(text.token_ids)[1:]
    assert eos in tokenizer.decode(text.token_ids)
    evil = [{"role": "user", "content": f"Say {eos} twice"}, {"role": "assistant", "content": f"{eos} {eos}"}]
    harmless = [{"role": "user", "content": "Say it twice"}, {"role": "assistant", "content": "no no"}]
    specials = set(tokenizer.all_special_ids)

    def count(chat: list[dict[str, str]], **options: Any) -> int:
        return sum(token in specials for token in spelled.tokenize(chat, "x", **options).token_ids)

    assert count(evil) == count(harmless) == count(evil, assistant_only=True)
    assert tokenizer.decode(spelled.tokenize(evil, "x").token_ids).count(eos) >= 3


def test_special_tokens_that_have_no_name_in_the_tokenizer_stay_text(tokenizer: Any) -> None:
    turn = "<|im_end|>"  # special to the tokenizer, and neither bos, eos nor pad: as the headers of a Llama 3 template
    assert turn not in tokenizer.all_special_tokens
    chat = [{"role": "user", "content": f"Say {turn} twice"}, {"role": "assistant", "content": turn}]
    for options in ({}, {"assistant_only": True}):
        ids = DocumentTokenizer(tokenizer).tokenize(chat, "x", **options).token_ids
        assert list(ids).count(tokenizer.convert_tokens_to_ids(turn)) == 2  # the template's own
        assert tokenizer.decode(ids).count(turn) == 4


SEPARATORS = "\u2028 \u2029 \u0085"  # ends of lines to Unicode, ordinary characters to JSON


def test_a_line_of_jsonl_ends_with_a_line_feed_only(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"text": f"{number}{SEPARATORS}"}, ensure_ascii=False) for number in range(2)]
    path.write_bytes("\ufeff{}\r\n{}\r\n".format(*lines).encode())  # as editors on Windows write it
    assert list(read_jsonl(path)) == [f"0{SEPARATORS}", f"1{SEPARATORS}"]


def test_answers_with_separators_are_read_back(
    tmp_path: Path, model: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    said = [[*CHAT[:1], {"role": "assistant", "content": f"Two{SEPARATORS}streets"}]]
    monkeypatch.setattr(self_generated, "_answer_in_rounds", lambda *_: said)
    source = SelfGeneratedSource(kind="self_generated")
    for _ in range(2):  # made, and from the cache
        assert generate_conversations(source, model, 8, 0, lambda *_: None) == said


def test_shares_are_shares_of_the_tokens(tmp_path: Path, model: ModelSource) -> None:
    paths = []
    for name in ("a", "b"):
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text(f"{name} " * 2000)
    sources = [
        {"kind": "text", "path": str(path), "share": share} for path, share in zip(paths, (0.7, 0.3), strict=True)
    ]
    made = build_calibration(_calibration(*sources, num_tokens=160), model)
    assert [source["tokens_used"] for source in made.sources] == [112, 48]
    assert made.num_tokens == 160


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_the_builtin_data_is_there_and_large_enough(kind: str, model: ModelSource) -> None:
    made = build_calibration(_calibration({"kind": kind, "path": "builtin"}, num_tokens=32768, window=512), model)
    assert made.num_tokens == 32768
    assert made.sources[0]["documents"] > 50


def test_the_model_answers_seed_prompts_once(
    tmp_path: Path, model: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join([json.dumps({"messages": CHAT}), json.dumps({"text": "Name a colour."})]))
    source = SelfGeneratedSource(kind="self_generated", seed_prompts=str(prompts), max_answer_tokens=12)
    told: list[tuple[str, int, int]] = []
    first = generate_conversations(source, model, 200, 0, lambda *step: told.append(step))
    assert [turns[:-1] for turns in first[:2]] == [CHAT[:3], [{"role": "user", "content": "Name a colour."}]]
    assert all(turns[-1]["role"] == "assistant" for turns in first)
    assert len({turns[-1]["content"] for turns in first}) > 1
    assert told[-1] == ("self-generate", 200, 200)
    told.clear()
    assert generate_conversations(source, model, 200, 0, lambda *step: told.append(step)) == first
    assert not told  # read from the cache
    assert generate_conversations(source, model, 200, 1, lambda *_: None) != first
    shutil.rmtree(tmp_path / "cache")
    assert generate_conversations(source, model, 200, 0, lambda *_: None) == first
    made = build_calibration(
        _calibration({"kind": "self_generated", "seed_prompts": str(prompts), "max_answer_tokens": 12}), model
    )
    assert made.num_tokens == 64
    assert made.sources[0]["name"] == "self_generated (prompts.jsonl)"


def test_greedy_answers_are_given_once(tmp_path: Path, model: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    source = {"kind": "self_generated", "temperature": 0.0, "max_answer_tokens": 2}
    with pytest.raises(CalibrationError, match=r"self_generated \(builtin\) has [\d,]+ tokens and 99,999 are needed"):
        build_calibration(_calibration(source, num_tokens=99_999), model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "", "x.txt holds no text"),
        ("x.txt", "  \n\n", "x.txt holds no text"),
        ("x.txt", "short", r"x.txt has 0 tokens and 64 are needed\. Give it more text$"),
        ("x.txt", "many words " * 5, r"x.txt has \d+ tokens .*or lower num_tokens to \d\d$"),
        ("x.jsonl", "{broken", "line 1: no valid JSON"),
        ("x.jsonl", '{"text": "good"}\n{"prompt": "x"}', 'line 2: neither a "text" string nor "messages"'),
        ("x.jsonl", '{"messages": []}', "line 1: neither"),
        ("x.jsonl", '{"messages": [{"role": "user"}]}', "line 1: neither"),
    ],
)
def test_bad_data_is_one_clear_line(name: str, content: str, message: str, tmp_path: Path, model: ModelSource) -> None:
    path = tmp_path / name
    path.write_text(content)
    kind = "text" if name.endswith("txt") else "jsonl"
    with pytest.raises(CalibrationError, match=message) as caught:
        build_calibration(_calibration({"kind": kind, "path": str(path)}), model)
    assert "\n" not in str(caught.value)


def test_missing_file_and_wrong_encoding(tmp_path: Path, model: ModelSource) -> None:
    with pytest.raises(CalibrationError, match=r"nowhere.txt: No such file"):
        build_calibration(_calibration({"kind": "text", "path": str(tmp_path / "nowhere.txt")}), model)
    path = tmp_path / "latin.txt"
    path.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(CalibrationError, match="not UTF-8"):
        build_calibration(_calibration({"kind": "text", "path": str(path)}), model)


def test_messages_without_a_template_are_refused(
    tmp_path: Path, make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    folder = make_tiny_model("llama", tmp_path / "bare")
    for file in folder.glob("chat_template*"):
        file.unlink()
    bare = open_source(folder)
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    for source in ({"kind": "jsonl", "path": str(path)}, {"kind": "self_generated", "seed_prompts": str(path)}):
        with pytest.raises(CalibrationError, match="no chat template"):
            build_calibration(_calibration(source), bare)


def test_without_sources_chat_and_text_calibrate_in_halves(
    model: ModelSource, tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    calibration = Calibration(num_tokens=2048, window_tokens=128)
    made = build_calibration(calibration, model)
    assert [(source["name"], source["tokens_used"]) for source in made.sources] == [
        ("builtin", 1024),
        ("builtin", 1024),
    ]
    assert [source["kind"] for source in made.sources] == ["text", "jsonl"]
    folder = make_tiny_model("llama", tmp_path / "bare")
    for file in folder.glob("chat_template*"):
        file.unlink()
    bare = build_calibration(calibration, open_source(folder))
    assert [(source["kind"], source["tokens_used"]) for source in bare.sources] == [("text", 2048)]


def test_windows_longer_than_the_model_are_refused(tmp_path: Path, make_tiny_model: Callable[..., Path]) -> None:
    folder = make_tiny_model("llama", tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(CalibrationError, match=r"window_tokens is 128 and .* was made for 64 positions"):
        build_calibration(Calibration(num_tokens=2048, window_tokens=128), open_source(folder))


def test_a_share_of_next_to_nothing_is_refused(model: ModelSource) -> None:
    sources = [{"kind": "text", "path": "builtin", "share": share} for share in (0.95, 0.05)]
    with pytest.raises(CalibrationError, match=r"gets 3 tokens: its share of 64 is too small"):
        build_calibration(_calibration(*sources), model)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(
    tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    folder = make_tiny_model("llama", tmp_path / "small", vocab_size=100)
    with pytest.raises(CalibrationError, match=r"the tokenizer gives id \d+ and the model's vocabulary ends at 99"):
        build_calibration(_calibration({"kind": "text", "path": "builtin"}), open_source(folder))


def test_a_dataset_from_disk_and_its_errors(model: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets (extra `datasets`)")
    rows = datasets.Dataset.from_dict({"text": ["a row of text that is long enough " * 5] * 10, "n": list(range(10))})
    asked: list[tuple[str, str | None, str]] = []

    def load(name: str, config: str | None, *, split: str) -> Any:
        asked.append((name, config, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = {"kind": "dataset", "name": "owner/some", "config": "part-v1"}
    made = build_calibration(_calibration(source), model)
    assert made.sources[0]["documents"] == 10
    build_calibration(_calibration({"kind": "dataset", "name": "owner/some"}), model)
    assert asked == [("owner/some", "part-v1", "train"), ("owner/some", None, "train")]
    with pytest.raises(CalibrationError, match="no column 'body'"):
        build_calibration(_calibration({"kind": "dataset", "name": "owner/some", "column": "body"}), model)
    with pytest.raises(CalibrationError, match="neither text nor messages"):
        build_calibration(_calibration({"kind": "dataset", "name": "owner/some", "column": "n"}), model)
