"""What several tools need: the strategies, facts about devices, a measure for losses, printing.

The tools import it before any package, so it tells users who forgot to activate .venv.
"""

import sys
from importlib.util import find_spec

# What reading a damaged file or record can raise.
UNREADABLE = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError

# Three packages of requirements-report.txt: without them, .venv is not active.
if not all(map(find_spec, ("pydantic", "tabulate", "yaml"))):
    sys.exit(
        "error: this Python lacks the project's packages: type `source .venv/bin/activate` first "
        "(and before it `make setup`, if there is no .venv yet)"
    )
