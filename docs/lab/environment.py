"""Importing this first ends a tool that is started without .venv: see tools/common/__init__.py."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tools"))
import common  # noqa: E402, F401
