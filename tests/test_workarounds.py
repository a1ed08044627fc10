"""Workarounds in the scripts are still needed. A test that fails says: look whether one can go."""

import json
import threading

import pytest
import torch
from conftest import launch

PROBE = """
import json, os, sys, datetime, torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed import distributed_c10d

timeout = datetime.timedelta(seconds=123)
deepspeed = "ACCELERATE_USE_DEEPSPEED" in os.environ
if deepspeed:
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__["deepspeed_shm_comm"] = False
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timeout)])
found = {"type": str(accelerator.distributed_type), "timeouts": []}
if deepspeed:
    model = torch.nn.Linear(4, 4)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 4), 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for group in distributed_c10d._world.pg_map:
        options = group._get_backend(torch.device("cpu")).options
        found["timeouts"].append(options._timeout.total_seconds())
torch.distributed.barrier()
if os.environ["RANK"] == "0":
    with open(sys.argv[sys.argv.index("--output_dir") + 1], "w") as file:
        json.dump(found, file)
accelerator.end_training()
os._exit(0)
"""


def what_a_plain_accelerator_finds(strategy, folder):
    (folder / "probe.py").write_text(PROBE)
    launch(strategy, folder / "probe.py", folder / "found.json")
    return json.loads((folder / "found.json").read_text())


def test_accelerate_takes_fsdp_for_a_matter_of_gpus(tmp_path):
    """make_accelerator"""
    assert what_a_plain_accelerator_finds("fsdp", tmp_path)["type"] != "DistributedType.FSDP"


def test_deepspeeds_groups_have_a_timeout_of_their_own(tmp_path):
    """make_accelerator"""
    found = what_a_plain_accelerator_finds("zero2", tmp_path)
    assert found["type"] == "DistributedType.DEEPSPEED" and len(found["timeouts"]) > 1
    assert 123 in found["timeouts"] and set(found["timeouts"]) != {123}


def test_accelerate_compiles_for_fixed_shapes(monkeypatch):
    """make_accelerator: what the launcher sets is False, and torch's own default is None."""
    from accelerate.utils import TorchDynamoPlugin

    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin().dynamic is False


def test_dataparallels_threads_forget_the_dtype_of_autocast():
    """prepare_launch: what a thread finds is CUDA's default, fp16."""
    before, found = torch.get_autocast_dtype("cuda"), []
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        thread = threading.Thread(target=lambda: found.append(torch.get_autocast_dtype("cuda")))
        thread.start()
        thread.join()
    finally:
        torch.set_autocast_dtype("cuda", before)
    assert found == [torch.float16]


def test_fsdp_offloads_into_pinned_memory_which_needs_a_gpu():
    """make_accelerator"""
    from torch.distributed.fsdp import CPUOffloadPolicy

    assert CPUOffloadPolicy().pin_memory
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            torch.ones(1).pin_memory()
