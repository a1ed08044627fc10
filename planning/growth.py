"""What a step would take on more devices than were measured, by formula."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planning.links import find_link
from planning.prediction import interval, predict


@dataclass(frozen=True)
class Growth:
    """A predicted step, in seconds: through a ring, and the two ends of its interval."""

    devices: int
    seconds: float
    low: float
    high: float


def predict_growth(
    row: Mapping[str, Any], alone: float, links: list[dict[str, Any]], most: int
) -> list[Growth]:
    """The predicted steps on 2, 4, ... `most` devices. `row` is what a record says of the run on
    one device, `alone` its step in seconds, and `links` are check.json files. Empty if there is no
    link of this kind of device, or no formula.
    """
    link = find_link(row, links)
    found = []
    counts = {2**power for power in range(1, int(math.log2(most)) + 1)} | {most}
    for devices in sorted(counts) if link else []:
        ring, tree = (predict(alone, row, devices, link, by_tree) for by_tree in (False, True))
        if ring is not None:
            low, high = interval(min(tree, ring), max(tree, ring), row, devices, link)
            found.append(Growth(devices, ring, low, high))
    return found
