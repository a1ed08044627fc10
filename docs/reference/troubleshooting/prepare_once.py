"""A slow start: every process tokenises all the data, although one could do it for all of them."""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

accelerator = Accelerator(cpu=True)
cache = Path(broadcast_object_list([tempfile.mkdtemp()])[0]) / "tokens.pt"
in_turn = accelerator.main_process_first if "--fix" in sys.argv else contextlib.nullcontext
done = 0
accelerator.wait_for_everyone()
with in_turn():
    if not cache.exists():
        time.sleep(0.5)  # stands for minutes of tokenising
        done = 100
        partial = cache.with_suffix(f".{accelerator.process_index}")
        torch.save(torch.arange(done), partial)
        partial.replace(cache)
    texts = len(torch.load(cache))
total, processes = accelerator.reduce(torch.tensor(done)).item(), accelerator.num_processes
accelerator.print(f"{texts} texts; {processes} processes have tokenised {total}")
