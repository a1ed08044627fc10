"""Workarounds in the scripts are still needed. A test that fails says: look whether one can go.
That FSDP is a matter of GPUs to accelerate has the version beside it, in `connect`.
"""

import threading

import torch
from accelerate.utils import TorchDynamoPlugin
from conftest import launch

PROBE = """
import datetime, os, torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from deepspeed.ops import __compatible_ops__
from torch.distributed import distributed_c10d

__compatible_ops__["deepspeed_shm_comm"] = False
timeout, cpu = datetime.timedelta(seconds=123), torch.device("cpu")
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timeout)])
model, loader = torch.nn.Linear(4, 4), torch.utils.data.DataLoader(torch.zeros(8, 4), 2)
accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
options = [group._get_backend(cpu).options for group in distributed_c10d._world.pg_map]
accelerator.print(sorted({option._timeout.total_seconds() for option in options}), flush=True)
torch.distributed.barrier()
os._exit(0)
"""


def test_deepspeeds_groups_have_a_timeout_of_their_own(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    assert "[123.0, 1800.0]" in launch("zero2", tmp_path / "probe.py", tmp_path).out


def test_accelerate_compiles_for_fixed_shapes(monkeypatch):
    """What the launcher sets is False, and torch's own default is None."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin().dynamic is False


def test_dataparallels_threads_forget_the_dtype_of_autocast():
    """A thread finds CUDA's default, fp16. So `refuse_wrong_yaml` refuses bf16 under dp."""
    before, found = torch.get_autocast_dtype("cuda"), []
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    thread = threading.Thread(target=lambda: found.append(torch.get_autocast_dtype("cuda")))
    thread.start()
    thread.join()
    torch.set_autocast_dtype("cuda", before)
    assert found == [torch.float16]
