"""The search itself: candidates from the smallest upwards, screened, certified, until one passes."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.output_paths import check_reports
from quantkit.errors import CheckpointError
from quantkit.evaluation_cache import source_digest
from quantkit.gate import check_recipe_suites
from quantkit.recipe import Recipe, name_places
from quantkit.recipe.variants import at_folder, recipe_data, variant_text
from quantkit.search.candidates import Candidate, find_candidates
from quantkit.search.certify import certify, evaluate_original
from quantkit.search.executors import Executor, InProcess, Pending, Processes
from quantkit.search.folder import SearchFolder
from quantkit.search.holdout import Holdout, split_items
from quantkit.search.journal import SearchJournal, key_of, open_journal
from quantkit.search.outcome import certified_record, conclude, write_outcome
from quantkit.search.trial import TrialJob, build
from quantkit.serve.device import DeviceName
from quantkit.source import ModelSource, open_model
from quantkit.source.gguf import file_sha256
from quantkit_eval.statistics import ALPHA

Progress = Callable[[str, int, int], None]
BUILTIN = "builtin"


@dataclass(slots=True)
class _Run:
    """What the steps of a search share."""

    recipe: Recipe
    source: ModelSource
    folder: SearchFolder
    journal: SearchJournal
    holdout: Holdout
    executor: Executor
    device: DeviceName
    threads: int
    deadline: float
    progress: Progress
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def alpha(self) -> float:
        """One-sided error of a bound in a certification."""
        return ALPHA / self.recipe.require_search().certification.attempts


def search(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int = 1,
    minutes: float | None = None,
    device: DeviceName = "auto",
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Find the smallest candidate that passes the recipe's gates.

    Args:
        recipe: names a model and has a search.
        resume: go on with the search in its folder; finished trials are not repeated.
        overwrite: replace the search in its folder, and reports.
        jobs: trials at the same time, each in a process with its share of the threads.
        minutes: budget, in place of the recipe's.
        device: where the engines run.
        progress: is called with (stage, done, total).
        executor: where trials run, in place of this machine.

    Returns:
        The content of search.json; ``exit_code`` is 0 (a candidate passes), 3 (none does) or 4 (not decided).

    Raises:
        QuantkitError, EvalError: anything that stops the search before there is an outcome.
    """
    tell = progress or (lambda stage, done, total: None)
    started, settings, threads = time.monotonic(), recipe.require_search(), torch.get_num_threads()
    check_recipe_suites(recipe)
    source = open_model(recipe)
    folder = SearchFolder.of(recipe)
    candidates, left_out = find_candidates(recipe, source)
    _check_places(recipe, source, folder, allowed=resume or overwrite)
    executor = executor or (InProcess(tell) if jobs == 1 else Processes(jobs, tell))
    with open_journal(folder.root, _identity(recipe, source), resume=resume, overwrite=overwrite) as journal:
        folder.clear_result() if resume else folder.clear()
        with name_places(recipe, "search"):
            holdout = split_items(recipe, folder.items)
        prompts = evaluate_original(source, holdout, folder.baselines, device, tell)
        budget = minutes or settings.budget.minutes or float("inf")
        deadline = started + 60 * budget
        run = _Run(recipe, source, folder, journal, holdout, executor, device, threads, deadline, tell)
        try:
            winner = _climb(run, candidates)
        finally:
            executor.stop()
            torch.set_num_threads(threads)
        document = conclude(recipe, candidates, left_out, run.trials, winner, run.stopped, run.alpha)
        document |= {"items": _describe_items(holdout, prompts), "seconds": round(time.monotonic() - started, 1)}
        write_outcome(recipe, folder, candidates, document)
    return document


def _check_places(recipe: Recipe, source: ModelSource, folder: SearchFolder, *, allowed: bool) -> None:
    """Everything that will be written can be, and replaces nothing unasked."""
    check_reports(recipe, source)
    for path in recipe.report.paths.values():
        if path.exists() and not allowed:
            raise CheckpointError(f"{path} of an earlier run exists", fix="Give --overwrite to replace it")
    folder.prepare(recipe, source)


def _identity(recipe: Recipe, source: ModelSource) -> dict[str, Any]:
    """What must be the same for a search to go on; a budget may change."""
    data = {key: value for key, value in recipe_data(recipe).items() if key not in ("report", "model")}
    data["search"] = {key: value for key, value in data["search"].items() if key not in ("budget", "path")}
    return {
        "recipe": key_of(recipe=data),
        "model": source.fingerprint(),
        "quantkit": source_digest()[:32],
        **{name: metadata.version(name) for name in ("torch", "transformers")},
    }


