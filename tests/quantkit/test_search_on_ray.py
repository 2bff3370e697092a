"""Trials on a Ray cluster: what is asked of Ray and how its failures read, with a stand-in; and one real cluster."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.errors import UsageError
from quantkit.evaluation_cache import source_digest
from quantkit.extras import install_command
from quantkit.recipe import Recipe, load_recipe
from quantkit.recipe.search import PlannedSpeed
from quantkit.search import executors_ray
from quantkit.search.executors_ray import RayCluster, run_on_worker
from quantkit.search.search import search
from quantkit.search.trial import TrialJob

RECIPE = """\
version: 1
model: {model}
quantization: {{scheme: W4A16, algorithm: {{name: rtn}}}}
outputs: [{{format: compressed-tensors, path: out/ck}}]
gates: {{suites: [nll], max_kl_mean_nats: 0.5, num_items: {{nll: 10}}}}
search:
  path: found
  candidates:
    - {{name: w8, quantization: {{scheme: W8A16}}}}
    - {{name: w4, quantization: {{group_size: 64}}}}
  screening: {{num_items: {{nll: 9}}}}
"""


@pytest.fixture
def recipe(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE.format(model=tiny_llama_folder))
    return load_recipe("r.yaml")


class RayError(Exception):
    """As ray.exceptions has it."""


class StandIn(ModuleType):
    """The part of Ray that is used; tasks run when their result is asked for."""

    def __init__(self, dies: str | None = None, nodes: tuple[dict[str, float], ...] = ({"CPU": 4.0},)) -> None:
        super().__init__("ray")
        self.calls: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.exceptions = SimpleNamespace(RayError=RayError)
        self._dies, self._nodes = dies, nodes

    def init(self, **given: Any) -> None:
        self.calls.append(("init", given["address"]))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def remote(self, **options: Any) -> Callable[..., Any]:
        self.options.append(options)
        return lambda function: SimpleNamespace(remote=lambda *arguments: (options["name"], function, arguments))

    def get(self, reference: Any) -> Any:
        name, function, arguments = reference
        if name == self._dies:
            raise RayError("The worker died unexpectedly while executing this task.\nIt ran out of memory.")
        return function(*arguments)

    def cancel(self, reference: Any, *, force: bool) -> None:
        self.calls.append(("cancel", reference[0], force))

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandIn], StandIn]:
    monkeypatch.setenv(executors_ray.STATISTICS_SWITCH, "0")

    def put(module: StandIn) -> StandIn:
        monkeypatch.setitem(sys.modules, "ray", module)
        return module

    return put


def quiet(stage: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def test_trials_are_tasks_of_their_own_and_a_worker_that_dies_is_a_failed_trial(
    recipe: Recipe, use: Callable[[StandIn], StandIn]
) -> None:
    ray = use(StandIn(dies="w4"))
    document = search(recipe, executor=RayCluster("auto", 2, quiet))
    by_name = {row["name"]: row for row in document["trials"]}
    assert by_name["w4"]["status"] == "failed"
    assert "its worker on the cluster failed: RayError: The worker died" in by_name["w4"]["reason"]
    assert "ran out of memory" in by_name["w4"]["reason"]
    assert document["winner"] == "w8"
    assert [options["name"] for options in ray.options] == ["w4", "w8"]
    assert all((options["max_calls"], options["max_retries"]) == (1, 0) for options in ray.options)
    assert ray.calls == [("init", "auto"), "shutdown"]


def test_a_trial_takes_the_threads_of_the_search_if_a_node_has_them(use: Callable[[StandIn], StandIn]) -> None:
    use(StandIn(nodes=({"CPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}, {})))
    cluster = RayCluster("auto", 3, quiet)
    assert (cluster.share(4), cluster.share(16)) == (4, 8)
    ray = use(StandIn(nodes=({"memory": 1.0},)))
    with pytest.raises(UsageError, match="--ray auto: no node of the cluster offers a processor"):
        RayCluster("auto", 1, quiet)
    assert ray.calls[-1] == "shutdown"


def test_what_still_runs_is_ended(recipe: Recipe, tmp_path: Path, use: Callable[[StandIn], StandIn]) -> None:
    ray = use(StandIn(nodes=({"CPU": 2.0, "GPU": 1.0},)))
    cluster = RayCluster("auto", 1, quiet)
    cluster.start(_job(tmp_path, recipe))
    cluster.stop()
    assert ray.calls[1:] == [("cancel", "one", True), "shutdown"]
    assert (ray.options[0]["num_cpus"], ray.options[0]["num_gpus"]) == (1, 1)


def _job(baselines: Path, recipe: Recipe) -> TrialJob:
    return TrialJob("one", recipe.text, baselines / "one", baselines, (), {}, {}, "auto", 1, PlannedSpeed())


def test_a_node_that_lacks_the_files_or_has_another_quantkit_says_so(recipe: Recipe, tmp_path: Path) -> None:
    job = _job(tmp_path / "nowhere", recipe)
    unseen = run_on_worker(job, [tmp_path, job.baselines], source_digest())
    assert unseen["status"] == "failed"
    assert f"does not see {job.baselines}" in unseen["reason"]
    assert "on a file system that all nodes share" in unseen["reason"]
    other = run_on_worker(job, [tmp_path], "another")
    assert "has another quantkit than the search" in other["reason"]


def test_errors_are_one_line_with_the_way_out(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = CliRunner().invoke(main, ["search", "-r", "r.yaml", "--ray", "auto"])
    assert missing.exit_code == 2
    assert f"--ray needs the package ray. {install_command('ray')}" in missing.stderr

    class Unreachable(StandIn):
        def init(self, **given: Any) -> None:
            raise ConnectionError("Could not find any running\nRay instance.")

    monkeypatch.setitem(sys.modules, "ray", Unreachable())
    refused = CliRunner().invoke(main, ["search", "-r", "r.yaml", "--ray", "auto"])
    assert refused.exit_code == 2
    assert "--ray auto: no cluster (Could not find any running Ray instance.)" in refused.stderr
    for address, reason in (("127.0.0.1:1", "refused"), ("127.0.0.1:x", "'x'")):  # before Ray is asked
        closed = CliRunner().invoke(main, ["search", "-r", "r.yaml", "--ray", address])
        assert closed.exit_code == 2
        assert f"--ray {address}: no cluster (" in closed.stderr
        assert reason in closed.stderr
    assert not Path("found").exists()


def test_the_local_default_imports_no_ray(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(main, ["search", "-r", "r.yaml", "--budget-minutes", "0.0000001"])
    assert done.exit_code == 4, done.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_real_cluster_of_one_processor_finds_the_same(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs ray (pip install ray)")
    monkeypatch.setenv(executors_ray.STATISTICS_SWITCH, "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        document = search(recipe, executor=RayCluster(cluster.address, 2, quiet))
    finally:
        cluster.shutdown()
    statuses = {row["name"]: row["status"] for row in document["trials"]}
    assert statuses == {"w4": "hopeless", "w8": "promising"}, [row["reason"] for row in document["trials"]]
    assert document["winner"] == "w8"
    assert os.environ[executors_ray.STATISTICS_SWITCH] == "0"
