"""Importing this first ends a tool that is started without .venv, as common/__init__.py does."""

import sys
from importlib.util import find_spec

if not find_spec("torch"):
    sys.exit(
        "error: this Python lacks the project's packages: type `source .venv/bin/activate` first "
        "(and before it `make setup`, if there is no .venv yet)"
    )
