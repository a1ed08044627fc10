"""Draw the collectives of docs/glossary.md as SVG: python docs/img/draw_collectives.py [FOLDER].
A test holds the files in docs/img/collectives to this.

Four ranks. Rank 0 starts with 1 2 3 4, rank 1 with 10 20 30 40, and so on, so that a sum shows who
is in it. A cell has the colour of the rank that it comes from; a sum is grey.
"""

import sys
from pathlib import Path

from picture import BLUE, ORANGE, SKY, YELLOW, Picture

RANKS, CELL, ROW = range(4), 66, 32
COLOURS = [BLUE, ORANGE, SKY, YELLOW]  # of the ranks
LEFT, RIGHT = 70, 526  # where "before" and "after" begin
SUM = "#DDDDDD"

NUMBERS = [[(part + 1) * 10**rank for part in RANKS] for rank in RANKS]
SUMS = [sum(column) for column in zip(*NUMBERS, strict=True)]


def of(rank):
    """All cells of a rank's vector, as (number, colour)."""
    return [(number, COLOURS[rank]) for number in NUMBERS[rank]]


def only(parts, cells):
    """The cells of these parts; the others are empty."""
    return [cell if part in parts else None for part, cell in enumerate(cells)]


NOTHING, ALL, TOTAL = [None] * 4, [of(rank) for rank in RANKS], [(total, SUM) for total in SUMS]
WHOLE = [(NUMBERS[0][rank], COLOURS[rank]) for rank in RANKS]  # 1 2 3 4, a number from each rank
SHARDS = [only([rank], WHOLE) for rank in RANKS]
# Name: the cells of each rank before and after.
COLLECTIVES = {
    "broadcast": ([of(0), NOTHING, NOTHING, NOTHING], [of(0)] * 4),
    "reduce": (ALL, [TOTAL, NOTHING, NOTHING, NOTHING]),
    "all-reduce": (ALL, [TOTAL] * 4),
    "reduce-scatter": (ALL, [only([rank], TOTAL) for rank in RANKS]),
    "all-gather": (SHARDS, [WHOLE] * 4),
}


def vectors(picture, x, title, rows):
    picture.text(x + 2 * CELL, 16, title, "middle", weight="bold")
    for rank, cells in enumerate(rows):
        y = 26 + rank * ROW
        picture.text(x - 8, y + 16, f"rank {rank}", "end")
        for part in sorted(RANKS, key=lambda part: cells[part] is not None):  # full cells on top
            text, fill = cells[part] or ("", "white")
            edge, dash = ("black", "none") if cells[part] else ("#888", "2,3")
            colour = "white" if fill == BLUE else "black"
            picture.box(x + part * CELL, y, CELL, ROW - 8, fill, text, edge, colour, dash)


def before_and_after(picture, name, before, after):
    vectors(picture, LEFT, "before", before)
    vectors(picture, RIGHT, "after", after)
    start, end, y = LEFT + 4 * CELL + 14, RIGHT - 56, 26 + 2 * ROW - 4
    picture.text((start + end) / 2, y - 10, name, "middle", weight="bold")
    picture.arrow((start, y), (end, y))


# ------------------------------------------------------------------ how a ring does an all-reduce


def ring():
    """[(cells of each rank, the parts received)] at the start and after each of six sends. A cell
    is (number, how many ranks are in it).
    """
    held = [[(number, 1) for number in row] for row in NUMBERS]
    states = [(held, [None] * 4)]
    for send in range(6):
        before, held = held, [list(row) for row in held]
        received = [(rank - 2 - send) % 4 for rank in RANKS]
        for rank, part in enumerate(received):
            number, ranks = before[rank - 1][part]
            if send < 3:
                number, ranks = number + before[rank][part][0], ranks + before[rank][part][1]
            held[rank][part] = number, ranks
        states.append((held, received))
    return states


def draw_ring(picture):
    """Each rank sends a quarter of the vector to the next rank, six times."""
    cell, wide = 40, 182
    for place, (held, received) in enumerate(ring()):
        x, y = LEFT + place % 4 * wide, place // 4 * 150
        if place > 3:
            x += wide
        title = f"after {place} sends" if place > 1 else ("the start", "after 1 send")[place]
        picture.text(x + 2 * cell, y + 16, title, "middle", weight="bold")
        for rank, cells in enumerate(held):
            top = y + 26 + rank * 28
            if place in (0, 4):
                picture.text(x - 8, top + 15, f"rank {rank}", "end")
            for part, (number, ranks) in enumerate(cells):
                fill = YELLOW if part == received[rank] else SUM if ranks == 4 else "white"
                picture.box(x + part * cell, top, cell, 22, fill, number)
    for line, text in enumerate(
        [
            "First row, a reduce-scatter:",
            "each rank adds what it gets.",
            "Second row, an all-gather:",
            "each rank passes on the sums.",
            "6 sends of B/4: 2 (4−1)/4 × B",
        ]
    ):
        picture.text(8, 192 + 20 * line, text, size=11)
    picture.legend(
        298,
        [
            ("just received from the rank above (rank 0: from rank 3)", YELLOW),
            ("a sum of all ranks", SUM),
        ],
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "collectives"
    for name in (*COLLECTIVES, "ring"):
        picture, height = Picture(), 26 + 4 * ROW
        if name == "ring":
            draw_ring(picture)
            height = 320
        else:
            before_and_after(picture, name, *COLLECTIVES[name])
        picture.save(folder / f"{name}.svg", height)
