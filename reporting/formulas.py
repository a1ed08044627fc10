"""What the formulas of planning/ say of the cells: steps on more devices, traffic and memory."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from planning.facts import shards_of
from planning.links import bytes_sent, find_link
from planning.memory import hold_by_formula
from planning.prediction import predict_growth
from reporting.comparing import Cell, Workload
from reporting.pictures import ENOUGH, Held, memory_is_known
from reporting.splitting import find_alone, seconds_alone
from reporting.tables import Rows, in_ms, name_briefly, show, table

FITTED = (
    "Its factors were fitted to runs on CPUs over gloo; of GPUs and NCCL, nothing says how wide it "
    "has to be."
)


def describe_predictions(workload: Workload) -> Iterator[str]:
    """Predicted steps beside the measured ones, as Markdown."""
    rows = []
    for cell in workload.cells:
        found = cell.prediction
        if found:
            alone = seconds_alone(cell, find_alone(cell, workload.cells))
            rows.append(
                name_briefly(cell)
                | {
                    "step in ms, one device": in_ms(alone),
                    "predicted": in_ms(found.seconds),
                    "from": in_ms(found.low),
                    "to": in_ms(found.high),
                    "measured": in_ms(cell.step_seconds),
                    "miss": f"{found.miss:+.0%}",
                }
            )
    if rows:
        yield (
            "Predicted from the same strategy's step on one device and the measured link "
            "(planning/prediction.py). A miss above zero means that the prediction is too "
            f"long. At least nine of ten measured steps should lie in the interval. {FITTED}"
        )
        yield table(rows)


def describe_growth(
    workload: Workload, links: dict[Cell, list[dict[str, Any]]], predict_to: int
) -> Iterator[str]:
    """Predicted steps and efficiencies at 2, 4, ... `predict_to` devices, with their intervals,
    as Markdown.
    """
    cells = [
        cell
        for cell in workload.cells
        if cell.devices == 1 and cell.step_seconds and cell.setting.strategy != "baseline"
    ]
    if not cells:
        yield (
            "No prediction: it starts from a run of each strategy on one device "
            "(--num_processes 1), long enough for a samples_per_second."
        )
        return
    rows = list(
        itertools.chain.from_iterable(
            grow(cell, workload.cells, links[cell], predict_to) for cell in cells
        )
    )
    if not rows:
        yield "No prediction: no check.json is of devices like these, or no formula is known."
        return
    link = find_link(cells[0].row(), links[cells[0]])
    yield (
        "More devices, by formula: the batch per device as on one, every device behind the link "
        f"that {link['processes']} processes on {link['nodes']} node(s) measured. The interval "
        "is that of the table above, and grows by as much with each doubling beyond what was "
        f"checked. {FITTED} Its low end sends through a tree, its high "
        "end round a ring. Not modelled: links that nodes share, slower ranks, and the topology "
        "inside a node."
    )
    yield table(rows)


def grow(cell: Cell, cells: list[Cell], links: list[dict[str, Any]], most: int) -> Rows:
    base = find_alone(cell, cells, baseline=True)
    rows = []
    for step in predict_growth(cell.row(), cell.step_seconds or 0.0, links, most):
        row = {
            "strategy": cell.shown,
            "devices": step.devices,
            "step in ms, predicted": in_ms(step.seconds),
            "from-to": f"{in_ms(step.low)}-{in_ms(step.high)}",
        }
        if base is not None and base.step_seconds:
            best, worst = base.step_seconds / step.low, base.step_seconds / step.high
            row |= {
                "efficiency, predicted": f"{base.step_seconds / step.seconds:.0%}",
                "efficiency, from-to": f"{worst:.0%}-{min(1, best):.0%}",
            }
        rows.append(row)
    return rows


def hold_cells(cells: list[Cell]) -> dict[Cell, Held]:
    """Bytes of parameters, gradients, states and activations of a rank of each cell by formula, as
    far as there is one.
    """
    known = [cell for cell in cells if cell.median.model.parameters]
    frame = pd.DataFrame([cell.row() for cell in known])
    numbers = ["per_device_batch_size", "sequence_length", "gradient_accumulation_steps"]
    if known:
        frame[numbers] = frame[numbers].astype(float)
    rows = hold_by_formula(frame).to_dict("records") if known else []
    return {
        cell: {str(name): size for name, size in row.items() if size == size}  # NaN is no number
        for cell, row in zip(known, rows, strict=True)
    }


def formulas_of(cell: Cell, held: Held) -> dict[str, Any]:
    """What a rank of a cell sends and holds by formula, and its measured peak, as a row."""
    setting = cell.setting
    parameters = cell.median.model.parameters
    shards = shards_of(json.loads(setting.strategy_options or "{}"), cell.devices)
    sent = bytes_sent(setting.strategy, parameters, cell.devices, cell.work.on_cpu, shards)
    uncounted = setting.strategy.startswith("zero3") and setting.activation_checkpointing
    plain = cell.work.precision == "no" and setting.gradient_accumulation_steps == 1
    if uncounted or not plain:
        sent = None
    parts = {name: size / 1e6 for name, size in held.items()}
    total = sum(parts.values())
    activations = parts.pop("activations", None)
    measured = cell.figures.training_memory_mb
    return {
        "strategy": cell.shown,
        "devices": cell.devices,
        "parameters": show(parameters, "{:,.0f}"),
        "MB sent per step": None if sent is None else f"{sent / 1e6:,.2f}",
        "MB of parameters, gradients, Adam": f"{sum(parts.values()):,.2f}" if parts else None,
        "MB of activations, at most": show(activations, "{:,.2f}"),
        "MB of training alone": show(measured, "{:,.0f}"),
        "by formula": f"{total / measured:.0%}" if measured and total else None,
    }


def describe_formulas(cells: list[Cell], held: dict[Cell, Held]) -> str:
    """What each rank of these cells sends and holds by formula, and its measured peak, as
    Markdown.
    """
    rows = [formulas_of(cell, held.get(cell, {})) for cell in cells]
    unknown = [cell for cell in cells if not memory_is_known(cell, held.get(cell, {}))]
    why = (
        f" The picture of memory leaves out cells of which the formulas know less than {ENOUGH:.0%}"
        " of what was measured: the rest is what libraries hold, and what comes and goes in a step."
        if unknown
        else ""
    )
    return (
        "What the formulas say of a rank. Bytes sent are those in fp32 without accumulation, "
        "and over gloo on a CPU. Bytes held include what is offloaded to the host. Activations "
        "are those of the layers of a transformer, for windows of full length and without "
        "dropout. *MB of training alone* is the measured peak without what the rank held before it "
        f"loaded the model: libraries and data.{why}\n\n{table(rows)}"
    )
