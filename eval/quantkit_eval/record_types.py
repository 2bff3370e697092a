"""What the records hold, as types; the JSON Schemas in ``schemas/`` say what every key means."""

from typing import Any, Literal, NotRequired, TypedDict

Outcome = Literal["pass", "fail", "inconclusive"]
Direction = Literal["higher_is_better", "lower_is_better"]
MetricValue = bool | int | float | str | None
Party = dict[str, Any]  # {"model", "engine", ...}: who was measured


class Sample(TypedDict):
    """One item of one suite."""

    schema_version: int
    suite: str
    id: str
    prompt_hash: str
    prompt: NotRequired[str]
    gold: NotRequired[Any]
    output: NotRequired[str]
    finish_reason: NotRequired[str]
    metrics: dict[str, MetricValue]


class Metric(TypedDict):
    """One number about a suite, with how sure it is."""

    value: float | None
    n: int
    interval: list[float] | None
    confidence: float | None
    method: str
    unit: str
    direction: Direction


class Histogram(TypedDict):
    """Counts between ascending edges; there is one edge more than counts."""

    edges: list[float]
    counts: list[int]
    unit: str


class SuiteRecord(TypedDict):
    """What one suite found. ``primary_metric`` is the right-or-wrong one of its items; None if it has none."""

    items_hash: str
    num_items: int
    options: dict[str, Any]
    primary_metric: str | None
    reference_sha256: NotRequired[str | None]
    metrics: dict[str, Metric]
    histograms: dict[str, Histogram]


class Result(TypedDict):
    """One model on its suites; ``not_offered`` says of each suite that could not be run why."""

    schema_version: int
    created: str
    model: dict[str, Any]
    engine: dict[str, Any]
    template_hash: str
    sampling: dict[str, float]
    seed: int
    machine: dict[str, Any]
    samples_sha256: str
    suites: dict[str, SuiteRecord]
    not_offered: NotRequired[dict[str, str]]


class Ratio(TypedDict):
    """Candidate over baseline; ``confidence`` is what the interval attains. A single pair has no interval."""

    value: float
    interval: list[float] | None
    confidence: float | None
    method: str


class ThroughputBatch(TypedDict):
    """Paired rates of one batch size: entry i of both lists was measured in the same turn."""

    batch_size: int
    baseline_tok_per_s: list[float]
    candidate_tok_per_s: list[float]
    ratio: Ratio


class Throughput(TypedDict):
    """Speed of two models on one machine."""

    schema_version: int
    created: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    baseline: Party
    candidate: Party
    batches: dict[str, ThroughputBatch]


class Latency(TypedDict):
    """Percentiles over all requests (or tokens) of all runs, in milliseconds."""

    p50: float
    p90: float
    p99: float
    n: int


class LoadRuns(TypedDict):
    """One model at one point: its rate in each turn, time to the first token, and time between tokens."""

    tok_per_s: list[float]
    ttft_ms: Latency
    itl_ms: Latency


class LoadPoint(TypedDict):
    """All models under one load; ``ratios`` are the candidates' over the baseline's rate, none in the open loop."""

    loop: Literal["closed", "open"]
    context: int
    batch: int | None
    qps: float | None
    runs: list[LoadRuns]
    ratios: list[Ratio]


class LoadMemory(TypedDict):
    """What a model takes, and how many requests of each length of prompt fit into the device beside its weights."""

    weight_bytes: int
    kv_bytes_per_token: float
    device_bytes: int | None
    concurrency: dict[str, int | None]


class Crossover(TypedDict):
    """Where a candidate falls behind the baseline; see ``crossovers``."""

    candidate: int
    context: int
    estimate: float | None
    proven: int | None
    fastest: int


class Load(TypedDict):
    """Speed of several models under load on one machine; the first one is the baseline."""

    schema_version: int
    created: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    models: list[Party]
    memory: list[LoadMemory]
    points: list[LoadPoint]
    crossovers: list[Crossover]


class Gate(TypedDict):
    """One judged number. ``value``, ``interval`` and ``limit`` belong together; see verdict.schema.json."""

    name: str
    suite: str
    metric: str
    kind: Literal["non_inferiority", "upper_bound", "ratio"]
    baseline: float | None
    candidate: float | None
    difference: float | None
    value: float | None
    interval: list[float] | None
    confidence: float | None
    test: str
    p_value: float | None
    p_holm: float | None
    limit: float
    unit: str
    direction: Direction
    n: int
    discordant: dict[str, int] | None
    verdict: Outcome
    reason: str
    items_needed: int | None


class Unjudged(TypedDict):
    """A metric that no gate asked about; null where a result lacks it."""

    suite: str
    metric: str
    baseline: float | None
    candidate: float | None
    unit: str


class Flipped(TypedDict):
    """An item that only one of the two models got right."""

    suite: str
    id: str
    prompt: str
    gold: Any
    baseline_output: str
    candidate_output: str
    direction: Literal["regressed", "improved"]
    divergence: int


class Changes(TypedDict):
    """How the answers of one suite differ, as text and by being right; ``median_divergence`` in characters."""

    suite: str
    n: int
    changed: int
    improved: int
    regressed: int
    median_divergence: float | None


class NoiseFloor(TypedDict):
    """The same for the baseline's model against itself: what differs there is no damage."""

    changes: list[Changes]
    kl_mean_nats: float | None


class Verdict(TypedDict):
    """The end of a comparison."""

    schema_version: int
    created: str
    verdict: Outcome
    exit_code: int
    reason: str
    alpha: float
    gates: list[Gate]
    unjudged: list[Unjudged]
    flipped: list[Flipped]
    changes: list[Changes]
    noise_floor: NoiseFloor | None
    baseline: Party
    candidate: Party


class ComparisonRow(TypedDict):
    """One model of a comparison of several; ``verdict``, ``reason`` and ``gates`` are empty for the baseline."""

    folder: str
    name: str
    scheme: str | None
    checkpoint_hash: str | None
    weight_bytes: int | None
    scores: dict[str, float | None]
    quality: float | None
    kl_mean_nats: float | None
    speed_ratio: float | None
    on_front: bool
    verdict: Outcome | None
    reason: str | None
    gates: dict[str, Outcome]


class Comparison(TypedDict):
    """Several candidates against one baseline."""

    schema_version: int
    created: str
    exit_code: int
    suites: list[str]
    baseline: ComparisonRow
    candidates: list[ComparisonRow]
