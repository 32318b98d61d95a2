"""The rules of CONTRIBUTING about the size and form of files, and that the checks can fail."""

import re
import subprocess
from pathlib import Path

import pytest
from support import style
from support.programs import needs

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".pyi", ".pyx", ".pxi", ".pxd", ".c", ".h")
FILES = sorted(
    path
    for folder in ("src", "csrc", "binding", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SUFFIXES
)
C_FILES = [path for path in FILES if path.suffix in (".c", ".h")]


def of(path):
    """A file's name in test ids."""
    return str(path.relative_to(ROOT))


# --- the repository keeps the rules ---------------------------------------------------------------


def test_files_of_every_suffix_are_checked():
    assert {path.suffix for path in FILES} == set(SUFFIXES)


@pytest.mark.parametrize("path", FILES, ids=of)
def test_files_are_short_and_narrow(path):
    text = path.read_text()
    assert style.lines_too_many(text) == 0
    assert style.wide_lines(text) == []


@pytest.mark.parametrize("path", FILES, ids=of)
def test_functions_are_short(path):
    long = {
        ".c": style.long_c_functions,
        ".h": style.long_c_functions,
        ".py": style.long_python_functions,
        ".pyi": style.long_python_functions,
    }.get(path.suffix, style.long_cython_functions)
    assert long(path.read_text()) == []


# --- a file that breaks a rule is found -----------------------------------------------------------


def test_wide_lines_are_found():
    assert style.wide_lines(f"{'x' * 100}\n{'é' * 100}\n") == []
    assert style.wide_lines(f"a\n{'x' * 101}\n\n/* {'y' * 200}") == [2, 4]


def test_long_files_are_found():
    assert style.lines_too_many("x\n" * 400) == 0
    assert style.lines_too_many("x\n" * 401) == 1


SIGNATURES = {
    "one line": "static int f(int a) {",
    "two lines": "static inline void f(int a,\n                     int b) {",
    "three lines": "INLINE vec f(const int a,\n             int b,\n             int c) {",
    "attribute": "__attribute__((noinline)) static const real *f(const block *b) {",
    "after a macro": "#define TWO(x) \\\n    { x }\n\nvoid f(void) {",
    "after a struct": "typedef struct s {\n    int a;\n} s;\n\nstatic s f(int a,\n    int b) {",
    "after a list": "ATTN_ISAS(DECLARE)\nconst int x[] = {1, 2};\n\nint *f(int a) {",
    "braces in text": "/* { */\nstatic const char x[] = \"{\", y = '{';\nvoid f(void) {",
    "after a short one": "INLINE int g(int a) { return a; }\nINLINE int f(int a,\n    int b) {",
}


@pytest.mark.parametrize("signature", SIGNATURES)
def test_long_c_functions_are_found(signature):
    header = SIGNATURES[signature]
    lines = header.count("\n") + 1
    first = next(n for n, line in enumerate(header.split("\n")) if re.search(r"\bf\(", line))
    statements = 60 - (lines - first) - 1  # beside the signature and the closing brace
    for extra in (0, 1):
        body = "    if (a) { a++; }\n" * (statements + extra)
        text = f"{header}\n{body}}}\n\nint last(void) {{ return 0; }}\n"
        assert len(style.long_c_functions(text)) == extra
    assert " f(" in style.long_c_functions(text)[0] or "*f(" in style.long_c_functions(text)[0]


def test_long_python_functions_are_found():
    for header in ("def f():", "async def f():", "class C:\n    def f(\n        self,\n    ):"):
        indent = "        " if header.startswith("class") else "    "
        docstring = f'{indent}"""{"Long." * 9}\n\n\n{indent}"""\n'
        for extra, found in ((0, []), (1, ["f"])):
            body = f"{indent}x = 1\n" * (60 + extra)
            assert style.long_python_functions(f"{header}\n{docstring}{body}") == found


def test_long_cython_functions_are_found():
    for header in (
        "def f(a):",
        "cdef inline int64_t f(const Py_buffer *v) noexcept:",
        "cdef int f(\n    int a,\n) except -1:",
        "cpdef int f(int a,\n            int b=2):",
    ):
        statements = 60 - header.count("\n") - 1
        for extra, found in ((0, []), (1, ["f"])):
            body = "    cdef int x = g(1)\n" * (statements + extra)
            text = f"{header}\n{body}\n\n# after it\ndef g():\n    pass\n"
            assert style.long_cython_functions(text) == found


# --- the formatters see all of a file -------------------------------------------------------------


def formatted(text, name):
    """C as the formatter of CI leaves it."""
    command = [needs("clang-format"), f"--style=file:{ROOT / '.clang-format'}"]
    command.append(f"--assume-filename={name}")
    done = subprocess.run(command, input=text, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize("path", C_FILES, ids=of)
def test_the_c_formatter_formats_every_line(path):
    """Formatting puts a file right in which every semicolon outside of comments is out of place."""
    text = path.read_text()
    comments = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"'
    damaged = re.sub(
        rf"({comments})|;",
        lambda match: match[1] or "  ;",
        text,
        flags=re.DOTALL,
    )
    assert damaged != text or path.name == "lists.h"  # which has no statement
    assert formatted(damaged, path.name) == text


def test_ruff_finds_wide_lines_and_bad_form(tmp_path):
    """The linter of CI refuses 101 columns, in text as in code, and its formatter other spaces."""
    ruff = [needs("ruff"), "--config", ROOT / "pyproject.toml"]

    def faults(line):
        file = tmp_path / "file.py"
        file.write_text(line + "\n")
        command = [ruff[0], "check", *ruff[1:], "--output-format", "concise", "--no-cache", file]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return re.findall(r"\b[A-Z]+\d+\b", done.stdout.replace(str(tmp_path), ""))

    assert faults(f'x = "{"word " * 18}four"') == []  # 100 columns
    assert faults(f'x = "{"word " * 18}fours"') == ["E501"]
    assert faults(f"# {'word ' * 19}four") == ["E501"]
    for text, code in (("x = 1\n", 0), ("x  =  1\n", 1)):
        file = tmp_path / "form.py"
        file.write_text(text)
        command = [ruff[0], "format", "--check", *ruff[1:], "--no-cache", file]
        assert subprocess.run(command, check=False, capture_output=True).returncode == code
