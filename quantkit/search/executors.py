"""Where trials run: here one after the other, or in processes of their own, several at a time."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from quantkit.search.trial import Progress, TrialJob, run_trial

Result = dict[str, Any]
Pending = Callable[[], Result]  # waits for the record of a trial that was begun


class Executor(Protocol):
    """Begins trials and ends those that nobody needs any more."""

    @property
    def jobs(self) -> int:
        """Trials that run at the same time."""

    def share(self, threads: int) -> int:
        """Threads of each trial where the search itself has so many."""

    def start(self, job: TrialJob) -> Pending:
        """Begin a trial."""

    def stop(self) -> None:
        """End what still runs."""


class InProcess:
    """One trial at a time, when its result is asked for; its progress is shown."""

    jobs = 1

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def share(self, threads: int) -> int:
        """All."""
        return threads

    def start(self, job: TrialJob) -> Pending:
        """The trial itself runs when the result is asked for."""
        return lambda: run_trial(job, lambda stage, done, total: self._progress(f"{job.name}: {stage}", done, total))

    def stop(self) -> None:
        """Nothing runs."""


class Processes:
    """A fresh process a trial: it can be ended, and takes its memory along.

    Args:
        jobs: at the same time.
        progress: is told when a trial begins and ends.
    """

    def __init__(self, jobs: int, progress: Progress) -> None:
        self.jobs = jobs
        self._progress = progress
        self._context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
        self._running: list[BaseProcess] = []

    def share(self, threads: int) -> int:
        """An equal part."""
        return max(1, threads // self.jobs)

    def start(self, job: TrialJob) -> Pending:
        """Begin a trial now."""
        mine, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run_and_send, args=(job, theirs), name=job.name, daemon=True)
        process.start()
        theirs.close()
        self._running.append(process)
        self._progress(f"{job.name}: in process {process.pid}", 0, 1)
        return lambda: self._wait(job, process, mine)

    def _wait(self, job: TrialJob, process: BaseProcess, mine: Connection) -> Result:
        try:
            result: Result = mine.recv()
        except EOFError:
            process.join()
            reason = f"its process ended with code {process.exitcode} (-9: killed, most often for want of memory)"
            result = failed(job, reason)
        process.join()
        self._running.remove(process)
        self._progress(f"{job.name}: in process {process.pid}", 1, 1)
        return result

    def stop(self) -> None:
        """Terminate what still runs."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.join()
        self._running.clear()


def failed(job: TrialJob, reason: str) -> Result:
    """The record of a trial that could not give its own."""
    return {"name": job.name, "status": "failed", "reason": reason, "rounds": 0, "scores": {}, "seconds": 0.0}


def _run_and_send(job: TrialJob, connection: Connection) -> None:
    """The body of a process."""
    connection.send(run_trial(job))
    connection.close()
