"""The layers of the sources: which module imports which, and what each may use."""

import ast
import ctypes
import re
from pathlib import Path

import pytest

from attn_engine import _core

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "attn_engine"
CSRC = ROOT / "csrc"
C_FILES = sorted(CSRC.glob("*/*.[ch]"))

# Modules and packages from the lowest up: each imports only from itself and from those before it.
LAYERS = [
    *("_core", "_load", "shapes", "inputs", "attributes", "viz", "results", "analysis", "config"),
    *(
        "linear",
        "dot_product",
        "recurrent",
        "calls",
        "cache",
        "multihead",
        "plans",
        "diagnosis",
        "__init__",
    ),
]
# Programs on top of the package: they use it, and it knows nothing of them.
EXTRAS = ["bench", "cli", "demo", "interop", "report", "__main__"]

# What only its owner may mention, in the C sources.
OWNERS = {
    r"\bomp_|<omp\.h>": ["cpus.c", "run.c"],
    r"#pragma omp": ["run.c"],
    r"\b(malloc|calloc|realloc|aligned_alloc|posix_memalign|free)\b": ["run.c"],
    r"\bpthread_": ["run.c"],
    r"\bgetenv\b": [],  # the environment is read by config.py
    r"cpuid|__builtin_cpu_|xgetbv": ["isa.c"],
    r"\b_mm\d*_|\b__m\d+|immintrin|arm_neon|\bv(ld|st)1q?_": ["simd_avx2.h", "simd_avx512.h"],
    r"\b_tile_|\b__tile|arch_prctl|XCOMP": [],  # tiles_<unit>.h, and isa.c for the permission
    r"ATTN_SIMD_HEADER": ["simd.h"],
    r"ATTN_TILES_HEADER": ["prefill.c"],
    r"\bTILES_(ENTER|LEAVE)\b": ["tiles_vector.h", "prefill.c"],
    r"->(enter|leave)\b": ["run.c"],
    r"->operands\(": ["plan.c"],
    r"\b(printf|fprintf|puts|abort|exit)\b": [],
}
KERNELS = sorted(path.name for path in CSRC.glob("kernels/*.c"))

# Folders of csrc/, and what a file of each may include.
C_FOLDERS = {
    "engine": {"engine/"},
    "vocabulary": {"vocabulary/", "engine/attn_engine.h", "engine/operands.h", "engine/watch.h"},
    "kernels": {
        *("kernels/", "vocabulary/", "engine/attn_engine.h", "engine/visible.h"),
        "engine/watch.h",
    },
}
# Files of kernels/ that know a plan.
KNOW_THE_PLAN = ["query_block.h", *KERNELS]


