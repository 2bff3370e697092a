#!/usr/bin/env python3
"""Show two promises of the pipeline: memory bounded by one decoder block, and nothing lost when it is killed.

    scripts/show_pipeline.py MODEL [--gigabytes 4] [--limit-gb 2.5] [--algorithms rtn,gptq] [--kills 10] [--seed 0]
                             [--folder DIR] [--write]

A llama of random weights and --gigabytes (MODEL lends its tokenizer) is quantized by each algorithm in a process of its
own, whose peak memory the system tells. Then MODEL is quantized by GPTQ undisturbed, and once more by processes that
are killed (SIGKILL) at --kills random moments and resumed; the weight files have to be the same bytes. --write puts
the table into docs/BENCHMARKS.md. The exit code is 1 if a peak is above the limit or a byte differs.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from marked_page import machine_line, write_between_marks
from quantkit_eval.machine import describe_machine

HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS = 2048, 5632, 32, 4  # of a block of 44 million weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
GIVE_UP_S = 3600.0


def make_llama(folder: Path, lender: Path, gigabytes: float, seed: int) -> int:
    """A llama of random bfloat16 weights, a shard a block; returns its bytes of weights."""
    vocabulary = json.loads((lender / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    inputs = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    inputs |= {f"self_attn.{name}": (HIDDEN // HEADS * KEY_HEADS, HIDDEN) for name in ("k_proj", "v_proj")}
    inputs |= {f"mlp.{name}": (INTERMEDIATE, HIDDEN) for name in ("gate_proj", "up_proj")}
    inputs["mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
    ends = 2 * vocabulary * HIDDEN * 2
    block = 2 * sum(rows * columns for rows, columns in inputs.values())
    blocks = max(1, round((gigabytes * 1e9 - ends) / block))
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul(columns**-0.5).bfloat16()

    index: dict[str, str] = {}
    total = 0

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())

    write(
        "ends.safetensors",
        {
            "model.embed_tokens.weight": weight(vocabulary, HIDDEN),
            "lm_head.weight": weight(vocabulary, HIDDEN),
            "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        },
    )
    for number in range(blocks):
        prefix = f"model.layers.{number}."
        tensors = {f"{prefix}{name}.weight": weight(*shape) for name, shape in inputs.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        write(f"block-{number:03}.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": blocks,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (lender / name).exists():
            shutil.copy(lender / name, folder / name)
    return total


def command(recipe: Path, model: Path, out: Path, algorithm: str, num_tokens: int) -> list[str]:
    """The verb ``quantize`` on a recipe that is written here."""
    document: dict[str, Any] = {"version": 1, "model": str(model)}
    if algorithm != "rtn":
        sources = [{"kind": "text", "path": "builtin"}]
        document["calibration"] = {"sources": sources, "num_tokens": num_tokens, "window_tokens": 512}
    document["quantization"] = {"scheme": "W4A16", "group_size": 64, "algorithm": {"name": algorithm}}
    document["outputs"] = [{"format": "compressed-tensors", "path": str(out)}]
    recipe.write_text(json.dumps(document), encoding="utf-8")
    return [sys.executable, "-m", "quantkit", "quantize", "-r", str(recipe)]


def weight_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every weight file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def measure(arguments: list[str]) -> tuple[float, float]:
    """Seconds and peak GB (10^9 bytes) of a process that has to succeed."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(arguments, stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(arguments)} failed ({process.returncode}):\n{said.read()[-2000:]}")
    return time.perf_counter() - started, used.ru_maxrss * 1024 / 1e9


def kill_and_resume(arguments: list[str], out: Path, duration: float, kills: int, seed: int) -> list[dict[str, str]]:
    """Begin again after each kill; a run that ends before the last kill begins anew.

    Returns:
        The hashes that every finished run left.
    """
    moments, hits, found = random.Random(seed), 0, []
    while hits < kills or not out.exists():
        process = subprocess.Popen([*arguments, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            wait = moments.uniform(0.0, duration / 2) if hits < kills else GIVE_UP_S
            _, said = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            hits += 1
            print(f"killed after {wait:.1f} s ({hits} of {kills})", file=sys.stderr)
            continue
        if process.returncode:
            sys.exit(f"a resumed run failed ({process.returncode}): {said.decode()[-2000:]}")
        found.append(weight_hashes(out))
        if hits < kills:
            shutil.rmtree(out)
    return found


def main() -> None:
    """Make, measure, kill, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--limit-gb", type=float, default=2.5)
    parser.add_argument("--algorithms", default="rtn,gptq")
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the models and checkpoints; it needs twice the gigabytes")
    parser.add_argument("--write", action="store_true", help="put the table into docs/BENCHMARKS.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        text, is_sound = show(options, Path(scratch))
    print(text)
    if options.write:
        write_between_marks("BENCHMARKS.md", "show_pipeline.py", text)
    sys.exit(0 if is_sound else 1)


def show(options: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """The table as Markdown, and whether all is as promised."""
    lender = options.model.resolve()
    recipe, is_sound = folder / "recipe.yaml", True
    lines = [machine_line(describe_machine()), "", "| what | seconds | peak GB | outcome |", "|---|---|---|---|"]
    total = make_llama(folder / "llama", lender, options.gigabytes, options.seed)
    for algorithm in options.algorithms.split(","):
        out = folder / "out"
        seconds, peak = measure(command(recipe, folder / "llama", out, algorithm, options.num_tokens))
        print(f"{algorithm}: {seconds:.0f} s, {peak:.2f} GB", file=sys.stderr)
        is_sound &= peak <= options.limit_gb
        outcome = f"{'at most' if peak <= options.limit_gb else 'ABOVE'} {options.limit_gb:g} GB"
        lines.append(f"| random llama of {total / 1e9:.1f} GB, {algorithm} | {seconds:.0f} | {peak:.2f} | {outcome} |")
        shutil.rmtree(out)
    shutil.rmtree(folder / "llama")
    undisturbed = command(recipe, lender, folder / "whole", "gptq", options.num_tokens)
    seconds, peak = measure(undisturbed)
    lines.append(f"| {lender.name}, gptq, undisturbed | {seconds:.0f} | {peak:.2f} | |")
    disturbed = command(recipe, lender, folder / "killed", "gptq", options.num_tokens)
    ended = kill_and_resume(disturbed, folder / "killed", seconds, options.kills, options.seed)
    is_same = all(hashes == weight_hashes(folder / "whole") for hashes in ended)
    left = [path.name for path in folder.iterdir() if "partial" in path.name]
    is_sound &= is_same and not left
    outcome = f"{'the same bytes' if is_same else 'OTHER BYTES'}, {len(left)} files left over"
    lines.append(f"| {lender.name}, gptq, killed {options.kills} times at random and resumed | | | {outcome} |")
    return "\n".join(lines), is_sound


if __name__ == "__main__":
    main()
