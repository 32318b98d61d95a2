"""``python -m attn_engine``: the attn-engine command, ``attn-engine info`` by default."""

import sys

from .cli import main

arguments = sys.argv[1:]
sys.exit(main(["info", *arguments] if arguments in ([], ["--json"]) else arguments))
