"""Importing this imports what scripts import, as far as it is installed. So forks have it."""

import contextlib
import importlib
import sys

LIBRARIES = ["accelerate.utils.deepspeed", "deepspeed.module_inject.auto_ep_layer"]
LIBRARIES += ["deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.zero.muon.muon_optimizer"]
LIBRARIES += ["deepspeed.runtime.superoffload.superoffload_stage3", "torch._dynamo", "tqdm"]
LIBRARIES += ["torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"]
LIBRARIES += ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
LIBRARIES += ["torch.distributed.optim", "torch.utils.tensorboard"]
LIBRARIES += ["transformers.models.auto.tokenization_auto"]
LIBRARIES += ["transformers.models.bert.modeling_bert"]

for name in LIBRARIES:
    with contextlib.suppress(Exception):  # A script that needs it tells what is wrong with it.
        importlib.import_module(name)
if "tqdm" in sys.modules:
    sys.modules["tqdm"].tqdm.get_lock()  # one for all ranks, or each would leave one behind
