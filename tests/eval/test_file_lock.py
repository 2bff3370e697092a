"""One writer at a time in a folder of records: seen from other processes, gone with them, in nobody's way."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantkit_eval.errors import RecordError
from quantkit_eval.file_lock import hold_records, try_lock

CODE = (
    "import sys\nfrom pathlib import Path\nfrom quantkit_eval.file_lock import hold_records\n"
    "with hold_records(Path(sys.argv[1])):\n    print('in', flush=True)\n    sys.stdin.read()"
)


def test_a_folder_that_another_process_holds_is_refused_until_it_dies(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "records"
    command = [sys.executable, "-c", CODE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(RecordError, match=r"run/records: another run or evaluation is writing .* Wait for it"):  # noqa: SIM117
            with hold_records(folder):
                pytest.fail("two writers in one folder")
        other.kill()
    assert (folder / ".lock").exists()  # killed: nothing was cleaned up
    with hold_records(folder):
        (folder / "result.json").touch()
    assert [path.name for path in folder.iterdir()] == ["result.json"]


def test_of_what_was_made_only_what_is_empty_goes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), hold_records(tmp_path / "a" / "b" / "c"):  # noqa: PT012 - what fails inside
        (tmp_path / "a" / "kept").touch()
        raise KeyboardInterrupt
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["a", "a/kept"]


def test_a_lock_that_was_moved_with_its_folder_is_none_of_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with try_lock(tmp_path / "old" / ".lock") as first:
        (tmp_path / "old").rename(tmp_path / "moved")
        (tmp_path / "old").mkdir()
        with try_lock(tmp_path / "old" / ".lock") as second, try_lock(tmp_path / "moved" / ".lock") as third:
            assert (first, second, third) == (True, True, False)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=r"file/records: cannot be written \(Not a directory\)"):  # noqa: SIM117
        with hold_records(tmp_path / "file" / "records"):
            pytest.fail("it was made")
