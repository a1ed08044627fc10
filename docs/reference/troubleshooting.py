"""Programs for the entries of troubleshooting.md. Each function is one: it shows a symptom on two
processes, and with --fix the cure. The parts that `fix` chooses are what to change in your script.

    accelerate launch --config_file accelerate_configs/ddp.yaml \\
        docs/reference/troubleshooting.py lr_times_n --fix

Those of FSDP2 need fsdp.yaml. Those of ZeRO need flags in place of a YAML:
--use_deepspeed --zero_stage 3 --zero3_save_16bit_model true --num_processes 2
"""

import argparse
import datetime
import os
import tempfile
from pathlib import Path

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.utils import (
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
    set_seed,
)
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

# Not the default of minutes, so that a hang ends while one looks on.
SOON = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=5))


def alone(fix):
    """Each of N processes trains alone on all the data: accelerate found no GPU."""
    accelerator = Accelerator(cpu=fix)
    print(
        f"process {accelerator.process_index} of {accelerator.num_processes}; "
        f"the launcher started {os.environ.get('WORLD_SIZE', 1)}"
    )


def lr_times_n(fix):
    """The learning rate falls N times too fast: accelerate steps a prepared schedule N times."""
    # With the fix, a batch of the DataLoader is that of all processes, and so is a step.
    config = DataLoaderConfiguration(split_batches=fix)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # To zero in 4 steps.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 4))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(f"learning rates of the 4 steps: {rates}")


def uneven_evaluation(fix):
    """Evaluation counts samples twice: accelerate adds some, for as many batches on each rank."""
    accelerator = Accelerator(cpu=True)
    # 5 batches, for 2 ranks
    loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2))
    gather = accelerator.gather_for_metrics if fix else accelerator.gather
    seen, count = [], 0
    for batch in loader:
        seen += gather(batch).tolist()
        lengths = accelerator.gather_for_metrics(torch.tensor([len(batch)]))  # no row per sample
        count += lengths.sum().item()
    twice = sorted({i for i in seen if seen.count(i) > 1})
    accelerator.print(f"{len(seen)} samples of 10, twice: {twice}")
    accelerator.print(f"counted batch by batch: {count}")


def hang_uneven(fix):
    """A hang at the end of an epoch: one rank has one batch more, and waits for the others."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[SOON])
    model, data = accelerator.prepare(torch.nn.Linear(4, 1)), torch.ones(9, 4)
    if fix:  # all of the data: `prepare` gives each rank the same number of batches
        loader = accelerator.prepare(DataLoader(data))
    else:  # a split of your own: 5 batches here, 4 there
        loader = DataLoader(data[accelerator.process_index :: accelerator.num_processes])
    for step, x in enumerate(loader):
        accelerator.backward(model(x).sum())
        print(f"rank {accelerator.process_index}: step {step} done", flush=True)
    accelerator.wait_for_everyone()
    accelerator.print("the epoch is over")


def hang_rank_0(fix):
    """A hang when rank 0 logs, evaluates or saves: all ranks have to make the call."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[SOON])
    loss = torch.tensor(accelerator.process_index + 1.0)
    if fix:
        mean = accelerator.reduce(loss, "mean")  # all ranks reduce,
        if accelerator.is_main_process:  # and one prints
            print(f"mean loss {mean}")
    elif accelerator.is_main_process:
        print(f"mean loss {accelerator.reduce(loss, 'mean')}")  # the others never come
    accelerator.wait_for_everyone()


