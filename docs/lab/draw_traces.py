"""Draw one step of profiled runs on CPUs as SVG, a picture per run:

    python docs/lab/draw_traces.py RUN ... --to FOLDER   # FOLDER/RUN.svg, from the runs' traces
    python docs/lab/draw_traces.py --shares RUN ...      # no picture: where the time of all 5 steps
                                                         # went, as a table
    python docs/lab/draw_traces.py                       # those in docs/img/traces again

A RUN is the --output_dir of a run with --profile. FOLDER/traces.json keeps what is drawn: a few kB
per run, where a trace has MB. A test holds the pictures in docs/img/traces to it.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import environment  # noqa: F401  It makes tools/ importable.

IMAGES = Path(__file__).resolve().parents[1] / "img"
sys.path.insert(1, str(IMAGES))
from picture import GREEN, LEFT, ORANGE, PINK, RIGHT, SKY, WIDTH, YELLOW, Picture  # noqa: E402

from common import printing  # noqa: E402

COLOURS = {"forward": SKY, "backward": ORANGE, "optimizer": GREEN, "all-gather": YELLOW}  # or PINK
GRAIN = 0.5  # ms: what is nearer than that is drawn as one box


def read_events(path):
    """The events of a trace (traces/profile_RANK.json) that last, in ms."""
    return [
        event | {"ts": event["ts"] / 1000, "dur": event["dur"] / 1000}
        for event in json.loads(Path(path).read_bytes())["traceEvents"]
        if event.get("ph") == "X"
    ]


def span(event):
    return event["ts"], event["ts"] + event["dur"]


def covered(spans):
    """Disjoint spans, in order, that cover the same time."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans):
    """The total length of these spans, with overlaps counted once."""
    return sum(end - start for start, end in covered(spans))


LOADING = "enumerate(DataLoader)"  # how torch names the spans in which a DataLoader makes a batch


def shares_of(events):
    """Shares of the traced steps among these events, which add up to 1: computation alone,
    computation that hides communication, communication alone, loading data, and none of them:
    Python, and idleness. Raises ValueError or KeyError if there are none.

    On a GPU only the GPU's own time line counts, as the CPU runs ahead of it: kernels and copies
    are work, and Kineto's gpu_user_annotation tells which of them belong to a step or to loading.
    """
    gpu_work = {"kernel", "gpu_memcpy", "gpu_memset"}
    on_gpu = any(event.get("cat") in gpu_work for event in events)
    annotation = "gpu_user_annotation" if on_gpu else "user_annotation"
    spans = {"step": [], "communication": [], "data": [], "compute": []}
    for event in events:
        name, kind = event["name"], event.get("cat")
        if kind == annotation and name.startswith("ProfilerStep"):
            spans["step"].append(span(event))
        elif name.startswith("gloo:") or kind == "kernel" and "nccl" in name.lower():
            spans["communication"].append(span(event))
        elif kind == annotation and name.startswith(LOADING):
            spans["data"].append(span(event))
        elif kind in gpu_work or not on_gpu and kind == "cpu_op" and name.startswith("aten::"):
            spans["compute"].append(span(event))
    if not spans["step"]:
        raise ValueError("no traced steps")
    start, end = min(spans["step"])[0], max(end for _, end in spans["step"])
    clipped = {
        key: [(max(a, start), min(b, end)) for a, b in value if b > start and a < end]
        for key, value in spans.items()
    }
    calls, compute = clipped["communication"], clipped["compute"]
    communication, loading = length(calls), length(calls + clipped["data"])
    hidden = communication + length(compute) - length(calls + compute)
    busy = length(calls + clipped["data"] + compute)
    parts = {
        "computation": busy - loading,
        "both at once": hidden,
        "communication": communication - hidden,
        "loading data": loading - communication,
        "neither": end - start - busy,
    }
    return {name: part / (end - start) for name, part in parts.items()}


def table_of_shares(runs):
    """The shares of the traced steps of each rank of these runs, as Markdown."""
    rows = []
    for run in runs:
        for rank in range(json.loads((run / "run.json").read_bytes())["devices"]):
            shares = shares_of(read_events(run / "traces" / f"profile_{rank}.json"))
            head = ["run", "rank", *shares]
            rows.append([run.name, str(rank), *(f"{share:.0%}" for share in shares.values())])
    return printing.markdown_table([head, *rows])


