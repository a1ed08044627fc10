"""How far two losses are apart: one measure for all tools, and their limits.

verify.py has limits of its own for each precision, in watching/differences.py.
"""

import math

ROUNDING = 1e-5  # compare.py: in fp32, another order of adding changed less in all runs of the lab
DIFFERENT = 0.1  # report.py: as a share of the first loss; the masks of dropout change less


def gap(one: float | None, other: float | None, scale: float | None = None) -> float:
    """The difference of two losses, or other numbers, as a share of `scale` or, without one, of the
    larger. Infinite if only one of them is a number; 0 if both are NaN, or both None (not known).
    """
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other) / (scale or max(abs(one), abs(other), 1e-30)) if one != other else 0.0
