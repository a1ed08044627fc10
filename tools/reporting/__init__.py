"""The modules of report.py. It reads (schema, records, times), compares (comparing, grounds) and
writes (answer, pictures, page).
"""

from common import require

require("matplotlib", "markdown", "pydantic")
