#!/usr/bin/env python3
"""Break the kernels in known ways, one at a time, in a copy, and see that a test notices each.

    .venv/bin/python scripts/mutate_kernels.py [--only TEXT]

Prints "killed" or "survived" for every mutation; exit code 1 if one survives, 2 if a test fails on the unbroken copy.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("quantkit_kernels")
W4A16 = "tests/kernels/test_w4a16_triton.py::test_the_product_is_that_of_the_reference"
W8A16 = "tests/kernels/test_int8_triton.py::test_w8a16"
ATTENTION = "tests/kernels/test_paged_attention.py::test_the_kernel_equals_the_reference"
PARTS = "tests/kernels/test_paged_attention.py::test_windows_caps_and_parts"
W8A8 = "tests/kernels/test_int8_triton.py::test_w8a8"


@dataclass(frozen=True)
class Mutation:
    """A text of a kernel that is there once or more, what stands in its place, and the test that must then fail."""

    file: str
    text: str
    replacement: str
    test: str


MUTATIONS = (
    # The columns past K are read as they lie in memory.
    Mutation("triton_w4a16.py", "(m[None, :] < M) & (column + j[:, None] < K)", "(m[None, :] < M)",
             f"{W4A16}[False-70-160-32-3]"),
    # The four strips of a word change places.
    Mutation("triton_w4a16.py", "words >> (4 * STRIP)", "words >> (12 - 4 * STRIP)", f"{W4A16}[False-48-64-32-3]"),
    # A group's scale is that of the first group.
    Mutation("triton_w4a16.py", "part * scale.to(tl.float32)", "part * tl.load(scale_ptr + n).to(tl.float32)",
             f"{W4A16}[False-80-256-128-3]"),
    # Zero points are forgotten where a row is multiplied alone.
    Mutation("triton_w4a16.py", "offset += tl.load(zero_ptr", "offset += 0 * tl.load(zero_ptr",
             f"{W4A16}[True-33-192-64-1]"),
    # All splits write into the same part of the workspace.
    Mutation("triton_w4a16.py", "split.to(tl.int64) * stride_split", "0 * stride_split",
             f"{W4A16}[False-24-1056-32-3]"),
    # The first split is added again and again.
    Mutation("triton_split_k.py", "part += stride_split", "part += 0 * stride_split",
             "tests/kernels/test_w4a16_triton.py::test_splits_are_added_in_their_order"),
    # The sign of an 8-bit code is lost.
    Mutation("triton_w8a16.py", "& 255) ^ 128", "& 255)", f"{W8A16}[False-48-64-32-3]"),
    # Every token has the scale of the first.
    Mutation("triton_w8a8.py", "row_scale_ptr + m * stride_row_scale", "row_scale_ptr + m * 0",
             f"{W8A8}[False-True-48-64-3-dtype0]"),
    # A step too large by one part in 127.
    Mutation("eight_bits.py", "tl.zeros_like(largest) + 127.0", "tl.zeros_like(largest) + 126.0",
             "tests/kernels/test_quantize.py::test_rows_become_the_codes_of_the_reference[False-16-70-dtype0]"),
    # A NaN is passed over, as a maximum of floats does.
    Mutation("eight_bits.py", "wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS).to(tl.float32, bitcast=True)",
             "tl.abs(wide), axis=AXIS)",
             "tests/kernels/test_not_finite.py::test_a_row_with_a_nan_has_no_scale[quantize_per_token-dtype0]"),
    # A code behind the last one is the first one.
    Mutation("eight_bits.py", "tl.minimum(tl.maximum(tl.div_rn(wide, scale), -128.0), 127.0)", "tl.div_rn(wide, scale)",
             "tests/kernels/test_not_finite.py::test_codes_of_the_smallest_numbers_do_not_wrap_round[triton]"),
    # Padding counts as a token.
    Mutation("triton_calibration.py", "counts = counts & (tl.load(mask_ptr", "counts = counts | (tl.load(mask_ptr",
             "tests/kernels/test_calibration.py::test_the_second_moment[True-37-150-dtype0-triton]"),
    # An error does not reach the column right behind its own.
    Mutation("triton_calibration.py", "mask=(c > i) & (c < C)", "mask=(c > i + 1) & (c < C)",
             "tests/kernels/test_calibration.py::"
             "test_the_columns_of_a_block_get_the_codes_that_gptq_gives_them[37-24-True-triton]"),
    # A query sees everything but itself.
    Mutation("triton_paged_attention.py", "place[None, :] <= row_place", "place[None, :] < row_place",
             f"{ATTENTION}[few queries each]"),
    # A tile of keys that only the last queries see is not masked.
    Mutation("triton_paged_attention.py", "(first_place + 1) // TILE * TILE", "(first_place + TILE) // TILE * TILE",
             f"{ATTENTION}[prefill of 63 and others]"),
    # The window is one place too wide.
    Mutation("triton_paged_attention.py", "> row_place[:, None] - WINDOW", ">= row_place[:, None] - WINDOW",
             f"{PARTS}[prefill of 63 and others-window]"),
    # Every part takes the keys of the first.
    Mutation("triton_paged_attention.py", "begin += split * split_keys", "begin += 0 * split * split_keys",
             f"{PARTS}[prefill behind a context-window, 3 parts]"),
    # Values are read with the strides of keys.
    Mutation("triton_paged_attention.py", "block * STRIDES[2] + slot * STRIDES[3]",
             "block * STRIDES[0] + slot * STRIDES[1]", f"{ATTENTION}[decode, uneven heads]"),
    # Values have the scales of keys.
    Mutation("triton_paged_attention.py", "tl.load(value_scale_ptr + scales", "tl.load(key_scale_ptr + scales",
             "tests/kernels/test_paged_attention.py::test_short_types_and_codes[query_lens0-2-True-dtype0]"),
    # Parts count alike, whatever the mass of their keys.
    Mutation("triton_merge_splits.py", "tl.exp2(part - largest)", "tl.exp2(0.0 * (part - largest))",
             f"{PARTS}[prefill behind a context-window, 3 parts]"),
    # A part that is NaN counts as one without keys.
    Mutation("triton_merge_splits.py", 'lse != float("-inf")', 'lse > float("-inf")',
             "tests/kernels/test_not_finite.py::test_a_query_that_is_nan_is_not_one_that_sees_nothing"),
    # The last of the equal tokens that are kept is lost.
    Mutation("triton_sampling.py", "(rank <= few)", "(rank < few)",
             "tests/kernels/test_sampling.py::test_equal_tokens_are_kept_in_their_order[{'top_k': 36}]"),
    # The mean is taken over the tile, not the row.
    Mutation("triton_norm.py", "keep_dims=True) / COLUMNS", "keep_dims=True) / BLOCK_COLUMNS",
             "tests/kernels/test_norm.py::test_the_kernel_equals_the_reference[16-100-dtype0]"),
    # Pairs are turned the wrong way round.
    Mutation("triton_rotary.py", "a * cos - b * sin", "a * cos + b * sin",
             "tests/kernels/test_rotary.py::test_the_kernel_equals_the_reference[3-9-3-64-32-False-dtype0]"),
)  # fmt: skip


def run(tests: list[str], source: Path) -> bool:
    """Whether the tests pass with the kernels that lie in ``source``."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-o", f"pythonpath={source} {ROOT} {ROOT / 'eval'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode not in (0, 1):  # neither passed nor failed: the test is not there
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return done.returncode == 0


def is_killed(mutation: Mutation) -> bool:
    """Whether the test fails on a copy with the mutation."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(ROOT / "kernels" / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / PACKAGE / mutation.file
        text = path.read_text()
        if mutation.text not in text:
            raise SystemExit(f"{mutation.file} no longer holds: {mutation.text}")
        path.write_text(text.replace(mutation.text, mutation.replacement))
        return not run([mutation.test], source)


def main() -> int:
    """Run all mutations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only mutations whose file or test contains this")
    only = parser.parse_args().only
    chosen = [mutation for mutation in MUTATIONS if only in mutation.file or only in mutation.test]
    if not run(sorted({mutation.test for mutation in chosen}), ROOT / "kernels"):
        print("the tests fail on the unbroken kernels")
        return 2
    survivors = 0
    for mutation in chosen:
        killed = is_killed(mutation)
        survivors += not killed
        print(f"{'killed  ' if killed else 'SURVIVED'}  {mutation.file}: {mutation.text}  ->  {mutation.replacement}",
              flush=True)  # fmt: skip
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
