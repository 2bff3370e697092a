"""Which items choose a candidate and which certify it: two sets that share none.

Suites whose items come from a seed get other seeds, and the seed of the certification is one whose prompts are none of
the screening's. Texts and files of the user's are cut: every third document or item screens, the others certify. What
can be neither is asked only at the end.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError
from quantkit.recipe import Recipe
from quantkit_eval.records import write_atomically
from quantkit_eval.suites import load_suite
from quantkit_eval.suites.graded import GeneratedSuite
from quantkit_eval.suites.nll import DOCUMENT_SEPARATOR, NllOptions, split_documents

SCREENING_ITEMS = 16  # of a suite in a round
SCREENING_WINDOWS = 16  # of text
SHARE = 3  # one of so many documents or lines screens
SEEDS = 64  # that are tried for a certification without a prompt of the screening
FEW_SEEDS, MANY_SHARED = 8, 8  # where so few seeds all share more than so many, no seed will do
Options = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ItemSet:
    """What a model is asked at once.

    Attributes:
        name: of the folder of its records.
        suites: as `quantkit_eval.evaluate.evaluate` takes them.
        seed: of the items.
    """

    name: str
    suites: Options
    seed: int

    @property
    def has_reference(self) -> bool:
        """Whether a candidate's records refer to the baseline's distributions."""
        return "nll" in self.suites


@dataclass(frozen=True, slots=True)
class Holdout:
    """The rounds of the screening, in order, and the certification."""

    screening: tuple[ItemSet, ...]
    certification: ItemSet


def split_items(recipe: Recipe, folder: Path) -> Holdout:
    """Divide what the recipe's gates ask.

    The screening asks only what a limit is about: the text first, because it is cheap and tells most.

    Args:
        recipe: with a search.
        folder: where the parts of texts and files are written.

    Raises:
        RecipeError: a suite has too few different items for two sets.
    """
    search, options = recipe.require_search(), recipe.gates.suite_options
    first = (search.seed + 1) * 1000
    cheap: dict[str, dict[str, Any]] = {}
    drawn: dict[str, dict[str, Any]] = {}
    final: dict[str, dict[str, Any]] = {}
    for name, given in options.items():
        wanted = search.screening.num_items.get(name, SCREENING_WINDOWS if name == "nll" else SCREENING_ITEMS)
        last = search.certification.num_items.get(name)
        key = "max_windows" if name == "nll" else "num_items"
        final[name] = dict(given) | ({} if last is None else {key: last})
        few = dict(given) | {key: wanted}
        if name == "nll":
            text, other = _cut_text(NllOptions(text_path=given.get("text_path")), folder)
            final[name]["text_path"] = str(other)
            if recipe.gates.max_kl_mean_nats is not None:
                cheap[name] = few | {"text_path": str(text)}
        elif given.get("kind") == "file":
            path, other = _cut_lines(Path(given["path"]), folder, name)
            final[name]["path"] = str(other)
            if name in recipe.gates.max_drop_pp:
                cheap[name] = few | {"path": str(path)}
        elif isinstance(load_suite(name, given.get("kind")), GeneratedSuite) and name in recipe.gates.max_drop_pp:
            drawn[name] = few
    rounds = [ItemSet("fixed", cheap, first)] if cheap else []
    rounds += [ItemSet(f"round-{number}", drawn, first + number) for number in range(search.screening.rounds) if drawn]
    return Holdout(tuple(rounds), ItemSet("certification", final, _fresh_seed(rounds, final, first + 100)))


def _fresh_seed(rounds: list[ItemSet], final: Options, first: int) -> int:
    """The first seed whose prompts the screening has not seen."""
    seen = {prompt for item_set in rounds for prompt in _prompts(item_set.suites, item_set.seed)}
    fewest: set[str] = set()
    for seed in range(first, first + SEEDS):
        if seed == first + FEW_SEEDS and len(fewest) > MANY_SHARED:
            break
        shared = seen & _prompts(final, seed)
        if not shared:
            return seed
        fewest = shared if not fewest or len(shared) < len(fewest) else fewest
    names = ", ".join(sorted({json.loads(prompt)[0] for prompt in fewest}))
    raise RecipeError(
        f"search: {names} has too few different items: {len(fewest)} of the certification would be of the screening",
        fix="Lower search.screening.num_items or search.certification.num_items of that suite",
    )


def _prompts(suites: Options, seed: int) -> set[str]:
    """What the generated suites ask with a seed; a constrained suite asks what the free one does."""
    found = set()
    for name, options in suites.items():
        suite = load_suite(name, options.get("kind"))
        if isinstance(suite, GeneratedSuite):
            for item in suite.generate(suite.options(name, options).num_items, seed):
                found.add(json.dumps([name.partition("+")[0], item.prompt, list(item.messages)]))
    return found


def _cut_text(options: NllOptions, folder: Path) -> tuple[Path, Path]:
    """The text of nll as two files: some documents for the screening, the others for the certification."""
    documents = [document for document in split_documents(options.read_text()) if document.strip()]
    if len(documents) < SHARE:
        raise RecipeError(
            f"search: the text of nll has {len(documents)} documents in {options.text_path}; {SHARE} are the fewest to"
            " divide",
            fix=f"Separate its documents by lines with {DOCUMENT_SEPARATOR} alone",
        )
    parts = (
        [document for number, document in enumerate(documents) if (number % SHARE == 1) is screens]
        for screens in (True, False)
    )
    screening, certification = (_keep(f"\n{DOCUMENT_SEPARATOR}\n".join(part), folder, "nll", ".txt") for part in parts)
    return screening, certification


def _cut_lines(path: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """A user's items as two files; lines that went elsewhere are left blank, so that numbers of lines stay."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    items = [number for number, line in enumerate(lines) if line.strip()]
    if len(items) < SHARE:
        raise RecipeError(
            f"search: the suite {name} has {len(items)} items in {path}; {SHARE} are the fewest to divide"
        )
    chosen = set(items[1::SHARE])
    parts = (
        "\n".join(line if (number in chosen) is screens else "" for number, line in enumerate(lines))
        for screens in (True, False)
    )
    screening, certification = (_keep(part, folder, name, ".jsonl") for part in parts)
    return screening, certification


def _keep(content: str, folder: Path, name: str, suffix: str) -> Path:
    """A file that is called after its content, so that what is cached by its path never goes stale."""
    path = folder / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}{suffix}"
    write_atomically(path, content)
    return path.resolve()
