"""A hub id from the hub's cache, as its client lays it out; nothing is downloaded."""

import shutil

import pytest

from quantkit.errors import SourceError
from quantkit.source import open_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tiny_llama_folder, tmp_path, monkeypatch):
    """A cache as the hub's client lays it out: blobs, a snapshot of links, and the branch's name."""
    root = tmp_path / "hub"
    repository = root / "models--quantkit-tests--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(tiny_llama_folder.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(repository / "blobs" / str(number))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    return snapshot


def test_hub_id_from_the_cache(hub_cache, tiny_llama_folder):
    source = open_source("quantkit-tests/tiny")
    assert (source.name, source.kind, source.revision) == ("quantkit-tests/tiny", "hub", COMMIT)
    assert source.folder == hub_cache
    assert source.fingerprint() == open_source(tiny_llama_folder).fingerprint()
    assert open_source("quantkit-tests/tiny", revision=COMMIT).revision == COMMIT


def test_unknown_hub_id_offline(hub_cache):
    for name, revision in (("quantkit-tests/other", None), ("gpt-unknown", None), ("quantkit-tests/tiny", "v2")):
        with pytest.raises(SourceError, match="cannot be reached and its cache does not hold") as caught:
            open_source(name, revision=revision)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)


def test_incomplete_snapshot(hub_cache):
    (hub_cache / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"no model\.safetensors"):
        open_source("quantkit-tests/tiny")
