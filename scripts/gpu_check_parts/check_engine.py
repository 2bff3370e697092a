"""The engine end to end: tokens a second beside what memory allows, and the same distribution as on the CPU."""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_check_parts.check_ops import one_line, require_usable
from gpu_check_parts.isolation import Records
from gpu_check_parts.random_llama import SCHEMES, write_checkpoints
from gpu_check_parts.timing import Budget
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.kv_cache import kv_block_bytes
from quantkit_kernels.launches import BYTES_PER_SECOND

Say = Callable[[str], None]
MAX_KL = 0.01  # nats, of a next token


def check_engine(
    device: torch.device, budget: Budget, say: Say, records: Records, *, tiny: bool, first: int = 0
) -> None:
    """A record for each kind of weights and size of batch, and one that compares the GPU with the CPU.

    Raises:
        BrokenContextError: behind a case that left the GPU unusable.
    """
    wanted = [(kind, size) for kind in SCHEMES for size in ((1, 2) if tiny else (1, 32, 256))][first:]
    is_compared = not tiny and first <= len(SCHEMES) * 3
    with tempfile.TemporaryDirectory() as root:
        folders = write_checkpoints(Path(root), tiny=tiny) if wanted or is_compared else {}
        for kind in dict.fromkeys(kind for kind, _ in wanted):
            sizes = [size for own, size in wanted if own == kind]
            _check_kind(kind, folders[kind], sizes, device, budget, say, records, tiny=tiny)
        if is_compared:
            record = records.begin(weights="bf16", compare="CPU")
            records.end(record, **_compare(folders["bf16"], device, budget, say))


def _check_kind(
    kind: str, folder: Path, sizes: list[int], device: torch.device, budget: Budget, say: Say, records: Records,
    *, tiny: bool,
) -> None:  # fmt: skip
    """One kind of weights, in one engine."""
    engine: Engine | None = None
    for size in sizes:
        record = records.begin(weights=kind, batch=size)
        if budget.is_spent:
            records.end(record, skipped=f"the {budget.seconds:.0f} s of this part are over")
            continue
        try:
            engine = engine or _engine(folder, device, tiny=tiny)
            records.end(record, **_speed(engine, size, tiny=tiny))
            say(f"engine, {kind}, batch {size}: {record['tokens_per_second']:.0f} tokens/s, "
                f"{record['roofline_fraction']:.0%} of the bandwidth")  # fmt: skip
        except Exception as error:  # whatever it is, the report holds it and the others run
            records.end(record, failed=one_line(error))
            say(f"engine, {kind}, batch {size}: FAILED {record['failed']}")
            require_usable(device, f"engine, {kind}, batch {size}")
    del engine
    gc.collect()
    require_usable(device, f"engine, {kind}")


def _engine(folder: Path, device: torch.device, *, tiny: bool, **options: Any) -> Engine:
    settings = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16} if tiny else {
        "max_model_len": 512, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
    }  # fmt: skip
    return Engine(
        folder,
        EngineConfig(
            device=options.pop("device", device.type),
            enable_prefix_caching=False,
            kv_block_size=16,
            **settings,
            **options,
        ),
    )


def _speed(engine: Engine, size: int, *, tiny: bool) -> dict[str, Any]:
    """Once to compile and to capture, then once for the clock; the dry run is timed at once."""
    prompt_len, new_tokens = (2, 3) if tiny else (128, 128)
    rounds = [_run(engine, size, prompt_len, new_tokens) for _ in range(1 if tiny else 2)]
    prefill, decode, steps, num_tokens = rounds[-1]
    seconds = decode / steps
    shapes, dtype = engine._loaded.shapes, engine._loaded.dtype
    token_bytes = kv_block_bytes(shapes, 1, dtype)
    moved = engine._loaded.weight_bytes + size * token_bytes * (prompt_len + new_tokens / 2)
    least = moved / BYTES_PER_SECOND
    return {
        "prompt_tokens_per_second": size * prompt_len / prefill,
        "tokens_per_second": num_tokens / decode,
        "milliseconds_per_step": seconds * 1e3,
        "roofline_milliseconds": least * 1e3,
        "roofline_fraction": least / seconds,
        "weight_bytes": engine._loaded.weight_bytes,
    }


def _run(engine: Engine, size: int, prompt_len: int, new_tokens: int) -> tuple[float, float, int, int]:
    """Seconds until every request has a token; seconds, steps and tokens of the decoding behind that."""
    generator = torch.Generator().manual_seed(size)
    vocab = engine.source.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for _ in range(size):
        engine.add_request(torch.randint(3, vocab, (prompt_len,), generator=generator).tolist(), params)
    waiting, start = size, time.perf_counter()
    decode_start, steps, num_tokens = start, 0, 0
    while engine.has_unfinished:
        outputs = engine.step()
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            for request in list(engine._requests):
                engine.abort(request)
            raise RuntimeError(errors[0])
        if waiting > 0:
            waiting = sum(request.num_output_tokens == 0 for request in engine.unfinished)
            decode_start = time.perf_counter()
        else:
            steps += 1
            num_tokens += len(outputs)
    return decode_start - start, time.perf_counter() - decode_start, max(1, steps), num_tokens


def _compare(folder: Path, device: torch.device, budget: Budget, say: Say) -> dict[str, Any]:
    """Mean KL divergence of the next tokens of a text, from the CPU's own path to the device."""
    if budget.is_spent:
        return {"skipped": f"the {budget.seconds:.0f} s of this part are over"}
    token_ids = list(range(100, 164))
    try:
        wanted = _engine(folder, device, tiny=True, device="cpu").score(token_ids)
        found = _engine(folder, device, tiny=False).score(token_ids)
    except Exception as error:  # whatever it is, the report holds it
        return {"failed": one_line(error)}
    divergence = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    say(f"engine, bf16: KL divergence from the CPU {divergence:.2e}, allowed {MAX_KL}")
    return {"kl_nats": divergence, "passed": divergence <= MAX_KL}
