"""What the reproducers for ZeRO and FSDP2 need on a machine without a GPU."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs


def make_accelerator(**options):
    """An Accelerator that shards on a CPU too: the least of what train_mnist_rnn.py does for that.

    DDP needs no more than Accelerator(cpu=True).
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if not torch.cuda.is_available():
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
        if deepspeed:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            from deepspeed.ops import __compatible_ops__ as deepspeed_ops

            deepspeed_ops["deepspeed_shm_comm"] = False  # or it compiles an all-reduce of its own
    accelerator = Accelerator(**options)
    if deepspeed:  # DeepSpeed wants it where no DataLoader is prepared
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = 2
    elif accelerator.device.type == "cpu":  # accelerate takes FSDP for a matter of GPUs
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
