"""What several folders need: the strategies, what a GPU can do, and printing.

The tools import it before any package, so it tells users who forgot to activate .venv.
"""

import sys
from importlib.util import find_spec

# Three packages of requirements-report.txt: without them, .venv is not active.
if not all(map(find_spec, ("pydantic", "tabulate", "yaml"))):
    sys.exit(
        "error: this Python lacks the project's packages: type `source .venv/bin/activate` first "
        "(and before it `make setup`, if there is no .venv yet)"
    )
