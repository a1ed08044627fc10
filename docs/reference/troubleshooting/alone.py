"""N processes were started, and each trains alone on all the data: accelerate found no GPU."""

import os
import sys

from accelerate import Accelerator

accelerator = Accelerator(cpu="--fix" in sys.argv)
print(
    f"process {accelerator.process_index} of {accelerator.num_processes}; "
    f"the launcher started {os.environ.get('WORLD_SIZE', 1)}"
)
