"""The folder of a search: what lies where, and what may be written there."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.recipe import Recipe
from quantkit.search.journal import JOURNAL_FILE
from quantkit.source import ModelSource
from quantkit_eval.records import check_writable

DEFAULT_NAME = "search"
WINNER_FILE = "winner.yaml"
RESULT_FILE = "search.json"
PAGE_FILE = "search.html"
ELSEWHERE = "Choose another search.path"


@dataclass(frozen=True, slots=True)
class SearchFolder:
    """Where a search keeps what it makes."""

    root: Path

    @classmethod
    def of(cls, recipe: Recipe) -> "SearchFolder":
        """The recipe's, or ``search`` beside its first output."""
        return cls((recipe.require_search().path or recipe.outputs[0].path.parent / DEFAULT_NAME).absolute())

    @property
    def items(self) -> Path:
        """Parts of texts and files of items."""
        return self.root / "items"

    @property
    def baselines(self) -> Path:
        """The original's records, a folder an item set."""
        return self.root / "original"

    def trial(self, name: str) -> Path:
        """Of a candidate: its checkpoint and the records of its screening."""
        return self.root / "trials" / name

    def certification(self, name: str) -> Path:
        """The records of both models and the verdict on a candidate."""
        return self.root / "certified" / name

    def prepare(self, recipe: Recipe, source: ModelSource) -> None:
        """Make the folder, if it is ours or empty and in nobody's way.

        Raises:
            CheckpointError: it is not, and why.
            RecordError: it cannot be made.
        """
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"the search's folder {self.root} is a file", fix=ELSEWHERE)
        if self.root.is_dir() and any(self.root.iterdir()) and not (self.root / JOURNAL_FILE).exists():
            raise CheckpointError(f"the search's folder {self.root} is not empty and holds no search", fix=ELSEWHERE)
        here = self.root.resolve()
        read = {"the model's own folder": source.folder, "the current folder": Path.cwd()}
        if recipe.path is not None:
            read["the recipe"] = recipe.path
        for name, path in read.items():
            if here == path.resolve() or here in path.resolve().parents:
                raise CheckpointError(f"the search's folder {self.root} is or holds {name}", fix=ELSEWHERE)
        if source.folder.resolve() in here.parents:
            raise CheckpointError(f"the search's folder {self.root} is inside the model's own folder", fix=ELSEWHERE)
        for output in recipe.outputs:
            place = output.path.resolve()
            if here == place or here in place.parents or place in here.parents:
                raise CheckpointError(f"the search's folder {self.root} overlaps the output {place}", fix=ELSEWHERE)
        check_writable(self.root / JOURNAL_FILE)
        self.root.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Delete what an earlier search left; the journal is the caller's."""
        for name in ("trials", "certified", "original", "items"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.clear_result()

    def clear_result(self) -> None:
        """Delete the result: whoever looks after a failure must not find that of an earlier search."""
        for name in (WINNER_FILE, RESULT_FILE, PAGE_FILE):
            (self.root / name).unlink(missing_ok=True)
