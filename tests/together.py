"""Runs several scripts in one set of processes, one after the other: each launch costs seconds.

    together.py FOLDER '[NAME=VALUE ...] SCRIPT [flags]' ...

What each printed on a rank, and the error that ended it if one did, goes to FOLDER/rank_R.json.
"""

import contextlib
import gc
import io
import json
import os
import runpy
import shlex
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

folder, *commands = sys.argv[1:]
environment, outputs = dict(os.environ), {}
for command in commands:
    words = shlex.split(command)
    while "=" in words[0]:
        name, os.environ[name] = words.pop(0).split("=")
    sys.argv = words
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    outputs[command] = io.StringIO()
    with contextlib.redirect_stdout(outputs[command]):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    # As in a new process, but for the group of ranks and the imports.
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
texts = {command: output.getvalue() for command, output in outputs.items()}
(Path(folder) / f"rank_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(texts))
os._exit(0)  # gloo's threads outlive DDP, and now and then abort a process that is done
