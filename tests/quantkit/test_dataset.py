"""Calibration data: what is read, how it is cut, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibration.dataset import BUILTIN_FILES, build_calibration
from quantkit.errors import CalibrationError
from quantkit.recipe import Calibration


@pytest.fixture(scope="module")
def tokenizer(tiny_models: Callable[[str], Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_models("llama"))


def _calibration(*sources: dict[str, Any], num_tokens: int = 64, window: int = 16, seed: int = 0) -> Calibration:
    return Calibration.model_validate(
        {"sources": list(sources), "num_tokens": num_tokens, "window_tokens": window, "seed": seed}
    )


def test_a_text_file_is_cut_from_its_beginning(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("The quick brown fox jumps. " * 40)
    made = build_calibration(_calibration({"kind": "text", "path": str(path)}), tokenizer)
    expected = torch.tensor(tokenizer(path.read_text())["input_ids"][:64]).view(4, 16)
    assert torch.equal(made.token_ids, expected)
    assert made.token_mask.all()
    record = made.to_record()
    assert record["num_tokens"] == 64
    assert record["masked_tokens"] == 0
    assert record["sources"][0]["name"] == "corpus.txt"
    assert record["sources"][0]["documents"] == 1


def test_documents_are_shuffled_by_seed_and_the_digest_follows(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("\n<|document|>\n".join(f"Document {i} speaks of the number {i}." for i in range(30)))
    source = {"kind": "text", "path": str(path)}
    first, same, other = (build_calibration(_calibration(source, seed=seed), tokenizer) for seed in (1, 1, 2))
    assert first.to_record() == same.to_record()
    assert first.to_record()["sha256"] != other.to_record()["sha256"]
    assert "<|document|>" not in tokenizer.decode(first.token_ids.flatten())


def test_messages_go_through_the_chat_template_once(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "chat.jsonl"
    turns = [
        {"role": "user", "content": "Where is the station?"},
        {"role": "assistant", "content": "Two streets away."},
    ]
    path.write_text("\n".join([json.dumps({"messages": turns})] * 4 + ["", json.dumps({"text": "plain text"})]))
    made = build_calibration(_calibration({"kind": "jsonl", "path": str(path)}), tokenizer)
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(made.token_ids.flatten())
    assert rendered in text
    assert ids.count(tokenizer.bos_token_id) == 1
    assert "<bos><bos>" not in text


def test_shares_are_whole_windows(tmp_path: Path, tokenizer: Any) -> None:
    paths = []
    for name in ("a", "b"):
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text(f"{name} " * 2000)
    made = build_calibration(
        _calibration(
            {"kind": "text", "path": str(paths[0]), "share": 0.7},
            {"kind": "text", "path": str(paths[1]), "share": 0.3},
            num_tokens=160,
        ),
        tokenizer,
    )
    assert made.token_ids.shape == (10, 16)
    assert [source["tokens_used"] for source in made.sources] == [112, 48]


@pytest.mark.parametrize("kind", sorted(BUILTIN_FILES))
def test_the_builtin_data_is_there_and_large_enough(kind: str, tokenizer: Any) -> None:
    made = build_calibration(_calibration({"kind": kind, "path": "builtin"}, num_tokens=32768, window=512), tokenizer)
    assert made.num_tokens == 32768
    assert made.sources[0]["documents"] > 50


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "", "x.txt holds no text"),
        ("x.txt", "  \n\n", "x.txt holds no text"),
        ("x.txt", "short", r"x.txt has \d+ tokens and 64 are needed .*Give it more text$"),
        ("x.txt", "many words " * 5, r"x.txt has \d+ tokens .*or lower num_tokens to (16|32|48)$"),
        ("x.jsonl", "{broken", "line 1: no valid JSON"),
        ("x.jsonl", '{"text": "good"}\n{"prompt": "x"}', 'line 2: neither a "text" string nor "messages"'),
        ("x.jsonl", '{"messages": []}', "line 1: neither"),
        ("x.jsonl", '{"messages": [{"role": "user"}]}', "line 1: neither"),
    ],
)
def test_bad_data_is_one_clear_line(name: str, content: str, message: str, tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / name
    path.write_text(content)
    kind = "text" if name.endswith("txt") else "jsonl"
    with pytest.raises(CalibrationError, match=message) as caught:
        build_calibration(_calibration({"kind": kind, "path": str(path)}), tokenizer)
    assert "\n" not in str(caught.value)


def test_missing_file_and_wrong_encoding(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(CalibrationError, match=r"nowhere.txt: No such file"):
        build_calibration(_calibration({"kind": "text", "path": str(tmp_path / "nowhere.txt")}), tokenizer)
    path = tmp_path / "latin.txt"
    path.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(CalibrationError, match="not UTF-8"):
        build_calibration(_calibration({"kind": "text", "path": str(path)}), tokenizer)


def test_messages_without_a_template_are_refused(tmp_path: Path, tiny_models: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(tiny_models("llama"))
    bare.chat_template = None
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    with pytest.raises(CalibrationError, match="no chat template"):
        build_calibration(_calibration({"kind": "jsonl", "path": str(path)}), bare)


def test_a_dataset_from_disk_and_its_errors(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets (extra `datasets`)")
    rows = datasets.Dataset.from_dict({"text": ["a row of text that is long enough " * 5] * 10, "n": list(range(10))})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    made = build_calibration(_calibration({"kind": "dataset", "name": "owner/some"}), tokenizer)
    assert made.sources[0]["documents"] == 10
    with pytest.raises(CalibrationError, match="no column 'body'"):
        build_calibration(_calibration({"kind": "dataset", "name": "owner/some", "column": "body"}), tokenizer)
    with pytest.raises(CalibrationError, match="neither text nor messages"):
        build_calibration(_calibration({"kind": "dataset", "name": "owner/some", "column": "n"}), tokenizer)
