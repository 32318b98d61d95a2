"""``python -m attn_engine [--json]``: what was built, found and chosen."""

import argparse
import json

from . import config, show_config

parser = argparse.ArgumentParser(prog="python -m attn_engine", description=show_config.__doc__)
parser.add_argument("--json", action="store_true", help="print it as JSON")
options = parser.parse_args()
try:
    config.check_environment()
except ValueError as error:
    parser.exit(2, f"{parser.prog}: error: {error}\n")
if options.json:
    print(json.dumps(show_config("dicts"), indent=2))
else:
    show_config()
