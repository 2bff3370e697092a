#!/usr/bin/env python3
"""Push many requests of random shapes through an engine that is short of cache, and look for what leaks or goes wrong.

    scripts/soak_serve.py MODEL [--requests 2000] [--seed 0] [--deterministic] [--dtype float32] [--write]

Requests come and are aborted at random, as those of a client that goes away are; prompts share beginnings, some answers
must have a form, continuations branch, blocks are preempted, swapped and evicted. After every step the books must
balance; each continuation must end once; an answer that was not aborted must be that of an engine with room for
everything. With --deterministic all must be; without it the last bits of logits depend on the batch, so that one answer
in a thousand may differ where two tokens are nearly equal. In bfloat16 such bits are coarse and these prompts, random
tokens, lead to answers that are nearly random too: one in ten then differs and says nothing; give --dtype float32.
Memory is what stays with the process when freed blocks have gone back to the system. The exit code is 1 if not.
"""

import argparse
import ctypes
import gc
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from marked_page import machine_line, write_between_marks
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.cache_size import cache_block_bytes
from quantkit.serve.structured.spec import StructuredOutput
from quantkit_eval.machine import describe_machine

MAX_MODEL_LEN, KV_BLOCK_SIZE, MAX_NUM_SEQS = 256, 16, 8
TIGHT_BLOCKS = 24  # of them 23 for requests of up to 16
FORMS = (
    StructuredOutput.choice(["yes", "no", "perhaps"]),
    StructuredOutput.regex("[0-9]{3}-[0-9]{4}"),
    StructuredOutput.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
    ),
)
MAX_DIFFERENT = 0.001  # of the continuations, if not deterministic
MAX_GROWTH = 32 << 20  # bytes of resident memory in the second half


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and after how many steps it is aborted."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    abort_after: int | None


@dataclass(slots=True)
class Findings:
    """What a soak found."""

    is_deterministic: bool = False
    requests: int = 0
    continuations: int = 0
    aborted: int = 0
    structured: int = 0
    steps: int = 0
    preemptions: int = 0
    swaps: int = 0
    prefix_cache_hit_rate: float = 0.0
    different: int = 0
    leaked_blocks: int = 0
    memory_growth: int = 0

    @property
    def is_clean(self) -> bool:
        """True if nothing leaked and the answers are right."""
        limit = 0 if self.is_deterministic else MAX_DIFFERENT * self.continuations
        return not self.leaked_blocks and self.different <= limit and self.memory_growth <= MAX_GROWTH


def make_requests(count: int, seed: int, vocab_size: int) -> list[Asked]:
    """Random ones; half of the prompts begin with one of three texts."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(5, vocab_size) for _ in range(length)] for length in (16, 50, 90)]
    asked = []
    for number in range(count):
        prompt = [draw.randrange(5, vocab_size) for _ in range(draw.choice([1, 3, 10, 40, 80]))]
        if draw.random() < 0.5:
            prompt = draw.choice(beginnings) + prompt
        form = draw.choice(FORMS) if draw.random() < 0.2 else None
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 0, 40]),
            min_p=draw.choice([0.0, 0.0, 0.05]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            max_tokens=draw.choice([1, 5, 20, 60]),
            min_tokens=draw.choice([0, 0, 1]) if form is None else 0,
            ignore_eos=draw.random() < 0.5,
            n=draw.choice([1, 1, 1, 3]),
            seed=number,
            logprobs=draw.choice([None, None, 2]),
            prompt_logprobs=draw.choice([None, None, None, None, 1]),
            structured=form,
        )
        abort_after = draw.randrange(30) if draw.random() < 0.15 else None
        asked.append(Asked(prompt, params, draw.choice([0, 0, 0, 1]), abort_after))
    return asked


def resident_bytes() -> int:
    """Memory of this process that is not free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmRSS")


