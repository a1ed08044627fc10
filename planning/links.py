"""The link between ranks: what sbatch/check.py measured of it, and what goes over it."""

import contextlib
import json
import math
import statistics
from collections import namedtuple

from planning.facts import UNREADABLE

# A collective: its name in check.json, the bytes of the whole tensor, and the ranks of its group
# (None: all).
Call = namedtuple("Call", "name bytes ranks", defaults=[None])


def bytes_sent(strategy, parameters, devices, gloo=False, shards=None):
    """Bytes that each rank sends in a step, in fp32 and without accumulation; None if no formula is
    known. `strategy` is the name of a YAML, and `shards` those of a replica in HSDP.

    With ring algorithms, an all-gather or a reduce-scatter of P bytes costs a rank (n - 1) / n x P.
    An all-reduce is one of each. FSDP and ZeRO-3 gather once more, for the backward pass: section 7
    of https://arxiv.org/abs/1910.02054. ZeRO-3 spares this for the 30 million parameters that it
    may hold at a time. FSDP gathers a model without layers, such as the LSTM, only once; this is
    left out here. gloo has no reduce-scatter: an all-reduce takes its place, with twice the bytes,
    and in ZeRO-1 and ZeRO-2 a reduce, with 1.5 times.
    """
    if strategy == "baseline":
        return 0
    if strategy == "hsdp" and shards:  # FSDP among the shards; then their gradients' all-reduce
        replicas = bytes_sent("ddp", parameters / shards, devices // shards)
        return bytes_sent("fsdp", parameters, shards, gloo) + replicas
    strategy = strategy.removesuffix("_offload")
    gathers = {
        "ddp": 1,
        "zero1": 1,
        "zero2": 1,
        "fsdp_keep": 1,
        "fsdp": 2,
        "zero3": max(1, 2 - 30e6 / parameters),
    }.get(strategy)
    scatters = {"zero1": 1.5, "zero2": 1.5, "fsdp_keep": 2, "fsdp": 2, "zero3": 2}
    scatters = scatters.get(strategy, 1) if gloo else 1
    return gathers and (gathers + scatters) * (devices - 1) / devices * 4 * parameters


def bus_share(name, ranks):
    """Of the whole tensor's bytes, how many the slowest link carries at least. Bus bandwidth counts
    these bytes. It is the link's own, and hardly depends on the number of ranks:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    share = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(name)
    return share * (ranks - 1) / ranks if share else 1


def seconds_of(call, in_a_row, link, ranks, tree=False):
    """Seconds of a collective over its own ranks, or else over `ranks`, by a check.json, `link`: by
    its line for calls after computing, or for those `in_a_row`, right after another one.

    With as many ranks as were checked, its line. With others, the latency grows as the number of
    steps from rank to rank: n - 1 in a ring, log2 n in a `tree`, which a broadcast always takes.
    DDP broadcasts a model's buffers in a step, but these are small and left out.
    """
    ranks = call.ranks or ranks
    line, checked = link["collectives"][call.name], link["processes"]
    line = line["in_a_row"] if in_a_row else line
    tree = tree or call.name == "broadcast"
    hops, before = (math.log2(n) if tree else n - 1 for n in (ranks, checked))
    carried = call.bytes * bus_share(call.name, ranks)
    return line["latency_seconds"] * hops / before + carried / line["bandwidth_bytes_per_second"]


def seconds_of_rows(rows, links):
    """Seconds of a step's collectives, {"inside": of groups within a node, "between": of others}.
    `rows` are those of dry_run.json. Of several links, each level takes one of its own.
    """
    seconds = {"inside": 0.0, "between": 0.0}
    for row in rows:
        level = "between" if row["nodes"] > 1 else "inside"
        own = [link for link in links if (link["nodes"] > 1) == (level == "between")]
        mean = Call(row["kind"], row["bytes"] / row["calls"])
        time = seconds_of(mean, False, (own or links)[0], row["group_size"])
        seconds[level] += row["calls"] * time
    return seconds


def link_of(bandwidth, latency):
    """A check.json for a link of which only two numbers are known: bytes per second, and the
    seconds of a message between two ranks.
    """
    line = {"latency_seconds": latency, "bandwidth_bytes_per_second": bandwidth, "residual": 0.0}
    line["in_a_row"] = dict(line)
    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
    return {
        "processes": 2,
        "nodes": 2,
        "backend": None,
        "busy": 0.0,
        "core_share": 1.0,
        "collectives": dict.fromkeys(names, line),
    }


def read_link(path):
    """A check.json. Raises an error of UNREADABLE if it has no measured link."""
    link = json.loads(path.read_bytes())
    lines = link["collectives"].values()
    for line in [*lines, *(line["in_a_row"] for line in lines)]:
        if not (line["bandwidth_bytes_per_second"] > 0 and line["latency_seconds"] >= 0):
            raise ValueError("a bandwidth is not greater than 0, or a latency negative")
    return {
        "nodes": int(link["nodes"]),
        "processes": int(link["processes"]),
        "backend": link["backend"],
        "network": link.get("network"),
        "collectives": link["collectives"],
        "busy": float(link["busy"]),
        "core_share": link.get("core_share") or 1.0,
    }


def find_links(folder):
    """The links of all check.json below a folder, the median of those of one shape and network. A
    check of one rank has none, and neither has one of an older version.
    """
    shapes = {}
    for path in sorted(folder.rglob("check.json")):
        with contextlib.suppress(*UNREADABLE):
            link = read_link(path)
            key = link["nodes"], link["processes"], link["backend"], link["network"]
            shapes.setdefault(key, []).append(link)
    return [median_link(repeats) for repeats in shapes.values()]


def median_link(links):
    """A link with the median latency and bandwidth of repeated checks of one shape."""

    def median(lines):
        keys = ("latency_seconds", "bandwidth_bytes_per_second")
        return {key: statistics.median(line[key] for line in lines) for key in keys}

    found = {}
    for name in links[0]["collectives"]:
        lines = [link["collectives"][name] for link in links]
        found[name] = median(lines) | {"in_a_row": median([line["in_a_row"] for line in lines])}
    shares = {key: statistics.median(link[key] for link in links) for key in ("busy", "core_share")}
    return links[0] | {"collectives": found} | shares


def find_inside(cell, links):
    """The check.json of a single node for HSDP on several nodes: of all ranks of a node, if there
    is one. None for other strategies, and where no node was checked.
    """
    if cell["strategy"] != "hsdp" or cell["nodes"] == 1:
        return None
    one = {**cell, "nodes": 1, "devices": cell["devices"] // cell["nodes"]}
    return find_link(one, [link for link in links if link["nodes"] == 1])


def find_link(cell, links):
    """The check.json to predict a cell's steps with: that of its shape, else the one of the most
    processes on the most nodes. None if there is none.
    """
    gloo = str(cell["device_name"]).startswith("CPU")
    links = [link for link in links if link["backend"] in (None, "gloo" if gloo else "nccl")]
    fits = [
        link
        for link in links
        if (link["nodes"], link["processes"]) == (cell["nodes"], cell["devices"])
    ]
    return max(fits or links, key=lambda link: (link["nodes"], link["processes"]), default=None)
