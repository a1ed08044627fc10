"""Each workaround in the scripts is still needed. A test that fails here says: look whether it can go.

The section "workarounds" of the scripts holds them, one function each; `RowLSTM` holds one more.
"""

import dataclasses
import importlib.util
import inspect
import json
import sys
import threading

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, launch
from deepspeed.comm.torch import build_shm_op
from packaging.requirements import Requirement
from packaging.version import Version

FLOORS = {
    requirement.name: Version(str(next(iter(requirement.specifier)).version))
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line and line[0].isalpha()
    for requirement in [Requirement(line.split("#")[0].strip())]
}
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
    """allow_fsdp_on_cpu"""
    assert what_a_plain_accelerator_finds("fsdp", tmp_path)["type"] != "DistributedType.FSDP"


def test_deepspeeds_groups_have_a_timeout_of_their_own(tmp_path):
    """mend_prepared"""
    found = what_a_plain_accelerator_finds("zero2", tmp_path)
    assert found["type"] == "DistributedType.DEEPSPEED" and len(found["timeouts"]) > 1
    assert 123 in found["timeouts"] and set(found["timeouts"]) != {123}


def test_deepspeed_has_no_switch_for_its_all_reduce():
    """set_up_cpu: where there is a compiler, DeepSpeed would compile one at the start."""
    source = inspect.getsource(build_shm_op)
    assert "__compatible_ops__" in source and "environ" not in source


def test_a_supported_torch_sums_over_gloo_where_it_should_average():
    """mend_prepared: pytorch#162338, in torch 2.8; mended in 2.9."""
    assert FLOORS["torch"] < Version("2.9"), "no supported torch has the fault"


def test_a_supported_torch_has_the_private_name_only():
    """mend_prepared: set_timeout is public from torch 2.15 on."""
    assert FLOORS["torch"] < Version("2.15"), "_set_pg_timeout is needed no more"


def test_accelerate_has_no_data_parallel():
    """wrap_for_dp"""
    import accelerate.accelerator

    assert "nn.DataParallel(" not in inspect.getsource(accelerate.accelerator)


def test_cudnn_moves_the_weights_of_an_lstm():
    """RowLSTM"""
    assert "_cudnn_rnn_flatten_weight" in inspect.getsource(torch.nn.RNNBase.flatten_parameters)


@pytest.mark.parametrize("looked_at", ["2.15"])
def test_the_newest_torch_was_looked_at(looked_at):
    """leave: pytorch#190489 is open, and one abort in a hundred cannot be waited for here."""
    version = Version(Version(torch.__version__).base_version)
    assert version < Version("2.16"), f"newer than {looked_at}: is os._exit still needed?"


def test_accelerate_searches_for_lomo_at_every_step(monkeypatch):
    """calm_accelerate"""
    searched, original = [], importlib.util.find_spec

    def find_spec(name, *rest):
        searched.append(name)
        return original(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.delitem(sys.modules, "lomo_optim", raising=False)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    searched.clear()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert "lomo_optim" in searched


def test_ddp_warns_of_a_name_that_accelerate_gives_it(tmp_path):
    """calm_accelerate: from the first torch on that has the new name."""
    from accelerate.utils import DistributedDataParallelKwargs

    new = {field.name for field in dataclasses.fields(DistributedDataParallelKwargs)}
    assert "broadcast_buffers" in new and "forward_sync_buffers" not in new


def test_accelerate_drops_dynamo_under_deepspeed():
    """check_launch; `accelerate launch` hands it on to all others."""
    from accelerate.utils import launch as launching

    assert "DYNAMO" in inspect.getsource(launching.prepare_multi_gpu_env)
    assert "DYNAMO" not in inspect.getsource(launching.prepare_deepspeed_cmd_env)


def test_accelerate_compiles_for_fixed_shapes(monkeypatch):
    """make_accelerator: what the launcher sets is False, and torch's own default is None."""
    from accelerate.utils import TorchDynamoPlugin

    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin().dynamic is False


def test_dataparallels_threads_forget_the_dtype_of_autocast():
    """check_launch: what a thread finds is CUDA's default, fp16, and DataParallel tells it nothing else."""
    assert "dtype" not in inspect.getsource(sys.modules["torch.nn.parallel.parallel_apply"])
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
    """allow_fsdp_on_cpu"""
    from torch.distributed.fsdp import CPUOffloadPolicy

    assert CPUOffloadPolicy().pin_memory
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            torch.ones(1).pin_memory()


def test_accelerates_own_activation_checkpointing_draws_other_masks():
    """load_model; and test_configs.py refuses its switch in a YAML."""
    from accelerate.utils import fsdp_utils

    assert "preserve_rng_state=False" in inspect.getsource(fsdp_utils)


def test_a_supported_transformers_has_the_old_name_only():
    """load_model: activation_checkpointing_enable came with transformers 5.23."""
    assert FLOORS["transformers"] < Version("5.23"), "gradient_checkpointing_enable is needed no more"
