"""A checkpoint that cannot be loaded: the job was killed in the middle of writing it."""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 64)).sum())
optimizer.step()
folder = Path(broadcast_object_list([tempfile.mkdtemp()])[0])


def save(step, killed=False):
    """If fixed, the folder gets its name when it is complete."""
    final = folder / f"step_{step}"
    target = final.with_suffix(".partial") if "--fix" in sys.argv else final
    accelerator.save_state(target)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and killed:  # what a kill leaves: a part of a file
        (target / "optimizer.bin").write_bytes((target / "optimizer.bin").read_bytes()[:1000])
    elif accelerator.is_main_process:
        target.rename(final)
    accelerator.wait_for_everyone()


save(1)
save(2, killed=True)
newest = max(folder.glob("step_?"))
accelerator.print(f"resuming from {newest.name}")
accelerator.load_state(newest)
accelerator.print("resumed")
