"""Trials on a Ray cluster, for where one machine is too small. Imported only when an address is given."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from quantkit.errors import UsageError
from quantkit.evaluation_cache import source_digest
from quantkit.extras import install_command
from quantkit.search.executors import Pending, Result, failed
from quantkit.search.trial import Progress, TrialJob, run_trial

STATISTICS_SWITCH = "RAY_USAGE_STATS_ENABLED"  # Ray reports to its makers unless told not to
PORT_SECONDS = 10.0


class RayCluster:
    """Several trials at a time, each in a worker process of its own on whatever node has the threads free.

    Every node needs this very quantkit, and the search's folder, the model and the calibration's files under the same
    paths: a file system that all nodes share. A trial whose worker lacks them, or dies, is recorded as failed.

    Args:
        address: as ``ray.init`` takes it: ``HOST:PORT``, ``auto`` (a cluster that runs here) or
            ``local`` (a new one, of this machine).
        jobs: trials at the same time.
        progress: is told when a trial begins and ends.

    Raises:
        UsageError: Ray is not installed, nothing answers at the address, or no node has a processor.
    """

    def __init__(self, address: str, jobs: int, progress: Progress) -> None:
        self.jobs, self._address, self._progress = jobs, address, progress
        self._ray = _import_ray()
        os.environ.setdefault(STATISTICS_SWITCH, "0")
        try:
            _check_port(address)
            self._ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError among them
            raise UsageError(
                f"--ray {address}: no cluster ({' '.join(str(error).split())})",
                fix="Give the address that `ray start --head` printed, auto, or local",
            ) from error
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._processors = int(max((node.get("CPU", 0) for node in nodes), default=0))
        self._has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
        self._running: dict[str, Any] = {}
        if self._processors < 1:
            self._ray.shutdown()
            raise UsageError(f"--ray {address}: no node of the cluster offers a processor", fix="Add a node to it")

    def share(self, threads: int) -> int:
        """As many as the search itself has, or the largest node: a trial on no other machine's threads."""
        return min(threads, self._processors)

    def start(self, job: TrialJob) -> Pending:
        """Hand a trial to the cluster; it begins when a node has its threads free."""
        gpus = int(job.device != "cpu" and self._has_gpus)
        # A fresh process a trial takes its memory along; one that died would die again.
        options = {"num_cpus": job.threads, "num_gpus": gpus, "max_calls": 1, "max_retries": 0, "name": job.name}
        model = Path(job.recipe.require_model())
        paths = [Path.cwd(), job.baselines, *([model.absolute()] if model.exists() else [])]
        reference = self._ray.remote(**options)(run_on_worker).remote(job, paths, source_digest())
        self._running[job.name] = reference
        self._progress(f"{job.name}: on {self._address}", 0, 1)
        return lambda: self._wait(job, reference)

    def _wait(self, job: TrialJob, reference: Any) -> Result:
        try:
            result: Result = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            last = str(error).strip().splitlines() or [""]
            result = failed(job, f"its worker on the cluster failed: {type(error).__name__}: {last[0]} {last[-1]}")
        del self._running[job.name]
        self._progress(f"{job.name}: on {self._address}", 1, 1)
        return result

    def stop(self) -> None:
        """End what still runs, and leave the cluster; a local one ends with it."""
        for reference in self._running.values():
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._ray.shutdown()


def run_on_worker(job: TrialJob, paths: Sequence[Path], digest: str) -> Result:
    """The body of a worker: the trial, if this node can run it as the search's own would.

    Args:
        job: the trial.
        paths: that the node must see, the search's current folder first.
        digest: of the search's own source.
    """
    node = socket.gethostname()
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        shared = "the search's folder, the model and all data must be on a file system that all nodes share"
        return failed(job, f"{node} does not see {', '.join(missing)}; {shared}")
    if source_digest() != digest:
        return failed(job, f"{node} has another quantkit than the search; install the same on every node")
    os.chdir(paths[0])  # relative paths of the recipe; the process ends with the trial
    return run_trial(job)


def _check_port(address: str) -> None:
    """Raise OSError or ValueError at once if nothing listens there; Ray itself tries for many minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        socket.create_connection((host, int(port)), timeout=PORT_SECONDS).close()


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs the package ray", fix=install_command("ray")) from error
    module: ModuleType = ray
    return module
