"""Watches a training script, for the checkers of exercises 9 and 10.

`launch` starts the script on two CPU processes. In each of them `watch` runs the script as it is,
and notes what it trains on, what it prints and what it saves. `read` reads these notes.
"""

import argparse
import contextlib
import faulthandler
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

import environment  # noqa: F401  It tells who forgot to activate .venv.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

HERE = Path(__file__).resolve().parent
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "all_gather",
    "reduce",
)
DDP_YAML = HERE.parent.parent / "accelerate_configs" / "ddp.yaml"


class Going:
    """The handle that a collective with async_op=True returns. It also notes each wait()."""

    def __init__(self, work, note_wait):
        self.work, self.note_wait = work, note_wait

    def __getattr__(self, name):
        return getattr(self.work, name)

    def wait(self, *args):
        self.note_wait()
        return self.work.wait(*args)


def watch(script, folder, seconds=0):
    """Run the script with FOLDER/saved.pt as its argument, and end it after `seconds` (0: never).
    Each rank has a folder of its own, so the files in it tell which rank saved something.
    """
    folder.mkdir(parents=True)
    pixels = (load_digits().data / 16).astype("float32")
    number_of = {image.tobytes(): number for number, image in enumerate(pixels)}
    notes = {"world": 1, "steps": [], "losses": [], "calls": [], "updated": 0}
    samples = []  # of the current step
    calls = []  # of the current step: a dict for each collective, see `noting`
    backward = []  # not empty during a backward pass
    weights = {}  # of the trained layers, in their order
    begun = [{}, {}, {}]  # for each of the first three steps: a copy of the weights at its start

    def note_layer(module, inputs):
        """Before each layer: its weights, and what training puts into the first layer. A layer is
        the first if its input does not come from other layers.
        """
        if not torch.is_grad_enabled():
            return
        own = list(module.parameters(recurse=False))
        weights.update(dict.fromkeys(own))
        step = len(notes["steps"])
        if step < len(begun):
            for weight in own:
                begun[step].setdefault(weight, weight.detach().cpu().clone())
        if hasattr(module, "in_features") and inputs[0].is_leaf:
            samples.extend(number_of.get(row.numpy().tobytes()) for row in inputs[0].detach().cpu())

    def note_step(optimizer, *_):
        """After each step of the optimizer."""
        notes["world"] = dist.get_world_size() if dist.is_initialized() else 1
        notes["steps"].append(samples.copy())
        notes["calls"].append(calls.copy())
        groups = optimizer.param_groups
        notes["updated"] = sum(part.numel() for group in groups for part in group["params"])
        samples.clear()
        calls.clear()

    def noting(name):
        """The collective of that name. It also notes the size of its largest tensor, when it
        starts, and when the script waits for it: "backward", later in the "step", or "after" it.
        """

        def moment(call):
            if backward:
                return "backward"
            return "step" if any(call is other for other in calls) else "after"

        collective = getattr(dist, name)

        def note_call(*args, **options):
            tensors = [value for value in [*args, *options.values()] if torch.is_tensor(value)]
            numbers = max((tensor.numel() for tensor in tensors), default=0)
            call = {"name": name, "numbers": numbers, "waits": []}
            calls.append(call)
            call["started"] = moment(call)
            work = collective(*args, **options)
            if work is None:  # It waited.
                call["waits"].append(call["started"])
            return work and Going(work, lambda: call["waits"].append(moment(call)))

        return mock.patch.object(dist, name, note_call)

    def note_backward(*args, whole=torch.autograd.backward, **options):
        backward.append(True)
        try:
            return whole(*args, **options)
        finally:
            backward.pop()

    def note_loss(*args, loss_of=nn.functional.cross_entropy, **options):
        loss = loss_of(*args, **options)
        if torch.is_grad_enabled():
            notes["losses"].append(loss.detach().mean().item())
        return loss

    hooks = [
        register_module_forward_pre_hook(note_layer),
        register_optimizer_step_post_hook(note_step),
    ]
    with (
        contextlib.ExitStack() as noted,
        open(folder / "printed", "w") as printed,
        open(folder / "error", "w") as error,
        contextlib.redirect_stdout(printed),
        mock.patch.object(sys, "argv", [str(script), str(folder / "saved.pt")]),
        mock.patch.object(nn.functional, "cross_entropy", note_loss),
        mock.patch.object(torch.autograd, "backward", note_backward),
    ):
        for name in COLLECTIVES:
            noted.enter_context(noting(name))
        over = threading.Event()
        end = threading.Timer(seconds, give_up, (folder, over))
        if seconds:
            faulthandler.dump_traceback_later(seconds, file=error)
            end.start()
            faulthandler.enable(file=error)  # It says where, too, if the process is aborted.
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Exception:
            traceback.print_exc(file=error)
            raise
        finally:
            if seconds:
                end.cancel()
                over.set()
                faulthandler.cancel_dump_traceback_later()
                faulthandler.disable()
            for hook in hooks:
                hook.remove()
    notes["weights"] = [weight.detach().cpu() for weight in weights]
    copies = [list(step.values()) for step in begun if step]
    notes["begun"] = [torch.cat([copy.flatten() for copy in step]) for step in copies]
    torch.save(notes, folder / "notes.pt")


def give_up(folder, over):
    """Note for how much of the next two seconds this rank computes, and end it, unless its script
    is over by then.
    """
    before = time.process_time()
    over.wait(2)
    with contextlib.suppress(OSError):  # The folder is gone if the launcher was killed.
        (folder / "busy").write_text(f"{(time.process_time() - before) / 2}")
    # The launcher ends the other rank when one ends. So each has time to say where it waits.
    if not over.wait(2):
        os._exit(1)


