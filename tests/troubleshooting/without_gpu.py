"""An Accelerator that shards on a machine without a GPU too: the least of what train_mnist_rnn.make_accelerator does.

DDP needs no more than Accelerator(cpu=True); the reproducers for ZeRO and FSDP2 start with this instead.
"""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs


def make_accelerator(**options):
    if torch.cuda.is_available():
        return Accelerator(**options)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops import __compatible_ops__ as deepspeed_ops

        deepspeed_ops["deepspeed_shm_comm"] = False  # or it compiles an all-reduce of its own
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **options)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":  # which accelerate takes for a GPU matter
        accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator
