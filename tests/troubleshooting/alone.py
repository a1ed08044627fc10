"""N processes were started, and each one trains alone on all the data: accelerate looked for GPUs,
and found none.
"""

import os
import sys

from accelerate import Accelerator

accelerator = Accelerator(cpu=True) if "--fix" in sys.argv else Accelerator()
started = int(os.environ.get("WORLD_SIZE", 1))
print(f"process {accelerator.process_index} of {accelerator.num_processes}; "
      f"the launcher started {started}")
