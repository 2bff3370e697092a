"""Records that were changed after the evaluation, or lack what a comparison looks up: one line that names the place."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.compare import compare
from quantkit_eval.errors import RecordError
from quantkit_eval.evaluate import evaluate

GATES = {"max_drop_pp": {"extract": 5}, "max_kl_mean_nats": 0.1}


@pytest.fixture
def folders(tmp_path: Path, erring_model: Callable[..., Any]) -> tuple[Path, Path]:
    suites = {"extract": {"num_items": 8}, "nll": {"max_windows": 8}}
    evaluate(erring_model(8, 0, 0.5, name="base"), suites, 0, tmp_path / "a")
    evaluate(erring_model(8, 0, 0.5, "others", name="cand"), suites, 0, tmp_path / "b", tmp_path / "a")
    return tmp_path / "a", tmp_path / "b"


def seal(folder: Path) -> None:
    """Write into result.json the sha256 of what samples.jsonl has become."""
    result = json.loads((folder / "result.json").read_text())
    result["samples_sha256"] = hashlib.sha256((folder / "samples.jsonl").read_bytes()).hexdigest()
    (folder / "result.json").write_text(json.dumps(result))


def test_samples_that_were_changed_afterwards_are_refused(folders: tuple[Path, Path]) -> None:
    """Otherwise an edited line would turn a verdict while result.json still says what was measured."""
    path = folders[1] / "samples.jsonl"
    path.write_text(path.read_text().replace('"exact": false', '"exact": true', 1))
    with pytest.raises(RecordError, match=r"samples\.jsonl: changed after the evaluation: sha256 [0-9a-f]{16}"):
        compare(*folders, GATES)
    seal(folders[1])
    compare(*folders, GATES)


@pytest.mark.parametrize(("suite", "metric"), [("nll", "kl_mean_nats"), ("extract", "exact")])
def test_a_sample_without_what_is_judged_is_named(folders: tuple[Path, Path], suite: str, metric: str) -> None:
    path = folders[1] / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    del next(sample for sample in samples if sample["suite"] == suite)["metrics"][metric]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    seal(folders[1])
    with pytest.raises(RecordError, match=rf"samples\.jsonl:.* ('{metric}' is a required property|lacks {metric})"):
        compare(*folders, GATES)


def test_a_result_without_its_primary_metric_is_named(folders: tuple[Path, Path]) -> None:
    path = folders[1] / "result.json"
    result = json.loads(path.read_text())
    del result["suites"]["extract"]["metrics"]["exact"]
    path.write_text(json.dumps(result))
    with pytest.raises(RecordError, match=r"/suites/extract/metrics: the primary metric 'exact' is missing"):
        compare(*folders, {})