def run_disturbed(engine: Engine, asked: list[Asked], seed: int, found: Findings) -> dict[tuple[int, int], list[int]]:
    """Tokens of each continuation that was not aborted; the books are looked at after every step."""
    draw = random.Random(seed)
    outputs: dict[tuple[str, int], list[tuple[str | None, str | None, list[int]]]] = {}  # no more: memory is measured
    deadlines: dict[str, int] = {}
    number = halftime = 0
    while number < len(asked) or engine.has_unfinished:
        while number < len(asked) and (not engine.has_unfinished or draw.random() < 0.4):
            one = asked[number]
            engine.add_request(one.prompt, one.params, request_id=str(number), priority=one.priority)
            if one.abort_after is not None:
                deadlines[str(number)] = found.steps + one.abort_after
            number += 1
        if number >= len(asked) // 2 and not halftime:
            halftime = resident_bytes()
        arrived = engine.step()
        found.steps += 1
        for name in [name for name, step in deadlines.items() if step <= found.steps]:
            del deadlines[name]
            arrived += engine.abort(name)
        for output in arrived:
            piece = output.finish_reason, output.error, list(output.token_ids)
            outputs.setdefault((output.request_id, output.index), []).append(piece)
        engine.pool.check_integrity(request.block_table for request in engine.unfinished)
    found.memory_growth = resident_bytes() - halftime
    found.leaked_blocks = engine.pool.num_used
    done = {}
    for (name, index), pieces in outputs.items():
        reasons = [reason for reason, _, _ in pieces]
        assert reasons[-1] is not None, f"{name} did not end"
        assert not any(reasons[:-1]), f"{name} ended more than once"
        assert reasons[-1] != "error", pieces[-1][1]
        if reasons[-1] == "abort":
            found.aborted += 1
        else:
            done[int(name), index] = [token for _, _, tokens in pieces for token in tokens]
    found.requests, found.continuations = len(asked), len(outputs)
    found.structured = sum(one.params.structured is not None for one in asked)
    assert len(outputs) == sum(one.params.n for one in asked), "a continuation was lost"
    return done


def soak(model: Path, count: int, seed: int, *, deterministic: bool, dtype: str = "auto") -> Findings:
    """Run all requests twice: disturbed, and with room for all."""
    settings = {
        "max_model_len": MAX_MODEL_LEN,
        "kv_block_size": KV_BLOCK_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 48,
        "deterministic": deterministic,
        "dtype": dtype,
    }
    calm = Engine(model, EngineConfig(**settings, enable_prefix_caching=False))
    block_bytes = cache_block_bytes(calm.config, calm._loaded)
    tight = Engine(
        calm.source,
        EngineConfig(
            **settings,
            kv_cache_bytes=TIGHT_BLOCKS * block_bytes,
            swap_space=TIGHT_BLOCKS // 3 * block_bytes,
            scheduling_policy="priority",
        ),
    )
    asked = make_requests(count, seed, calm.source.config.vocab_size)
    found = Findings(deterministic)
    done = run_disturbed(tight, asked, seed, found)
    metrics = tight.metrics
    found.preemptions, found.swaps = metrics.preemptions, metrics.swaps
    found.prefix_cache_hit_rate = round(metrics.prefix_cache_hit_rate, 3)
    completions = calm.generate([one.prompt for one in asked], [one.params for one in asked])
    numbers = [number for number, one in enumerate(asked) for _ in range(one.params.n)]
    for number, completion in zip(numbers, completions, strict=True):
        key = number, completion.index
        found.different += key in done and done[key] != list(completion.token_ids)
    return found


def main() -> int:
    """Read the arguments, soak, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--write", action="store_true", help="put the findings into docs/BENCHMARKS.md")
    arguments = parser.parse_args()
    found = soak(
        arguments.model,
        arguments.requests,
        arguments.seed,
        deterministic=arguments.deterministic,
        dtype=arguments.dtype,
    )
    if arguments.write:
        kind = "deterministic, " if arguments.deterministic else ""
        machine = machine_line(describe_machine())
        head = f"{arguments.model.name}, dtype {arguments.dtype}; {machine} {kind}seed {arguments.seed}."
        rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in asdict(found).items()]
        write_between_marks("BENCHMARKS.md", "soak_serve.py", "\n".join([head, "", "| found | |", "|---|---|", *rows]))
    print(json.dumps({**asdict(found), "is_clean": found.is_clean}))
    return 0 if found.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
