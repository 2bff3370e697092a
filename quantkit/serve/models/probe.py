"""Run a model once at load, to learn the shapes of its cache and to be sure that the engine can run it.

transformers holds hundreds of decoders. The engine runs each one whose layers reach other tokens through our attention
function alone, because it lays the tokens of all requests in one row and keeps nothing but keys and values. That is
checked, not assumed: every layer must call attention once, with a causal mask that we can make ourselves; and a
sequence that is computed in two steps beside another one must end in the same logits as in one step alone.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import EngineError
from quantkit.serve.attention import PROBE, Probe
from quantkit.serve.attention_metadata import AttentionMetadata
from quantkit.serve.batch import Batch, build_batch, uncached_batch
from quantkit.serve.kv_cache import KVCache, KVShape
from quantkit.serve.request import Request, SamplingParams
from quantkit.serve.scheduler import Scheduled

# Mean difference of two ways to the same logits, relative to their spread. A leak between requests or a lost state is 1
# or more for every sequence. Rounding is far below that, but in bfloat16 a rare sequence amplifies it to nearly a half;
# so several are tried, and one that agrees is enough. With 8-bit inputs most amplify it, SmolLM2 to 0.1 to 0.3.
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
MAX_DIFFERENCE_OF_CODED_INPUTS = 0.4  # in bfloat16
NUM_SEQUENCES = 5
KV_BLOCK_SIZE = 2


def probe_model(model: nn.Module, dtype: torch.dtype, *, has_coded_inputs: bool = False) -> tuple[KVShape, ...]:
    """Shapes of the keys and values of each layer.

    Args:
        model: with our attention and our linear layers.
        dtype: to run it in.
        has_coded_inputs: some layers round their inputs to 8 bits.

    Raises:
        EngineError: the engine cannot run this model, and why.
    """
    config: Any = model.config
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise EngineError(f"the engine cannot run {config.model_type}: its forward has no logits_to_keep")
    if getattr(model, "_is_stateful", False):
        raise EngineError(f"the engine cannot run {config.model_type}: it keeps a state that is no cache of keys")
    is_coarse = has_coded_inputs and dtype == torch.bfloat16
    allowed = MAX_DIFFERENCE_OF_CODED_INPUTS if is_coarse else MAX_DIFFERENCE[dtype]
    shapes: tuple[KVShape, ...] = ()
    for attempt in range(NUM_SEQUENCES):
        token_ids, neighbour = _probe_ids(attempt, config.vocab_size)
        probe = Probe(dtype)
        token = PROBE.set(probe)
        try:
            alone = _logits(model, uncached_batch([token_ids]), None, dtype)[-1]
        finally:
            PROBE.reset(token)
        shapes = shapes or _shapes(probe, config)
        difference = _in_two_steps(model, token_ids, neighbour, shapes, dtype) - alone
        # A NaN passes: such a model fails its requests, each with a clear error.
        if not difference.abs().mean() > allowed * (alone - alone.mean()).abs().mean():
            return shapes
    raise EngineError(
        f"the engine cannot run {config.model_type}: its logits change when a sequence is computed in steps, "
        "beside another one"
    )


def _probe_ids(attempt: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """A sequence and a neighbour, spread over the vocabulary, others at each attempt."""
    ids = [(attempt + 1) * (31 * index + 1) % vocab_size for index in range(6)]
    return ids[:3], ids[3:]


def _shapes(probe: Probe, config: Any) -> tuple[KVShape, ...]:
    """Shapes of the keys and values of each layer, once all of them have been seen."""
    layers = range(config.num_hidden_layers)
    if sorted(probe.shapes) != list(layers):
        missing = min(set(layers) - probe.shapes.keys(), default=config.num_hidden_layers)
        raise EngineError(f"the engine cannot run {config.model_type}: layer {missing} does not use attention")
    return tuple(probe.shapes[layer] for layer in layers)


def _in_two_steps(
    model: nn.Module, token_ids: list[int], neighbour: list[int], shapes: tuple[KVShape, ...], dtype: torch.dtype
) -> Tensor:
    """[V] last logits of a sequence: first all tokens but one, then that one, each time behind another sequence."""
    cache = KVCache(shapes, 2 * len(token_ids), KV_BLOCK_SIZE, dtype)
    requests = [
        Request(name, tuple(ids), SamplingParams(), 1, frozenset(), None, None)
        for name, ids in (("neighbour", neighbour), ("probed", token_ids))
    ]
    requests[0].block_table, requests[1].block_table = [3, 1], [2, 4]
    cut = len(token_ids) - 1
    for start, count in ((0, cut), (cut, 1)):
        batch = build_batch([Scheduled(request, start, count) for request in requests], KV_BLOCK_SIZE)
        logits = _logits(model, batch, cache, dtype)
    assert batch.requests[-1] is requests[1]
    return logits[-1]


@torch.inference_mode()
def _logits(model: nn.Module, batch: Batch, cache: KVCache | None, dtype: torch.dtype) -> Tensor:
    """[T, V] float32 logits of all tokens of a batch."""
    try:
        output = model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            paged=AttentionMetadata(batch, cache, dtype),
        )
    except EngineError:
        raise
    except Exception as error:
        # Third-party code of any kind stands between; whatever it raises means that this model cannot be run.
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise EngineError(f"the engine cannot run {kind}: {type(error).__name__}: {error}") from error
    logits: Tensor = output.logits[0].float()
    return logits