def launch(script, folder, seconds):
    """Start the script on two ranks, each under `watch`. Returns the launcher's process."""
    if re.search(r"^(from|import) accelerate\b", script.read_text(errors="replace"), re.M):
        launcher = ["accelerate.commands.launch", "--config_file", DDP_YAML]
        launcher += ["--main_process_port", "0"]
    else:
        launcher = ["torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
        launcher += ["--nproc_per_node", "2"]
    words = [sys.executable, "-m", *launcher, __file__, script, folder, seconds]
    with open(folder / "launcher", "w") as output:
        return subprocess.Popen(list(map(str, words)), stdout=output, stderr=subprocess.STDOUT)


def read(folder):
    """What `watch` noted there, what was printed, and what was saved: None if there is no file."""
    notes = torch.load(folder / "notes.pt")
    notes["printed"] = (folder / "printed").read_text()
    try:
        saved = folder / "saved.pt"
        notes["saved"] = torch.load(saved, map_location="cpu") if saved.exists() else None
    except Exception as problem:  # of many kinds, if it is a folder, or if something else is in it
        notes["saved"] = problem
    return notes


def split(values, epochs):
    """The values of each epoch: a list of lists."""
    length = len(values) // epochs
    return [values[epoch * length : (epoch + 1) * length] for epoch in range(epochs)]


def samples(ranks, epoch, epochs):
    """The numbers of the samples that each rank saw in this epoch, in their order."""
    return [sum(split(notes["steps"], epochs)[epoch], []) for notes in ranks]


def repeated_order(ranks, epochs):
    """The first epoch that has the same order as the one before it, in words, or ""."""
    for epoch in range(1, epochs):
        if samples(ranks, epoch, epochs) == samples(ranks, epoch - 1, epochs):
            return f"epoch {epoch} has the same order as epoch {epoch - 1}"
    return ""


def mean_losses(ranks, epochs):
    """For each epoch, the mean of the losses of all its steps on all ranks."""
    both = [split(notes["losses"], epochs) for notes in ranks]
    epochs = [sum(parts, []) for parts in zip(*both, strict=True)]
    return [sum(losses) / max(len(losses), 1) for losses in epochs]


def wrong_losses(printed, right):
    """The first epoch whose loss differs by more than 1e-4 of its value, in words, or ""."""
    for epoch, (one, other) in enumerate(zip(printed, right, strict=True)):
        if abs(one - other) > 1e-4 * other:
            return f"epoch {epoch} printed {one:.6f}, but it is {other:.6f}"
    return ""


def why_it_failed(script, folder, seconds):
    """In lines, why the script did not come to its end on both ranks."""
    lines = []
    for rank in range(2):
        file = folder / f"rank_{rank}" / "error"
        error = file.read_text() if file.exists() else ""
        places = re.findall(rf'File ".*{re.escape(script.name)}", line (\d+)', error) or ["?"]
        busy = folder / f"rank_{rank}" / "busy"
        share = float(busy.read_text() or 0) if busy.exists() else 0
        if share > 0.2:
            lines.append(
                f"rank {rank} is still computing in line {places[0]} after {seconds} s. Does "
                "its loop end? If it does, give it more time: --seconds"
            )
        elif error.startswith("Timeout"):  # with the innermost call first; only the main thread's
            lines.append(
                f"rank {rank} is still waiting in line {places[0]} after {seconds} s. Does "
                "every rank call every collective, in the same order?"
            )
        elif error.startswith("Fatal Python error"):
            lines.append(
                f"rank {rank} was aborted in line {places[0]}. gloo does this "
                "if the ranks call different collectives at the same time"
            )
        elif error:
            lines.append(f"rank {rank} ended in line {places[-1]}: {error.splitlines()[-1]}")
    return lines or (folder / "launcher").read_text().splitlines()[-10:]


def check(judge, reference=None, parts=("1",)):
    """Run the script of the command line, and print a line for each point of `judge(ranks, notes
    of the reference, part of the exercise)`: a list of names and problems ("": none; None: cannot
    be said yet). Returns the exit code.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("script", type=Path, help="your script")
    parser.add_argument("--part", default="1", choices=parts, help="of the exercise (1)")
    parser.add_argument("--seconds", type=int, default=60, help="that it may take (60)")
    args = parser.parse_args()
    if not args.script.is_file():
        sys.exit(f"error: there is no file {args.script}")
    if not args.script.read_text(errors="replace").strip():
        sys.exit(f"error: {args.script} is empty")
    longest = args.seconds + 60
    print(f"({args.script.name} runs on two processes: 20 s, at most {longest})", flush=True)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        launcher = launch(args.script, folder, args.seconds)
        if reference:  # while the ranks start
            watch(reference, folder / "reference")
        try:
            launcher.wait(args.seconds + 60)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            launcher.wait()
        if not all((folder / f"rank_{rank}" / "notes.pt").exists() for rank in range(2)):
            print(f"WRONG  {args.script} runs to its end on two ranks")
            print(*why_it_failed(args.script, folder, args.seconds), sep="\n")
            return 1
        ranks = [read(folder / f"rank_{rank}") for rank in range(2)]
        if not any(notes["steps"] for notes in ranks):
            print(f"WRONG  {args.script} trains: no optimizer made a step. Is main() called?")
            return 1
        points = judge(ranks, read(folder / "reference") if reference else None, args.part)
    for name, problem in points:
        if problem:
            print(f"WRONG  {name}: {problem}")
        else:
            print(f"ok     {name}" if problem == "" else f"later  {name}: first mend what is wrong")
    return int(any(problem != "" for _, problem in points))


if __name__ == "__main__":
    watch(Path(sys.argv[1]), Path(sys.argv[2]) / f"rank_{os.environ['RANK']}", int(sys.argv[3]))