def code(path):
    """A C file without its comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)


def imports(path):
    """Top-level modules and packages that a module imports from, anywhere in its source."""
    found, here = set(), path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level or not (node.module or "").startswith("attn_engine"), path
            if node.level:
                within = here[: len(here) + 1 - node.level]
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found |= {(*within, *name.split("."))[0] for name in names}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("attn_engine") for alias in node.names), path
    return found


def test_every_module_has_its_layer():
    modules = {p.stem for p in PACKAGE.glob("*.py")} | {
        p.parent.name for p in PACKAGE.glob("*/*.py")
    }
    assert modules == {*LAYERS[1:], *EXTRAS, "reference"}


def test_the_package_has_few_top_level_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= 12


@pytest.mark.parametrize("module", LAYERS[1:])
def test_imports_run_one_way(module):
    files = [*PACKAGE.glob(f"{module}.py"), *PACKAGE.glob(f"{module}/*.py")]
    assert files
    assert set().union(*map(imports, files)) <= {*LAYERS[: LAYERS.index(module)], module}


FAMILIES = ["dot_product", "recurrent", "multihead", "cache"]


@pytest.mark.parametrize("family", FAMILIES)
def test_checks_leave_converting_and_results_to_prepare(family):
    files = [*PACKAGE.glob(f"{family}/*checks.py")]
    assert files
    makes = r"\bnp\.(empty|zeros|ascontiguousarray|matmul)\b"
    makes += r"|\b(prepared_mask|walkable|rounded_to|raw|destination)\("
    later = r"from \.(prepare|gradients|attend)\b"
    for path in files:
        assert re.findall(f"{makes}|{later}", path.read_text()) == [], path.name


def test_the_demo_is_imported_by_the_command_line_alone():
    outside = [p for p in PACKAGE.rglob("*.py") if p.parent.name != "demo"]
    assert [p.name for p in outside if "demo" in imports(p)] == ["cli.py"]


def test_the_reference_stands_alone():
    assert set().union(*map(imports, PACKAGE.glob("reference/*.py"))) == {"reference"}


def test_the_binding_is_the_only_way_to_c_and_imports_no_module():
    binding = (ROOT / "binding" / "_core.pyx").read_text()
    assert not re.search(
        r"^\s*(from \.|from attn_engine|import attn_engine)", binding, re.MULTILINE
    )
    assert [p.name for p in PACKAGE.rglob("*.py") if "ctypes" in p.read_text()] == []


@pytest.mark.parametrize("pattern", OWNERS)
def test_c_features_stay_with_their_owner(pattern):
    users = [p.name for p in C_FILES if re.search(pattern, code(p))]
    assert set(users) <= set(OWNERS[pattern])


def test_every_c_file_is_in_a_known_folder():
    assert {path.name for path in CSRC.iterdir()} == {*C_FOLDERS, "README.md"}
    assert {path.parent.name for path in C_FILES} == set(C_FOLDERS)


@pytest.mark.parametrize("folder", C_FOLDERS)
def test_c_includes_run_one_way(folder):
    """The engine sees no numbers, kernels see no threads, the vocabulary sees no plan."""
    for path in CSRC.glob(f"{folder}/*.[ch]"):
        may = set(C_FOLDERS[folder])
        if path.name in KNOW_THE_PLAN:
            may.add("engine/internal.h")
        for included in re.findall(r'#include "([^"]+)"', code(path)):
            assert included in may or included[: included.index("/") + 1] in may, path.name


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_object_exports_its_descriptor_alone(name):
    source = code(CSRC / "kernels" / name)
    outside = re.sub(r"^\{.*?^\}|\{[^{}]*\}", "", source, flags=re.DOTALL | re.MULTILINE)
    local = ("static", "INLINE", "typedef", "extern", "struct", "enum", "#", " ", "}", ")")
    exported = [line for line in outside.splitlines() if line and not line.startswith(local)]
    assert len(exported) == 1, exported
    assert exported[0].startswith(f"const attn_kernel ATTN_KERNEL({name.removesuffix('.c')})")


@pytest.mark.parametrize("name", ["prefill.c", "decode.c", "backward.c", "backward_tile.h"])
def test_kernels_know_masks_and_score_functions_by_their_interface_alone(name):
    """A kernel that names one kind of mask would have to change for a new kind."""
    masks = r"\b(?:segments|dense|band)_(?:view|apply\w*|full)\b|\bquery_segments\b"
    scores = r"->softcap\b|\bscore\.(?:cap|slope)\b"
    assert re.findall(f"{masks}|{scores}", code(CSRC / "kernels" / name)) == []


def test_one_function_decides_which_kernel_a_call_runs():
    compared = [p.name for p in C_FILES if re.search(r"[<>]=? DECODE_MAX_Q", code(p))]
    assert compared == ["internal.h"]


def test_every_exported_c_name_has_the_prefix():
    for path in C_FILES:
        if path.suffix == ".c" and path.name not in KERNELS:
            functions = r"^(?!static|[A-Z_]+\()\w[\w *]*?(\w+)\("
            names = re.findall(functions, code(path), re.MULTILINE)
            assert names and all(name.startswith("attn_") for name in names), (path.name, names)


def test_the_extension_shows_nothing_but_its_module():
    library = ctypes.CDLL(_core.__file__)
    assert hasattr(library, "PyInit__core")
    names = set().union(*(re.findall(r"\battn_\w+", code(p)) for p in C_FILES))
    labels = [
        f"{kernel.removesuffix('.c')}_{d}_{isa}"
        for kernel in KERNELS
        for d in _core.DTYPES
        for isa in _core.ISAS
    ]
    shown = [n for n in (*names, *labels) if hasattr(library, n) or hasattr(library, f"attn_{n}")]
    assert "attn_attend" in names and shown == []


def test_compiler_flags():
    lines = (ROOT / "CMakeLists.txt").read_text()
    assert "-ffp-contract=off" in lines
    assert not re.search(r"-ffast-math|-Ofast|-funsafe|-ffinite|-fassociative|-flto|IPO", lines)
    rows = re.findall(r"^\s*attn_add_isa\((.*?)\)", lines, re.MULTILINE | re.DOTALL)
    # one tier that inherits is of check_kernels alone
    rows = [row for row in rows if row.split()[0] != "pairs"]
    outside = lines
    for row in rows:
        outside = outside.replace(row, "")
    assert not re.search(r"(?<!\w)-m[a-z]", outside)
    assert [row.split()[0] for row in rows] == list(_core.ISAS)
    assert rows[0].split()[0] == "scalar" and " -m" not in rows[0]  # runs on any processor
