"""verify and a quantkit.json that is broken or of another version; and what is said of several failed checks."""

import shutil
from pathlib import Path

import pytest

from quantkit.errors import CheckpointError
from quantkit.source import open_source
from quantkit.verify import VerifyReport, verify_checkpoint


@pytest.fixture(scope="module")
def good(tiny_llama_folder, write_rtn_checkpoint, tmp_path_factory):
    return write_rtn_checkpoint(tiny_llama_folder, tmp_path_factory.mktemp("verify") / "good")


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


@pytest.fixture
def source(tiny_llama_folder):
    return open_source(tiny_llama_folder)


PROBE = '"top_ids": [[%d]], "top_logits": [[1.0]], "logsumexp": [1.0]'
BROKEN_RECORDS = {
    "{": ("manifest", "Invalid JSON"),
    '{"schema_version": 99}': ("manifest", "schema_version: Input should be 1"),
    '{"schema_version":1,"layers":5,"files":[],"probe":3}': ("manifest", "layers: Input should be a valid array"),
    f'{{"schema_version": 1, "probe": {{"token_ids": [1, 2], {PROBE % 1}}}}}': ("manifest", "have different lengths"),
    f'{{"schema_version": 1, "probe": {{"token_ids": [1], {PROBE % 999}}}}}': ("logits", "ids outside 0 to 319"),
}


@pytest.mark.parametrize("text", BROKEN_RECORDS)
def test_a_record_that_cannot_be_relied_on_is_a_failed_check(copy, source, text):
    (copy / "quantkit.json").write_text(text)
    name, detail = BROKEN_RECORDS[text]
    report = verify_checkpoint(copy, source)
    assert name in report.failed()
    assert detail in next(check.detail for check in report.checks if check.name == name)
    with pytest.raises(CheckpointError, match=name):
        report.raise_for_failure()


def test_every_failed_check_is_named():
    report = VerifyReport("ck")
    report.add("hashes", ["a.safetensors has changed"], "")
    report.add("codes", [], "fine")
    report.add("scales", ["b is zero", "c is zero"], "")
    with pytest.raises(CheckpointError, match=r"^ck failed the checks hashes, scales: a.safetensors has changed$"):
        report.raise_for_failure()
