"""What scripts import, so that forks of a process that has imported it need not."""

import contextlib
import importlib
import re

import tqdm

LIBRARIES = ["accelerate.utils.deepspeed", "deepspeed.module_inject.auto_ep_layer"]
LIBRARIES += ["deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.zero.muon.muon_optimizer"]
LIBRARIES += ["deepspeed.runtime.superoffload.superoffload_stage3", "torch._dynamo"]
LIBRARIES += ["torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"]
LIBRARIES += ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
LIBRARIES += ["torch.distributed.optim", "torch.utils.tensorboard"]
LIBRARIES += ["transformers.models.auto.tokenization_auto"]
LIBRARIES += ["transformers.models.bert.modeling_bert"]

tqdm.tqdm.get_lock()  # one for all ranks, or each would leave one behind


def import_libraries(text):
    """Import those of LIBRARIES that are installed, if they are of torch, or if a text (scripts and
    YAMLs) imports or configures them.
    """
    for name in LIBRARIES:
        package = name.partition(".")[0]
        used = rf"(?:import|from) {package}|^{package}_config"
        if package == "torch" or re.search(used, text, re.MULTILINE):
            with contextlib.suppress(Exception):  # A script that needs it tells what is wrong.
                importlib.import_module(name)
