"""What several rooms need: the strategies, what a GPU can do, and printing.

The tools import it before any package, so it also tells who forgot to activate .venv.
"""

import sys
from importlib.util import find_spec

# Three of requirements-report.txt: without them, this is no environment of the project.
if not all(map(find_spec, ("pydantic", "tabulate", "yaml"))):
    sys.exit(
        "error: this Python lacks the project's packages: type `source .venv/bin/activate` first "
        "(and before it `make setup`, if there is no .venv yet)"
    )