def steps_of(events):
    """{name of a traced step: its span}."""
    return {
        event["name"]: span(event)
        for event in events
        if event["name"].startswith("ProfilerStep") and event["cat"] == "user_annotation"
    }


def reduce_run(folder, chosen=None):
    """What is drawn of a run: a step as all ranks saw it. Without a choice it is the step of median
    length on rank 0.
    """
    record = json.loads((folder / "run.json").read_bytes())
    traces = [
        read_events(folder / "traces" / f"profile_{rank}.json") for rank in range(record["devices"])
    ]
    steps = [steps_of(events) for events in traces]
    in_order = sorted(steps[0], key=steps[0].get)
    by_length = sorted(steps[0], key=lambda name: length([steps[0][name]]))
    name = in_order[chosen - 1] if chosen else by_length[len(by_length) // 2]
    zero = min(step[name][0] for step in steps)
    return {
        "strategy": record["strategy"],
        "batch": record["per_device_batch_size"],
        "micro_batches": record["gradient_accumulation_steps"],
        "ranks": [
            reduce_step(events, *step[name], zero)
            for events, step in zip(traces, steps, strict=True)
        ],
    }


def reduce_step(events, start, end, zero):
    """A rank's step: its collectives in order, the spans of its phases, and its shares."""

    def is_inside(event):
        begin, stop = span(event)
        other = event["name"].startswith("ProfilerStep") and (begin, stop) != (start, end)
        return begin < end and stop > start and not other

    inside = list(filter(is_inside, events))

    def spans_of(name):
        return covered(span(event) for event in inside if event["name"].startswith(name))

    autograd = spans_of("autograd::engine::evaluate_function")
    optimizer = spans_of("Optimizer.step")
    phases = {"forward": [], "backward": [], "optimizer": []}
    for event in inside:
        if event["cat"] == "cpu_op" and event["name"].startswith("aten::"):
            phases[phase_of(event["ts"], autograd, optimizer)].append(span(event))
    calls = sorted(
        (*span(event), event["name"][5:].replace("_", "-"))
        for event in inside
        if event["name"].startswith("gloo:") and event["ts"] >= start
    )
    shares = shares_of(inside)

    def place(time):
        return round(min(max(time, start), end) - zero, 2)

    return {
        "step": [place(start), place(end)],
        "shares": {name: round(share, 3) for name, share in shares.items()},
        "calls": [[place(begin), place(stop), name] for begin, stop, name in calls],
        **{name: merge([(place(a), place(b)) for a, b in spans]) for name, spans in phases.items()},
    }


def phase_of(time, autograd, optimizer):
    if any(start <= time < end for start, end in optimizer):
        return "optimizer"
    after = autograd and time >= autograd[-1][1] and (not optimizer or time < optimizer[0][0])
    return "backward" if after or any(a <= time < b for a, b in autograd) else "forward"


def merge(spans):
    """Spans without the gaps that nobody could see."""
    wide = covered((start, end + GRAIN) for start, end in spans)
    return [[start, round(end - GRAIN, 2)] for start, end in wide]


# ------------------------------------------------------------------------------------- drawing


def gaps_of(rank):
    """The visible spans in which a rank communicates and does not compute."""
    computing = covered([*rank["forward"], *rank["backward"], *rank["optimizer"]])
    gaps = []
    for start, end in covered([begin, stop] for begin, stop, _ in rank["calls"]):
        for begin, stop in [*computing, (end, end)]:
            if start < min(begin, end):
                gaps.append((start, min(begin, end)))
            start = max(start, min(stop, end))
    return [(start, end) for start, end in gaps if end - start > GRAIN]


def initials(name):
    if name == "broadcast":
        return "BC"  # B is the backward pass
    return "".join(word[0].upper() for word in name.split("-"))


def says(width, *texts):
    """The longest of these texts that fits into a box, or none."""
    return next((text for text in texts if 6.5 * len(text) + 4 < width), "")


def draw(picture, run):
    """Two lanes per rank, and of a run with many calls two layers. Returns where they end."""
    end, y = max(rank["step"][1] for rank in run["ranks"]), 24
    batch = f"batch {run['batch']}"
    if run["micro_batches"] > 1:
        batch += f" x {run['micro_batches']} micro-batches"
    title = f"One step under {run['strategy'].upper()}, {batch} per device: {end:.0f} ms"
    picture.text(LEFT, 16, f"{title}, time to the right", weight="bold")
    # When the last rank has come to the first collective, to the second, ...
    together = [
        max(call[0] for call in calls)
        for calls in zip(*(rank["calls"] for rank in run["ranks"]), strict=True)
    ]
    for number, rank in enumerate(run["ranks"]):
        picture.text(LEFT - 8, y + 14, f"rank {number}", "end", weight="bold")
        shares = ", ".join(f"{name} {share:.0%}" for name, share in rank["shares"].items())
        picture.text(LEFT, y + 14, f"this step: {shares}", size=11)
        y += 38
        lanes(picture, y, rank, together, 0, end)
        if gaps := gaps_of(rank):
            label_gap(picture, y, (RIGHT - LEFT) / end, gaps)
        y += 60
    axis(picture, y, 0, end)
    kinds = [name for name in ("forward", "backward", "optimizer") if run["ranks"][0][name]]
    kinds += dict.fromkeys(name for *_, name in run["ranks"][0]["calls"])
    y += 24
    if window := two_layers(run["ranks"][0]):
        y = zoom(picture, y, run["ranks"][0], together, *window)
    entries = [(f"{initials(name)}: {name}", COLOURS.get(name, PINK)) for name in kinds]
    entries.append(("gap: communicates, does not compute", "url(#hatch)"))
    entries.append(("pale: waits for the other rank", PINK, 0.3))
    entries.append(("white: neither (Python, loading)", "white"))
    return picture.legend(y, entries)


def lanes(picture, y, rank, together, begin, end, numbered=()):
    """What a rank computes and communicates from `begin` to `end`. Spans that are `numbered` have
    their names elsewhere; then calls that are too short for a name have it beside them.
    """
    scale = (RIGHT - LEFT) / (end - begin)

    def box(y, start, stop, fill, text="", opacity=1, beside=False):
        wide = (min(stop, end) - max(start, begin)) * scale
        if wide > 0:
            edge = fill if wide < 3 else "black"  # or a thin box would be nothing but edge
            x = LEFT + (max(start, begin) - begin) * scale
            inside = says(wide, text, initials(text)) if text else ""
            picture.box(x, y, wide, 24, fill, inside, edge, opacity=opacity)
            if beside and not inside:
                picture.text(x + wide + 3, y + 16, initials(text), size=11)

    for lane, name in enumerate(("computes", "communicates")):
        picture.text(LEFT - 8, y + 16 + lane * 26, name, "end")
    for start, stop in gaps_of(rank):
        box(y, start, stop, "url(#hatch)")
    for name in ("forward", "backward", "optimizer"):
        for start, stop in rank[name]:
            box(y, start, stop, COLOURS[name], "" if (start, stop) in numbered else name)
    # The update needs all calls. If one seems to last longer, its thread noted the end too late.
    update = min((start for start, _ in rank["optimizer"]), default=end)
    free = 0  # a call that waits behind another one is drawn from the end of that
    for (start, stop, name), ready in zip(rank["calls"], together, strict=True):
        stop = update if start < update < stop else stop
        start, free = max(start, free), stop
        ready = min(max(start, ready), stop)
        colour = COLOURS.get(name, PINK)
        if (ready - start) * scale > 1:
            box(y + 26, start, ready, colour, opacity=0.3)
        box(y + 26, ready, stop, colour, name, beside=bool(numbered))


def two_layers(rank):
    """When two layers of FSDP's backward pass begin and end; None for a run without them."""
    begin = min((start for start, _ in rank["backward"]), default=0)
    calls = [(stop, name) for start, stop, name in rank["calls"] if start >= begin]
    reduces = [stop for stop, name in calls if name == "all-reduce"]
    gathers = len(reduces) < len(calls)
    return (reduces[0], reduces[2]) if gathers and len(reduces) > 2 else None


COPIES = {
    1: "takes its shard of the sum of gradients",
    2: "copies gathered parameters into the layer, and its shard of the next layer's into a buffer",
    3: "copies the layer's gradients into a buffer",
}


def copies(rank):
    """{(start, stop): which of COPIES}: short spans of the backward pass beside a call."""
    found = {}
    for start, stop in rank["backward"]:
        for begin, end, name in rank["calls"] if stop - start < 5 else ():
            if name == "all-reduce" and 0 <= start - end < 2 * GRAIN:
                found[start, stop] = 1
            elif abs(begin - stop) < 2 * GRAIN:
                found[start, stop] = 2 if name == "all-gather" else 3
    return found


def zoom(picture, y, rank, together, begin, end):
    """Two layers of the backward pass, with the names of short spans. Returns where this ends."""
    scale, said = (RIGHT - LEFT) / (end - begin), []
    title = f"Rank 0 from {begin:.0f} to {end:.0f} ms: the backward pass of two layers"
    picture.text(LEFT, y + 16, title, weight="bold")
    y += 42
    named = copies(rank)
    lanes(picture, y, rank, together, begin, end, named)
    for (start, stop), which in named.items():
        if begin <= start and stop <= end:
            picture.text(LEFT + ((start + stop) / 2 - begin) * scale, y - 5, which, "middle", 11)
            said.append(which)
    axis(picture, y + 60, begin, end)
    y += 84
    for which in sorted(set(said)):
        picture.text(LEFT, y + 10, f"{which}: {COPIES[which]}", size=11)
        y += 16
    return y + 6


def axis(picture, y, begin, end):
    steps = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    step = next(step for step in steps if (end - begin) / step <= 12)
    for tick in range(math.ceil(begin / step) * step, int(end) + 1, step):
        x = LEFT + (tick - begin) * (RIGHT - LEFT) / (end - begin)
        picture.line((x, y - 4), (x, y + 2))
        picture.text(min(x, WIDTH - 24), y + 14, f"{tick} ms" if tick else "0", "middle", 11)


def label_gap(picture, y, scale, gaps):
    """An arrow to the longest gap, and what all of them take."""
    start, stop = max(gaps, key=lambda gap: gap[1] - gap[0])
    total, x = length(gaps), LEFT + (start + stop) / 2 * scale
    text = f"the gap: {stop - start:.0f} ms"
    if stop - start < 0.9 * total:
        text = f"the longest of {len(gaps)} gaps: {stop - start:.0f} ms; all: {total:.0f} ms"
    picture.line((x, y - 16), (x, y))
    picture.lines.append(f'<path d="M{x:.1f},{y:.1f} l-4,-7 l8,0 z"/>')
    left = x > (LEFT + RIGHT) / 2
    picture.text(x + (-6 if left else 6), y - 7, text, "end" if left else "start", 11)


def main():
    parser = argparse.ArgumentParser(description="Draw a step of profiled runs.")
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs with --profile")
    folder = "the folder for the pictures and traces.json"
    parser.add_argument("--to", type=Path, default=IMAGES / "traces", help=folder)
    step = "which of the 5 traced steps (default: the one of median length)"
    parser.add_argument("--step", type=int, choices=range(1, 6), help=step)
    shares = "print where the time of all traced steps went"
    parser.add_argument("--shares", action="store_true", help=shares)
    args = parser.parse_args()
    try:
        if args.shares:
            return print(table_of_shares(args.runs))
        traced = {run.name: reduce_run(run, args.step) for run in args.runs}
    except (OSError, LookupError, TypeError, ValueError) as problem:
        printing.stop(f"not a run with --profile ({type(problem).__name__}: {problem})")
    file = args.to / "traces.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept |= traced
    if args.runs:
        args.to.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in kept.items())
        file.write_text("{\n" + lines.replace('{"step"', '\n  {"step"') + "\n}\n")
    for name, run in kept.items():
        picture = Picture()
        picture.save(args.to / f"{name}.svg", draw(picture, run))
        print(f"written: {args.to / name}.svg")


if __name__ == "__main__":
    main()
