"""The working folders of a run: one run at a time, nothing of the user's is cleared, a killed run is recovered from."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.checkpoint.folder import put_back_replaced, take_places, working_folders
from quantkit.errors import CheckpointError


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with working_folders([out], keep=False) as (folder,):
        (folder / "half").write_text("precious")
        for keep in (False, True):
            with pytest.raises(CheckpointError, match=r"another run is writing \S+out\. Wait"):  # noqa: SIM117
                with working_folders([tmp_path / "other", out], keep=keep):
                    pytest.fail("two runs in one folder")
        assert (folder / "half").read_text() == "precious"
        assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
        take_places([(folder, out)])
    assert [path.name for path in out.iterdir()] == ["half"]


def test_a_run_of_another_process_is_seen_and_its_death_too(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom quantkit.checkpoint.folder import working_folders\n"
        "with working_folders([Path(sys.argv[1])], keep=False):\n    print('in', flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(CheckpointError, match="another run is writing"):  # noqa: SIM117
            with working_folders([tmp_path / "out"], keep=False):
                pytest.fail("two runs in one folder")
        other.kill()
    assert (tmp_path / "out.partial").exists()  # killed: nothing was cleaned up
    with working_folders([tmp_path / "out"], keep=False) as (folder,):
        assert [path.name for path in folder.iterdir()] == [".lock"]


def test_what_a_killed_run_left_is_cleared_unless_a_journal_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    for journal, keep, stays in ((False, False, False), (False, True, False), (True, True, True), (True, False, False)):
        folder.mkdir()
        for name in (".lock", "model.safetensors", *(["journal.json"] if journal else [])):
            (folder / name).touch()
        (folder / "additional_chat_templates").mkdir()
        with pytest.raises(KeyboardInterrupt), working_folders([tmp_path / "out"], keep=keep):  # noqa: PT012 - what the run sees is asserted inside it
            assert (folder / "model.safetensors").exists() == stays
            raise KeyboardInterrupt
        assert folder.exists() == stays
        if stays:
            (folder / "journal.json").unlink()
            with working_folders([tmp_path / "out"], keep=True):
                os.rename(folder, tmp_path / "aside")


def test_a_folder_of_the_user_in_the_way_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"out.partial is in the way and is no working folder of quantkit"):  # noqa: SIM117
        with working_folders([tmp_path / "out"], keep=False):
            pytest.fail("it was taken")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "precious"


def test_killed_between_the_two_renames_the_old_checkpoint_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "old").touch()
    with caplog.at_level(logging.WARNING, logger="quantkit"):
        put_back_replaced(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "old").exists()
    assert "out was put back" in caplog.text


def test_killed_after_the_renames_only_the_user_may_delete(tmp_path: Path) -> None:
    for name in ("out", "out.replaced"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"out.replaced is in the way; .* Delete \S+out.replaced if"):
        put_back_replaced(tmp_path / "out")
    assert (tmp_path / "out.replaced").exists()
