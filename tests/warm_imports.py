"""What the process imports that tests/warm.py forks ranks from: all that a script would."""
# ruff: noqa: F401

import accelerate.utils.deepspeed
import accelerate.utils.fsdp_utils
import datasets
import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3
import psutil
import sklearn.datasets
import sklearn.model_selection
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor
import torch.utils.tensorboard
import torchvision.datasets
import tqdm
import transformers.models.auto.tokenization_auto
import transformers.models.bert.modeling_bert

tqdm.tqdm.get_lock()  # one for all ranks, or each would leave one behind
