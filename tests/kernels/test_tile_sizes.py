"""Tile and block sizes that the kernels do not support are compile errors."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.programs import needs

CSRC = Path(__file__).parents[2] / "csrc"

# A line of a header or source and what it becomes, a source, the assertion that it breaks.
CASES = "there is a case for all"
BROKEN = {
    "queries, prefill": ("simd_scalar.h", "TILE_QV 3", "TILE_QV 4", "prefill.c", CASES),
    "queries, backward": ("simd_scalar.h", "TILE_QV 3", "TILE_QV 4", "backward.c", CASES),
    "rows, prefill": ("simd_scalar.h", "TILE_ROWS 6", "TILE_ROWS 7", "prefill.c", CASES),
    "rows, decode": ("simd_scalar.h", "TILE_ROWS 6", "TILE_ROWS 7", "decode.c", CASES),
    "rows, backward": ("simd_scalar.h", "TILE_ROWS 6", "TILE_ROWS 7", "backward.c", CASES),
    "columns, prefill": ("simd_scalar.h", "TILE_DV 2", "TILE_DV 3", "prefill.c", CASES),
    "columns, decode": ("simd_scalar.h", "TILE_DV 2", "TILE_DV 5", "decode.c", CASES),
    "columns, additive": ("simd_scalar.h", "TILE_DV 2", "TILE_DV 3", "additive_backward.c", CASES),
    "rows of scores": ("stream.h", "DOT_ROWS 4", "DOT_ROWS 5", "decode.c", CASES),
    "rows of tanh": ("additive.c", "ROWS 4", "ROWS 5", "additive.c", CASES),
    "tile of keys": (
        *("attn_engine.h", "KEY_TILE 64", "KEY_TILE 63", "decode.c"),
        "a tile of keys is whole register tiles",
    ),
    "vectors of a tile": (
        *("simd_scalar.h", "LANES 1", "LANES 5", "prefill.c", "a tile of keys is whole vectors"),
    ),
    "cuts of a tile": (
        *("simd_scalar.h", "LANES 1", "LANES 3", "prefill.c", "plan.c cuts tiles between vectors"),
    ),
    "lanes": ("simd_scalar.h", "LANES 1", "LANES 17", "decode.c", "a number for each lane"),
    "group of keys": (
        *("simd_scalar.h", "LANES 1", "LANES 3", "additive.c"),
        "a group of keys is whole vectors",
    ),
    "row of weights": (
        *("simd_scalar.h", "LANES 1", "LANES 3", "additive_backward.c", "a row is whole vectors"),
    ),
    "split": (
        *("internal.h", "SPLIT_KV 512", "SPLIT_KV 500", "decode.c"),
        "a split is whole tiles of keys",
    ),
    "keys of a block": (
        *("internal.h", "MOST_BLOCK_KV 128", "MOST_BLOCK_KV 256", "plan.c"),
        "places in a block fit attn_tile_class",
    ),
    "queries of a block": (
        *("simd_scalar.h", "LANES 1", "LANES 128", "prefill.c"),
        "places in a block fit attn_tile_class",
    ),
}


def compiled(folder, source):
    """Check a source for the scalar tier in float32; the compiler's answer."""
    compiler = needs("cc", "gcc", "clang")
    flags = ["-DATTN_ISA=scalar", "-DATTN_DTYPE=f32", "-DATTN_DTYPE_f32"]
    flags += ['-DATTN_SIMD_HEADER="vocabulary/simd_scalar.h"', "-std=c11", "-fsyntax-only"]
    flags += ['-DATTN_TILES_HEADER="vocabulary/tiles_vector.h"']
    command = [compiler, *flags, f"-I{folder}", next(folder.glob(f"*/{source}"))]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("source", sorted({source for *_, source, _ in BROKEN.values()}))
def test_the_sizes_of_today_compile(source):
    done = compiled(CSRC, source)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", BROKEN)
def test_other_sizes_do_not_compile(case, tmp_path):
    file, now, then, source, assertion = BROKEN[case]
    shutil.copytree(CSRC, tmp_path / "csrc")
    changed = next((tmp_path / "csrc").glob(f"*/{file}"))
    text = changed.read_text()
    assert text.count(f"#define {now}") == 1
    changed.write_text(text.replace(f"#define {now}", f"#define {then}"))
    done = compiled(tmp_path / "csrc", source)
    assert done.returncode != 0 and assertion in done.stderr, done.stderr
