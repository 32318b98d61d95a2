"""``python -m attn_engine [--json]``: what was built, found and chosen."""

import argparse
import json

from . import show_config

parser = argparse.ArgumentParser(prog="python -m attn_engine", description=show_config.__doc__)
parser.add_argument("--json", action="store_true", help="print it as JSON")
if parser.parse_args().json:
    print(json.dumps(show_config("dicts"), indent=2))
else:
    show_config()