def half_checkpoint(fix):
    """A checkpoint that cannot be loaded: the job was killed while it wrote it."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
    folder = Path(broadcast_object_list([tempfile.mkdtemp()])[0])

    def save(step, killed=False):
        """With the fix, the folder gets its name when it is complete."""
        final = folder / f"step_{step}"
        target = final.with_suffix(".partial") if fix else final
        accelerator.save_state(target)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and killed:  # as if killed: a part of a file
            file = target / "optimizer.bin"
            file.write_bytes(file.read_bytes()[:1000])
        elif accelerator.is_main_process:
            target.rename(final)
        accelerator.wait_for_everyone()

    save(1)
    save(2, killed=True)
    newest = max(folder.glob("step_?"))
    accelerator.print(f"resuming from {newest.name}")
    accelerator.load_state(newest)
    accelerator.print("resumed")


# -------- ZeRO


def zero_clips(fix):
    """ZeRO moves the weights less than DDP: by default it clips gradients to a norm of 1."""
    accelerator = make_accelerator()
    if fix:
        accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.0
    model = torch.nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    # The gradient is 5 for each of 4 weights: a norm of 10.
    accelerator.backward(model(torch.full((2, 4), 5.0)).mean())
    optimizer.step()
    weights = accelerator.get_state_dict(model)  # all ranks have to make this call
    if accelerator.is_main_process:
        moved = (weights["weight"] - before).norm()
        print(f"a gradient of norm 10 moved the weights by {moved:.1f}")


def zero_accumulation(fix):
    """ZeRO does not accumulate as the script says: a line of the YAML overrides it."""
    if not fix:  # what the line gradient_accumulation_steps: 1 puts into the environment
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"8 micro-batches, 4 a step asked for: {model.global_steps} optimizer steps")


def zero3_save(fix):
    """A saved model is empty: so are ZeRO-3's parameters, but in a forward or backward pass."""
    accelerator = make_accelerator()
    model = torch.nn.Linear(400, 100)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if fix:  # on all ranks, as it gathers; rank 0 gets the weights
        weights = accelerator.get_state_dict(model)
    else:
        weights = accelerator.unwrap_model(model).state_dict()
    if accelerator.is_main_process:
        file = Path(tempfile.mkdtemp()) / "model.safetensors"
        save_file({name: weight.contiguous() for name, weight in weights.items()}, file)
        print(f"{file.stat().st_size:,} bytes; weight: {list(load_file(file)['weight'].shape)}")
        torch.nn.Linear(400, 100).load_state_dict(load_file(file))
        print("loaded")


# -------- FSDP2


def fsdp_new_head(fix):
    """FSDP2 trains a fine-tuned model's new head on rank 0 only, and the losses look plausible."""
    from transformers import BertConfig, BertForQuestionAnswering, BertModel, logging

    # The YAML's fsdp_cpu_ram_efficient_loading, which is on by default, sets this variable.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false" if fix else "true"
    logging.set_verbosity_error()
    accelerator = make_accelerator()
    set_seed(0)
    [folder] = broadcast_object_list([tempfile.mkdtemp()])
    if accelerator.is_main_process:  # a pretrained encoder, without a head
        sizes = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
        config = BertConfig(vocab_size=16, num_hidden_layers=1, **sizes)
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
    same = torch.equal(head.to_local(), before)
    print(
        f"rank {accelerator.process_index}: its part of the head "
        f"{'stayed as it was' if same else 'was trained'}"
    )


def fsdp_lstm(fix):
    """FSDP2 never trains an LSTM on a GPU: cuDNN moves its weights, FSDP2 fills the old place."""
    accelerator = make_accelerator()
    set_seed(0)
    model = torch.nn.LSTM(4, 8, batch_first=True)
    if accelerator.device.type == "cpu":
        torch.nn.RNNBase.flatten_parameters = flatten_like_cudnn
    if fix:
        model.flatten_parameters = lambda: None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    losses = []
    for _ in range(4):
        loss = model(torch.ones(2, 3, 4, device=accelerator.device))[0].square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    falls = losses == sorted(set(losses), reverse=True)
    accelerator.print(f"the loss {'falls' if falls else 'does not change'}")


# -------- what the programs for ZeRO and FSDP2 need on a machine without a GPU


def make_accelerator(**options):
    """An Accelerator that shards on CPUs, too: the least of what train_mnist_rnn.py does for it."""
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if not torch.cuda.is_available():
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
        if deepspeed:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            from deepspeed.ops import __compatible_ops__ as deepspeed_ops

            deepspeed_ops["deepspeed_shm_comm"] = False  # or it compiles an all-reduce of its own
    accelerator = Accelerator(**options)
    if deepspeed:  # DeepSpeed needs it if no DataLoader is prepared
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = 2
    elif accelerator.device.type == "cpu":  # accelerate leaves FSDP out without a GPU
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


PROGRAMS = [alone, lr_times_n, uneven_evaluation, hang_uneven, hang_rank_0, half_checkpoint]
PROGRAMS += [zero_clips, zero_accumulation, zero3_save, fsdp_new_head, fsdp_lstm]
SYMPTOMS = {program.__name__: program for program in PROGRAMS}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show a symptom of troubleshooting.md.")
    parser.add_argument("symptom", choices=SYMPTOMS)
    parser.add_argument("--fix", action="store_true", help="show the cure")
    args = parser.parse_args()
    SYMPTOMS[args.symptom](args.fix)
