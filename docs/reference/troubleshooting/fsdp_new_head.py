"""FSDP2 trains a fine-tuned model's new head on rank 0 only, while the losses look plausible."""

import os
import sys
import tempfile

import torch
from accelerate.utils import broadcast_object_list, set_seed
from transformers import BertConfig, BertForQuestionAnswering, BertModel, logging
from without_gpu import make_accelerator

# What the YAML's fsdp_cpu_ram_efficient_loading, on by default, puts into the environment.
os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false" if "--fix" in sys.argv else "true"
logging.set_verbosity_error()
accelerator = make_accelerator()
set_seed(0)
[folder] = broadcast_object_list([tempfile.mkdtemp()])
if accelerator.is_main_process:  # a pretrained encoder, without a head
    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
accelerator.wait_for_everyone()
model = BertForQuestionAnswering.from_pretrained(folder)
model._no_split_modules = ["BertLayer"]  # with its own list FSDP2 fails
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
head = model.qa_outputs.weight
before = head.to_local().clone()
places = torch.arange(4)
loss = model(torch.randint(16, (4, 6)), start_positions=places, end_positions=places).loss
accelerator.backward(loss)
optimizer.step()
print(
    f"rank {accelerator.process_index}: its part of the head "
    f"{'stayed as it was' if torch.equal(head.to_local(), before) else 'was trained'}"
)
