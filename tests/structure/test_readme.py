"""The README's Python examples run, one after the other as a reader would type them."""

import re
import runpy
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_examples_run(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 1
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    names = runpy.run_path(str(program))
    assert names["weights"].shape == (2, 5, 10)
