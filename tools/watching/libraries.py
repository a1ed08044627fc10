"""Importing this imports what Accelerate scripts import, so that forks of the process have it."""
# ruff: noqa: F401

import accelerate.utils.deepspeed
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.muon.muon_optimizer
import torch._dynamo
import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.utils.tensorboard
import tqdm
import transformers.models.auto.tokenization_auto
import transformers.models.bert.modeling_bert

tqdm.tqdm.get_lock()  # one for all ranks, or each would leave one behind
