"""Tests named after a reported fault match the list of reports."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_reported_fault_is_listed_with_the_tests_that_hold_it():
    named = set()
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            ids = re.match(r"test_((?:[a-z]\d+_)*)", name)[1].split("_")[:-1]
            named |= {(i, f"{path.relative_to(TESTS).as_posix()}::{name}") for i in ids}
    listed, rows = (
        set(),
        re.findall(
            r"^\| (\w\d+) \| [^|]+ \| \[[^]]+\]\(https://[^)]+\) \| [^|]+\. \| (.*) \|$",
            (TESTS / "REPORTED.md").read_text(),
            re.MULTILINE,
        ),
    )
    for i, tests in rows:
        listed |= {(i, test) for test in re.findall(r"`([^`]+)`", tests)}
    assert listed == named and len({i for i, _ in rows}) == len(rows) > 40
