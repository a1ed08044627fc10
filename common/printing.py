"""What the tools print and write: one line for an error, tables, files."""

import argparse
import sys

import tabulate

tabulate.MIN_PADDING = 0  # of headers: no wider than they have to be
LONGEST = 500  # characters of an error, or a file's content could fill the terminal


def printable(text):
    """A text as one line. Characters that a terminal obeys, or that turn a text around, are shown
    as Python writes them: \\x1b.
    """
    line = " ".join(str(text).split())
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in line
    )


def one_line(problem):
    """A text or an exception as one line of at most LONGEST characters."""
    line = printable(problem).removeprefix("error: ")
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def show_seconds(seconds, decimals=2):
    """With these decimals, or two digits if there is less to show: 12.35, 0.0021."""
    return f"{seconds:.{decimals}f}" if seconds >= 10 ** (1 - decimals) else f"{seconds:.2g}"


def listed(names, most=5):
    """Names in a row; of the others, how many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def stop(problem):
    """End the program with one line."""
    sys.exit(f"error: {one_line(problem)}")


class OneLineParser(argparse.ArgumentParser):
    """A parser that ends the program with one line where an argument is wrong. Flags have to be
    written out.
    """

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        """Called by argparse."""
        stop(f"{message} (--help lists the options)")


def markdown_table(rows, align="left"):
    """Rows as a Markdown table; the first one is the header. `align` is that of all columns but
    the first.
    """
    sides = ["left"] + [align] * (len(rows[0]) - 1)
    return tabulate.tabulate(rows, "firstrow", "pipe", disable_numparse=True, colalign=sides)


def own_file(path):
    """A path to write to. A link there is removed, as it could lead out of the folder."""
    if path.is_symlink():
        path.unlink()
    return path
