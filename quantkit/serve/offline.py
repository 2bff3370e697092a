"""Continue a list of prompts and wait for all of them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quantkit.errors import EngineError, UsageError
from quantkit.serve.outputs import Completion, RequestOutput, join_outputs
from quantkit.serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quantkit.serve.engine import Engine


def generate_all(
    engine: "Engine", prompts: Iterable[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """See `Engine.generate`; the engine has no other requests."""
    prompts = list(prompts)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts and {len(each)} sampling parameters")
    names: list[str] = []
    try:
        for prompt, one in zip(prompts, each, strict=True):
            names.append(engine.add_request(prompt, one, stream=False))
        return _run(engine)
    finally:
        for name in names:  # those that are left when something went wrong
            engine.abort(name)


def _run(engine: "Engine") -> list[Completion]:
    requests = engine.unfinished
    outputs: dict[tuple[str, int], list[RequestOutput]] = {
        (request.request_id, request.index): [] for request in requests
    }
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id, output.index].append(output)
            if output.error is not None:
                raise EngineError(f"{output.request_id} failed: {output.error}")
    prompts = [request.prompt_token_ids for request in requests]
    return [join_outputs(prompt, found) for prompt, found in zip(prompts, outputs.values(), strict=True)]
