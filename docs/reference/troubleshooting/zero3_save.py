"""An empty model on disk: ZeRO-3's parameters are empty outside of a forward or backward pass."""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from without_gpu import make_accelerator

accelerator = make_accelerator()
model = torch.nn.Linear(400, 100)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if "--fix" in sys.argv:  # on all ranks: it gathers; only rank 0 has something to save then
    weights = accelerator.get_state_dict(model)
else:
    weights = accelerator.unwrap_model(model).state_dict()
if accelerator.is_main_process:
    file = Path(tempfile.mkdtemp()) / "model.safetensors"
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file)
    print(f"{file.stat().st_size:,} bytes; weight: {list(load_file(file)['weight'].shape)}")
    torch.nn.Linear(400, 100).load_state_dict(load_file(file))
    print("loaded")
