"""What several tools need: the strategies, facts about devices, a measure for losses, printing.

The tools import it before any package, so it tells users who forgot to activate .venv.
"""

import sys
from importlib.util import find_spec

# What reading a damaged file or record can raise.
UNREADABLE = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError


def require(*packages):
    """End the program with one line if this Python lacks one of these packages."""
    if not all(map(find_spec, packages)):
        sys.exit(
            "error: this Python lacks the project's packages: type `source .venv/bin/activate` "
            "first (and before it `make setup`, if there is no .venv yet)"
        )


require("accelerate", "yaml")
