"""A hang when rank 0 logs, evaluates or saves: it calls something that all ranks have to call."""

import datetime
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

# Not the default of minutes, so that the hang ends while one looks on.
timeout = datetime.timedelta(seconds=5)
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])
loss = torch.tensor(accelerator.process_index + 1.0)
if "--fix" in sys.argv:
    mean = accelerator.reduce(loss, "mean")  # all ranks reduce,
    if accelerator.is_main_process:  # and one prints
        print(f"mean loss {mean}")
elif accelerator.is_main_process:
    print(f"mean loss {accelerator.reduce(loss, 'mean')}")  # the others never come
accelerator.wait_for_everyone()
