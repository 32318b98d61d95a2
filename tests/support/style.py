"""The rules of CONTRIBUTING about size, as functions that return violations in a file's text."""

import ast
import re

COLUMNS = 100
LINES = 400
FUNCTION_LINES = 60


def wide_lines(text):
    """Return the numbers of the lines with more than COLUMNS characters."""
    return [n for n, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]


def lines_too_many(text):
    """Return how many lines a file has beyond LINES; 0 if it follows the rule."""
    return max(0, len(text.splitlines()) - LINES)


def long_python_functions(text):
    """Return names of functions whose code, without signature and docstring, is too long."""
    long = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and body[-1].end_lineno - body[0].lineno + 1 > FUNCTION_LINES:
                long.append(node.name)
    return long


def long_cython_functions(text):
    """Return names of functions that are too long from the first line to the last of their code."""
    long, open_functions = [], []
    last = 0  # the last line that is not empty
    for n, line in enumerate([*text.splitlines(), "end"], 1):
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        # A signature of several lines ends on a line that begins with its closing bracket.
        while open_functions and indent <= open_functions[-1][1] and line.lstrip()[0] != ")":
            name, _, start = open_functions.pop()
            long += [name] if last - start + 1 > FUNCTION_LINES else []
        if match := re.match(r"\s*(?:def|cdef|cpdef)\b[^=(]*?(\w+)\(", line):
            open_functions.append((match[1], indent, n))
        last = n
    return long


def _blank(match):
    return re.sub(r"[^\n]", " ", match[0])


def long_c_functions(text):
    """Return first lines of the functions that are too long, from there to the closing brace.

    A signature begins on the last line before the body that is not indented, as the formatter
    leaves it, so it may have several lines.
    """
    literal = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    code = re.sub(rf"/\*.*?\*/|//[^\n]*|{literal}", _blank, text, flags=re.DOTALL)
    code = re.sub(r"^[ \t]*#(?:.*\\\n)*.*", _blank, code, flags=re.MULTILINE)
    long, depth, start = [], 0, None
    for match in re.finditer(r"[{}]", code):
        if match[0] == "{":
            if depth == 0:
                before = code[: match.start()].rstrip()
                lines = [m.start() for m in re.finditer(r"^\w", before, re.MULTILINE)]
                start = lines[-1] if before.endswith(")") and lines else None
            depth += 1
        else:
            depth -= 1
            ends = depth == 0 and start is not None
            if ends and code.count("\n", start, match.start()) + 1 > FUNCTION_LINES:
                long.append(text[start:].split("\n", 1)[0])
    assert depth == 0, "braces that do not match outside of the preprocessor's lines"
    return long
