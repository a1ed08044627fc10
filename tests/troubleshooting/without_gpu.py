"""What the reproducers for ZeRO and FSDP2 need on a machine without a GPU."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs


def make_accelerator(**options):
    """An Accelerator that shards on a CPU too: the least of what train_mnist_rnn.py does for that.

    DDP needs no more than Accelerator(cpu=True).
    """
    if torch.cuda.is_available():
        return Accelerator(**options)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops import __compatible_ops__ as deepspeed_ops

        deepspeed_ops["deepspeed_shm_comm"] = False  # or it compiles an all-reduce of its own
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **options)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":  # which accelerate takes for a GPU matter
        kind = DistributedType.FSDP
        accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = kind
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator


def flatten_like_cudnn(lstm):
    """What RNNBase.flatten_parameters does to the weights on a GPU; on a CPU it does nothing."""
    weights = [weight for weight in lstm._flat_weights if weight.numel()]
    buffer = torch.cat([weight.detach().flatten() for weight in weights])
    parts = buffer.split([weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        with torch.no_grad():
            weight.set_(part.view(weight.shape))
