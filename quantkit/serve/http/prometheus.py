"""The page /metrics: what the engine and the server count, in Prometheus' text format 0.0.4 under vLLM's names."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quantkit.serve.metrics import EngineMetrics, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


@dataclass
class ServerMetrics:
    """What only the server knows.

    Attributes:
        responses: by path and status.
        structured: structured answers by what validation said: ``true``, ``false``, or ``unknown``.
        truncated: structured answers that max_tokens cut off.
        repaired: structured answers that are valid although the model gave its legal tokens less than nearly all of the
            probability.
        tool_calls: calls of functions that models asked for.
        disconnects: clients that went before they had their answer.
    """

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    structured: Counter[str] = field(default_factory=lambda: Counter({"true": 0, "false": 0, "unknown": 0}))
    truncated: int = 0
    repaired: int = 0
    tool_calls: int = 0
    disconnects: int = 0


class _Page:
    """Collects lines.

    Args:
        labels: on every value.
    """

    def __init__(self, labels: Labels) -> None:
        self.lines: list[str] = []
        self._labels = dict(labels)

    def add(self, name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> None:
        """One metric and its values by label."""
        self._head(name, kind, text)
        self.lines += [self._line(name, labels, value) for labels, value in values]

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """One histogram; Prometheus' buckets count everything below their bound."""
        self._head(name, "histogram", text)
        below = 0
        for bound, count in zip((*map(_number, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            below += count
            self.lines.append(self._line(f"{name}_bucket", {"le": bound}, below))
        self.lines.append(self._line(f"{name}_sum", {}, histogram.total))
        self.lines.append(self._line(f"{name}_count", {}, below))

    def _head(self, name: str, kind: str, text: str) -> None:
        self.lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def _line(self, name: str, labels: Labels, value: float) -> str:
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in (self._labels | dict(labels)).items())
        return f"{name}{{{pairs}}} {_number(value)}"


def metrics_page(model: str, engine: EngineMetrics, server: ServerMetrics) -> str:
    """All metrics as text.

    Args:
        model: name that is served, a label of every value.
        engine: as of now.
        server: as of now.
    """
    page = _Page({"model_name": model})
    gauges = (
        ("vllm:num_requests_running", "Continuations that run.", engine.num_running),
        ("vllm:num_requests_waiting", "Continuations that wait.", engine.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of the cache blocks in use; 1 is all.", engine.kv_cache_usage),
        ("quantkit:swap_usage_perc", "Share of the host blocks in use; 1 is all.", engine.swap_usage),
    )
    for name, text, value in gauges:
        page.add(name, "gauge", text, [({}, value)])
    counters = (
        ("vllm:prompt_tokens_total", "Tokens of prompts that were taken.", engine.prompt_tokens),
        ("vllm:generation_tokens_total", "New tokens.", engine.generation_tokens),
        ("vllm:num_preemptions_total", "Requests whose cache was given to others.", engine.preemptions),
        ("vllm:prefix_cache_queries_total", "Tokens looked for in the prefix cache.", engine.prefix_cache_queries),
        ("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", engine.prefix_cache_hits),
        ("quantkit:engine_steps_total", "Forward steps.", engine.steps),
        ("quantkit:forced_tokens_total", "New tokens for which a form left no choice.", engine.forced_tokens),
        ("quantkit:structured_truncated_total", "Structured answers cut off by max_tokens.", server.truncated),
        ("quantkit:structured_repaired_total", "Valid answers that the form had to hold up.", server.repaired),
        ("quantkit:tool_calls_total", "Calls of functions that the model asked for.", server.tool_calls),
        ("quantkit:client_disconnects_total", "Clients that went before the end.", server.disconnects),
    )
    for name, text, value in counters:
        page.add(name, "counter", text, [({}, value)])
    finished = [({"finished_reason": reason}, count) for reason, count in engine.requests.items()]
    page.add("vllm:request_success_total", "counter", "Continuations that ended, by reason.", finished)
    validity = [({"valid": verdict}, count) for verdict, count in server.structured.items()]
    page.add("quantkit:structured_schema_valid_total", "counter", "Structured answers, validated.", validity)
    responses = [({"path": path, "status": str(code)}, count) for (path, code), count in server.responses.items()]
    page.add("quantkit:http_responses_total", "counter", "Answers by path and status.", responses)
    page.histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", engine.ttft)
    page.histogram("vllm:inter_token_latency_seconds", "Between two tokens.", engine.itl)
    page.histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", engine.e2e)
    return "\n".join(page.lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