def _climb(run: _Run, candidates: Sequence[Candidate]) -> str | None:
    """Try candidates until one is certified. Returns its name."""
    attempts = run.recipe.require_search().certification.attempts
    made = 0
    for candidate, job, key in _tried(run, candidates):
        record = run.trials[candidate.name]
        run.progress(f"{candidate.name}: {record['status']}: {record['reason']}", 1, 1)
        if record["status"] == "promising":
            if made == attempts:
                run.stopped = f"all {attempts} certifications are used up"
                job.remove_checkpoints()
                return None
            made += 1
            record["certified"] = _attempt(run, job, key, made)
            run.progress(f"{candidate.name}: certified: {record['certified']['verdict']}", 1, 1)
            if record["certified"]["verdict"] == "pass":
                return candidate.name
        job.remove_checkpoints()
    return None


def _tried(run: _Run, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, TrialJob, str]]:
    """The candidates in order as their trials end; as many run at a time as the executor takes."""
    limit = run.recipe.require_search().budget.trials or len(candidates)
    waiting: deque[tuple[Candidate, TrialJob, str, Pending]] = deque()
    rest = iter(candidates[:limit])
    while True:
        while len(waiting) < run.executor.jobs and (candidate := next(rest, None)) is not None:
            job = _job(run, candidate)
            key = _key(run, candidate, job)
            known = run.journal.find("trial", key)
            known = None if known is not None and known["status"] == "failed" else known
            if known is None and time.monotonic() >= run.deadline:
                run.stopped = "the budget of time is used up"
                rest = iter(())
                break
            waiting.append((candidate, job, key, run.executor.start(job) if known is None else _known(known)))
        if not waiting:
            break
        candidate, job, key, pending = waiting.popleft()
        record = pending()
        torch.set_num_threads(run.threads)
        if run.journal.find("trial", key) != record:
            run.journal.record("trial", key, record)
        run.trials[candidate.name] = record
        yield candidate, job, key
    if run.stopped is None and limit < len(candidates):
        run.stopped = f"the budget of {limit} trials is used up"


def _known(record: dict[str, Any]) -> Pending:
    return lambda: dict(record)


def _job(run: _Run, candidate: Candidate) -> TrialJob:
    folder = run.folder.trial(candidate.name)
    return TrialJob(
        name=candidate.name,
        recipe_text=variant_text(at_folder(candidate.data, folder)),
        folder=folder,
        baselines=run.folder.baselines,
        rounds=run.holdout.screening,
        limits=run.recipe.gates.limits,
        suites=run.holdout.certification.suites,
        device=run.device,
        threads=run.executor.share(run.threads),
        speed=run.recipe.require_search().speed,
    )


def _key(run: _Run, candidate: Candidate, job: TrialJob) -> str:
    """Of everything that a trial's record depends on."""
    return key_of(
        identity=dict(run.journal.identity or {}),
        recipe={key: value for key, value in candidate.data.items() if key not in ("model", "report")},
        files=_input_files(job.recipe),
        rounds=[[one.suites, one.seed] for one in job.rounds],
        limits=job.limits,
        device=job.device,
        threads=job.threads,
    )


def _input_files(recipe: Recipe) -> dict[str, str]:
    """The files that calibration and tuning read, with their SHA-256."""
    tuning = recipe.require_quantization().tuning
    sources = [
        *((recipe.calibration.sources if recipe.calibration else None) or ()),
        *((tuning and tuning.sources) or ()),
    ]
    named = [getattr(source, key, BUILTIN) for source in sources for key in ("path", "seed_prompts")]
    return {name: file_sha256(Path(name)) for name in named if name != BUILTIN and Path(name).is_file()}


def _attempt(run: _Run, job: TrialJob, trial: str, number: int) -> dict[str, Any]:
    """Certify a candidate, rebuilt first if its trial had other threads than `quantkit quantize` will have."""
    item_set = run.holdout.certification
    key = key_of(trial=trial, suites=item_set.suites, seed=item_set.seed, alpha=run.alpha, threads=run.threads)
    known = run.journal.find("certification", key)
    if known is not None and (known["verdict"] != "pass" or job.checkpoint.is_dir()):
        return known
    own = replace(job, threads=run.threads)
    if job.threads != run.threads:
        own.remove_checkpoints()
    built = build(own, lambda stage, done, total: run.progress(f"{job.name}: {stage}", done, total))
    records = run.folder.certification(job.name)
    baseline = run.folder.baselines / item_set.name

    def tell(stage: str, done: int, total: int) -> None:
        run.progress(f"{job.name}, certification: {stage}", done, total)

    verdict = certify(run.recipe, job.checkpoint, run.source, item_set, baseline, records, run.alpha, run.device, tell)
    record = certified_record(verdict, number) | built
    run.journal.record("certification", key, record)
    return record


def _describe_items(holdout: Holdout, prompts: dict[str, int]) -> dict[str, Any]:
    """Which items chose and which certified, and that they are different ones."""
    return {
        "screening": {"seeds": [one.seed for one in holdout.screening], "prompts": prompts["screening"]},
        "certification": {"seed": holdout.certification.seed, "prompts": prompts["certification"]},
        "shared_prompts": prompts["shared"],
    }
