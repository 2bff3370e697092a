#!/usr/bin/env python3
"""Let llama.cpp load, tokenize and write with GGUF files that quantkit makes of a real model.

    scripts/check_llama_cpp.py MODEL [--types F16,Q8_0,...] [--folder DIR]

MODEL is an ordinary folder; llama-cpp-python must be importable (`pip install llama-cpp-python`). Of the F16 file the
token ids of a text in many scripts must be transformers', and so must the greedy text; the other files must load and
write. Exit code 1 if anything differs; the last line of stdout is one JSON document.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from quantkit.export_gguf import export_gguf, llama_cpp
from quantkit.export_gguf.output_file import written_files
from quantkit.source import open_source

TYPES = "F16,Q8_0,Q4_0,Q4_K_M,Q6_K,IQ4_XS"
PROMPT = "The capital of France is"
NEW_TOKENS = 24


def main() -> None:
    """Export, load, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--folder", type=Path, help="where files go and stay; a temporary one by default")
    options = parser.parse_args()
    if (missing := llama_cpp.why_missing()) is not None:
        sys.exit(missing)
    source = open_source(options.model)
    tokenizer = source.tokenizer()
    prompt = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    expected = answer[0, len(prompt) :].tolist()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="check-llama-cpp-"))
    found: dict[str, Any] = {}
    for file_type in options.types.split(","):
        path = folder / f"{file_type}.gguf"
        if not written_files(path):
            export_gguf(source, path, file_type)
        engine = llama_cpp.load(path)
        written = llama_cpp.write_greedily(engine, prompt, NEW_TOKENS)
        same = sum(ours == theirs for ours, theirs in zip(written, expected, strict=True))
        found[file_type] = {"text": tokenizer.decode(written), "tokens_as_transformers": f"{same}/{NEW_TOKENS}"}
        if file_type == "F16":
            found[file_type]["other_ids"] = llama_cpp.differing_texts(engine, tokenizer, len(tokenizer))
        print(f"{file_type}: {found[file_type]}", flush=True)
    plain = found.get("F16", {"other_ids": [], "tokens_as_transformers": f"{NEW_TOKENS}/{NEW_TOKENS}"})
    ok = not plain["other_ids"] and plain["tokens_as_transformers"] == f"{NEW_TOKENS}/{NEW_TOKENS}"
    print(json.dumps({"ok": ok, "llama_cpp_python": llama_cpp.version(), "model": source.name, "files": found}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
