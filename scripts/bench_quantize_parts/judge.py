"""Quality of checkpoint folders, by the verbs that a user would call: eval on the same items and text, then compare."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

GATES = """\
version: 1
quantization: {{scheme: W4A16, algorithm: {{name: rtn}}}}
outputs: [{{format: compressed-tensors, path: unused}}]
gates:
  suites: [extract, nll]
  num_items: {{extract: {items}, nll: {windows}}}
  max_drop_pp: {{extract: 5}}
  max_kl_mean_nats: 0.1
"""


def judge(original: Path, folders: dict[str, Path], scratch: Path, items: int, windows: int) -> dict[str, Any]:
    """By name the metrics of `quantkit eval`, ``extract`` and ``nll``; the original's name is ``original``."""
    recipe = scratch / "judge.yaml"
    recipe.write_text(GATES.format(items=items, windows=windows), encoding="utf-8")
    found = {}
    for name, folder in {"original": original, **folders}.items():
        records = scratch / "records" / name
        command = [sys.executable, "-m", "quantkit", "eval", str(folder), "-r", str(recipe), "-o", str(records)]
        if name != "original":
            command += ["--reference", str(scratch / "records" / "original")]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")
        suites = json.loads((records / "result.json").read_text(encoding="utf-8"))["suites"]
        found[name] = {suite: record["metrics"] for suite, record in suites.items()}
        print(f"judged {name}", file=sys.stderr)
    return found
