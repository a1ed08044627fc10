"""What the tools read from a command line, and how they print: errors, tables, lists."""

import argparse
import sys

LONGEST = 500  # characters of an error, or a file's content could fill the terminal


def printable(text):
    """A text as one line. Characters that control a terminal are written out: \\x1b."""
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
    """With these decimals, or with two digits if that shows more: 12.35, 0.0021."""
    return f"{seconds:.{decimals}f}" if seconds >= 10 ** (1 - decimals) else f"{seconds:.2g}"


def listed(names, most=5):
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def stop(problem):
    """End the program with one line."""
    sys.exit(f"error: {one_line(problem)}")


class OneLineParser(argparse.ArgumentParser):
    """A parser that ends the program with one line if an argument is wrong. It takes no short forms
    of flags.
    """

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        """Called by argparse."""
        stop(f"{message} (--help lists the options)")


def value_of(flag, words, default=None):
    """The value of a flag in the command line of another program."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", default=default)
    return parser.parse_known_args(words)[0].value


def markdown_table(rows, align="left"):
    """Rows as a Markdown table. The first row is the header. The first column is always left."""
    columns = []
    for column in zip(*rows, strict=True):
        texts = [str(cell) for cell in column]
        width = max(map(len, texts))
        if columns and align == "right":
            texts, line = [text.rjust(width) for text in texts], "-" * (width + 1) + ":"
        else:
            texts, line = [text.ljust(width) for text in texts], ":" + "-" * (width + 1)
        columns.append([f" {texts[0]} ", line, *(f" {text} " for text in texts[1:])])
    return "\n".join(f"|{'|'.join(row)}|" for row in zip(*columns, strict=True))
