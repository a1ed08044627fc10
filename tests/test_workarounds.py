"""Why the code has lines that look unnecessary: small programs that go wrong without them.

A program uses a library without its line of a script or a tool, and returns whether the library
goes wrong. The test of a program fails if no file has the line any more: remove the program. It
also fails if a release has fixed the library: remove the line and the program.
"""

import importlib.metadata
import os
import stat
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import warm
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
)
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, SequentialSampler
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering

ROOT = Path(__file__).resolve().parent.parent
TINY_BERT = ROOT / "tests" / "data" / "tiny_bert"
PROGRAMS = []  # the arguments of the test below


def workaround(library, line, ranks=0, gpu=False):  # 0 ranks: one process, not connected
    """Decorator of a program that shows why a script or a tool has `line`."""

    def note(program):
        marks = [pytest.mark.gpu, pytest.mark.slow] if gpu else []
        values = program, library, line, ranks, gpu
        PROGRAMS.append(pytest.param(*values, id=program.__name__, marks=marks))
        return program

    return note


def fails(action, words):
    """Whether an action raises an error with these words in its type or text."""
    try:
        action()
    except Exception as problem:
        if words in repr(problem):
            return True
        raise
    return False


def prepared(**options):
    """An Accelerator, and a model that it prepared with an optimizer and two loaders."""
    accelerator = Accelerator(**options)
    model = nn.Linear(4, 4)
    loaders = [DataLoader(range(8), batch_size) for batch_size in (4, 2)]
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), *loaders)
    return accelerator, prepared[0]


def zero_plugin(stage, zero=None, **config):
    """A plugin for ZeRO over gloo. `zero` has more settings of ZeRO, and `config` of DeepSpeed."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState(backend="gloo")
    config["zero_optimization"] = {"stage": stage} | (zero or {})
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
    return DeepSpeedPlugin(hf_ds_config=config)


def sharded(model, **options):
    """A model that FSDP2 sharded over gloo, and its optimizer. `options` are the plugin's."""
    PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU
    options |= {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def tiny_bert():
    """A tiny BERT with random weights."""
    return BertForQuestionAnswering(BertConfig.from_pretrained(TINY_BERT)).eval()


# -------- accelerate


@workaround("accelerate", "train_loader.set_epoch(epoch)", ranks=2)
def epoch_of_a_skipped_loader():
    """What skip_first_batches returns does not pass set_epoch on to a user's own sampler."""
    epochs = []
    sampler = SequentialSampler(range(16))
    sampler.set_epoch = epochs.append
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(16), 2, sampler=sampler))
    rest = accelerator.skip_first_batches(loader, 2)
    rest.set_epoch(3)
    list(rest)
    return 3 not in epochs


@workaround("accelerate", "batches._non_blocking = True")
def copies_of_a_skipped_loader():
    """What skip_first_batches returns waits for each copy to the device."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    loader = accelerator.prepare(DataLoader(range(16), 2))
    return loader._non_blocking and not accelerator.skip_first_batches(loader, 2)._non_blocking


@workaround("accelerate", "accelerator.step = 0")
def count_of_micro_batches():
    """load_state restores the count of micro-batches, even if their number per step differs."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.step = 3
    accelerator.save_state("saved")
    accelerator.step = 0
    accelerator.load_state("saved")
    return accelerator.step == 3


@workaround("accelerate", 'utils.load(f"{checkpoint}/random_states_')
def lost_random_states():
    """load_state goes on although the file of random states is missing (accelerate#4283)."""
    accelerator = Accelerator(cpu=True)
    accelerator.save_state("saved")
    Path("saved", "random_states_0.pkl").unlink()
    return not fails(lambda: accelerator.load_state("saved"), "random_states_0.pkl")


@workaround("accelerate", 'name.replace("_orig_mod.", "")')
def prefix_of_compiled_weights():
    """get_state_dict leaves torch.compile's prefix in the names of the weights."""
    accelerator, model = prepared(cpu=True, dynamo_backend="eager")
    return any("_orig_mod." in name for name in accelerator.get_state_dict(model))


@workaround("accelerate", "dynamo_plugin.dynamic = None")
def dynamic_shapes_off():
    """The launcher turns dynamic shapes off, so each new shape is compiled until torch gives up."""
    words = ["--cpu", "--dynamo_backend", "eager", "x.py"]
    _, environment = warm.what_the_launcher_starts(words, dict(os.environ))
    os.environ |= environment
    return Accelerator(cpu=True).state.dynamo_plugin.dynamic is False


@workaround("accelerate", 'abort(f"each process would train alone')
def ranks_train_alone():
    """Without LOCAL_RANK, each process trains alone, whatever WORLD_SIZE and MASTER_ADDR say."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    return Accelerator().num_processes == 1


@workaround("accelerate", 'os.environ.get("FSDP_VERSION") != "2"')
def fsdp_version_is_1():
    """Without FSDP_VERSION, accelerate uses version 1."""
    return FullyShardedDataParallelPlugin().fsdp_version == 1


@workaround("accelerate", "accelerator.gradient_accumulation_steps = args.")
def launchers_accumulation_wins():
    """The launcher's accumulation silently wins over the one that a script gives Accelerator."""
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return accelerator.gradient_accumulation_steps == 4


@workaround("accelerate", 'accelerator.mixed_precision == "fp16" and not torch.cuda')
def fp16_without_a_gpu():
    """Without a GPU, fp16 silently computes in fp32."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    with accelerator.autocast():
        output = nn.Linear(4, 4)(torch.ones(1, 4))
    return accelerator.mixed_precision == "fp16" and output.dtype == torch.float32


@workaround("accelerate", "if args.with_tracking and not accelerator.log_with:")
def missing_trackers():
    """A tracker that is not installed is silently left out."""
    return Accelerator(cpu=True, log_with="comet_ml").log_with == []


# -------- FSDP


@workaround("accelerate", "state.distributed_type = utils.DistributedType.MULTI_GPU", ranks=1)
def no_fsdp_on_a_cpu():
    """On a CPU, accelerate silently shards nothing."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    return Accelerator(cpu=True).distributed_type != DistributedType.FSDP


@workaround("accelerate", 'model._no_split_modules = ["BertLayer"]', ranks=1)
def berts_own_fsdp_units():
    """FSDP2 fails with transformers' list of BERT's units, because it includes the embeddings."""
    return fails(lambda: sharded(tiny_bert()), "value was None")


@workaround("accelerate", "if plugin.activation_checkpointing and args.dropout:", ranks=1)
def fsdp_checkpointing_masks():
    """With fsdp_activation_checkpointing, the second forward pass draws other dropout masks."""
    seen = []
    head = nn.Linear(64, 1)
    head.register_forward_pre_hook(lambda *args: seen.append(args[1][0].detach().clone()))
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), head))
    model._no_split_modules = ["Sequential"]
    model, _ = sharded(model, activation_checkpointing=True)
    model(torch.ones(2, 4)).sum().backward()
    return len(seen) == 2 and not torch.equal(*seen)


@workaround("transformers", 'os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"', ranks=2)
def ram_efficient_loading():
    """With fsdp_cpu_ram_efficient_loading, ranks other than 0 do not train a new head."""
    state = PartialState(backend="gloo")
    if state.is_main_process:
        tiny_bert().bert.save_pretrained("encoder")
    torch.distributed.barrier()
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    model = BertForQuestionAnswering.from_pretrained("encoder")
    model._no_split_modules = ["BertLayer"]
    model, optimizer = sharded(model)
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return state.is_main_process or id(model.qa_outputs.weight) not in trained


@workaround("torch", "plugin.cpu_offload.pin_memory = False", ranks=1)
def offloading_pins_memory():
    """FSDP2's offloading pins memory for a GPU even where there is none."""
    torch.distributed.init_process_group("gloo")
    policy = CPUOffloadPolicy()
    return fails(lambda: fully_shard(nn.Linear(4, 4), offload_policy=policy), "RuntimeError")


# -------- DeepSpeed


@workaround("accelerate", "test_loader = accelerator.prepare(test_loader)", ranks=1)
def deepspeed_takes_the_smallest_batch():
    """DeepSpeed gets the smallest batch size of the loaders that are prepared with the model."""
    plugin = zero_plugin(0)
    prepared(deepspeed_plugin=plugin)
    return plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 2


@workaround("deepspeed", 'config["gradient_clipping"] = 0.0', ranks=1)
def deepspeed_clips_unasked():
    """With gradient_clipping: auto, gradients are clipped to 1.0."""
    plugin = zero_plugin(0, gradient_clipping="auto")
    prepared(deepspeed_plugin=plugin)
    return plugin.deepspeed_config["gradient_clipping"] == 1.0


@workaround("deepspeed", 'zero.pop("compute_grad_norm", None)', ranks=1)
def clipping_needs_the_norm():
    """DeepSpeed refuses to clip if compute_grad_norm is false."""
    plugin = zero_plugin(2, {"compute_grad_norm": False}, gradient_clipping=1.0)
    return fails(lambda: prepared(deepspeed_plugin=plugin), "compute_grad_norm")


@workaround("deepspeed", 'zero["stage3_gather_16bit_weights_on_model_save"] = True', ranks=1)
def zero_3_gathers_no_weights():
    """Under ZeRO-3, get_state_dict fails unless the config asks for 16-bit weights."""
    accelerator, model = prepared(deepspeed_plugin=zero_plugin(3))
    option = "stage3_gather_16bit_weights_on_model_save"
    return fails(lambda: accelerator.get_state_dict(model), option)


@workaround("deepspeed", '__compatible_ops__["deepspeed_shm_comm"] = False')
def deepspeed_compiles_on_a_cpu():
    """On a CPU, DeepSpeed compiles an operator when it connects the ranks."""
    import deepspeed.ops

    return deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is True


@workaround("deepspeed", 'env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"')
def deepspeed_asks_the_driver_alone():
    """DeepSpeed makes torch count GPUs that the driver has, whether torch can use them or not."""
    ask = "import os, deepspeed; print(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"
    environment = {**os.environ}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    words = [sys.executable, "-c", ask]
    return subprocess.check_output(words, env=environment, text=True).split()[-1] == "1"


@workaround("deepspeed", 'env.setdefault("DS_ACCELERATOR", "cpu")')
def deepspeed_warns_on_a_cpu():
    """Without DS_ACCELERATOR, DeepSpeed warns that it has found no GPU."""
    from deepspeed.accelerator import real_accelerator

    real_accelerator.ds_accelerator = None
    os.environ.pop("DS_ACCELERATOR", None)
    said = []
    real_accelerator.accel_logger.warning = said.append
    real_accelerator.get_accelerator()
    return len(said) > 0


# -------- other libraries


@workaround("torch", "import torch._dynamo")
def optimizers_import_dynamo():
    """The first optimizer imports torch._dynamo."""
    ask = "print('torch._dynamo' in sys.modules)"
    make = "torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())"
    code = f"import sys, torch; {ask}; {make}; {ask}"
    return subprocess.check_output([sys.executable, "-c", code], text=True) == "False\nTrue\n"


@workaround("torch", '"generator": torch.Generator()')
def loaders_draw_random_numbers():
    """A DataLoader draws from the generator that dropout uses."""
    before = torch.get_rng_state()
    list(DataLoader(range(2)))
    return not torch.equal(before, torch.get_rng_state())


@workaround("transformers", "transformers.integrations.unset_hf_deepspeed_config()", ranks=1)
def zero_3_shards_while_loading():
    """Under ZeRO-3, from_pretrained shards at once, and draws another new head."""
    tiny_bert().bert.save_pretrained("encoder")
    whole = BertForQuestionAnswering.from_pretrained("encoder")
    Accelerator(deepspeed_plugin=zero_plugin(3))
    model = BertForQuestionAnswering.from_pretrained("encoder")
    return model.qa_outputs.weight.shape != whole.qa_outputs.weight.shape


@workaround("transformers", 'config._attn_implementation = "sdpa"')
def eager_attention_adds_masks():
    """Without SDPA, a bool mask is added to the scores, and hides nothing."""
    model = tiny_bert()
    model.set_attn_implementation("eager")
    mask = torch.tensor([True, True, False]).expand(1, 1, 3, 3)  # hides the last token
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
    logits = model(ids, attention_mask=mask).start_logits
    return not torch.allclose(logits[0, :2], logits[1, :2])


@workaround("transformers", "tokenizer.backend_tokenizer.no_truncation()")
def tokenizers_remember_truncation():
    """A tokenizer keeps the truncation of its last call."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BERT)
    before = tokenizer.backend_tokenizer.to_str()
    tokenizer("a b c d", truncation=True, max_length=3)
    return tokenizer.backend_tokenizer.to_str() != before


@workaround("safetensors", "accelerator.save_state(partial, safe_serialization=False)")
def safetensors_are_private():
    """Only the owner can read a file of safetensors, whatever the umask says."""
    os.umask(0o022)
    save_file({"a": torch.ones(1)}, "a")
    return stat.S_IMODE(os.stat("a").st_mode) == 0o600


# -------- GPUs


@workaround("torch", "class LSTM(nn.LSTM)", ranks=1, gpu=True)
def flattened_weights_leave_fsdp():
    """On a GPU, an LSTM that flattens its weights moves them away from FSDP2."""
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(0)
    outputs = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = nn.LSTM(4, 4).cuda()
        if shard:
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            output = model(torch.ones(2, 1, 4, device="cuda"))[0]
            output.sum().backward()
            optimizer.step()
        outputs.append(output.detach())
    return not torch.allclose(*outputs)


@workaround("torch", "enable_cudnn_sdp(False)", gpu=True)
def cudnn_plans_for_each_width():
    """cuDNN's attention takes many times as long when it first meets a width."""

    def attend(width):
        states = torch.randn(8, 12, width, 64, device="cuda", dtype=torch.bfloat16)
        mask = torch.ones(8, 1, 1, width, device="cuda", dtype=torch.bool)
        torch.cuda.synchronize()
        began = time.perf_counter()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    attend(128)
    return statistics.median(attend(width) / attend(width) for width in range(136, 264, 8)) > 5


@workaround("torch", "return args[0], finished(args[0])")
def fake_group_without_results():
    """DDP fails on torch's fake process group, which does not tell the result of an all-reduce."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    return fails(lambda: model(torch.ones(2)).sum().backward(), "hook result")


@workaround("torch", "torch.autocast(rows.device.type, enabled=False)", gpu=True)
def autocast_runs_an_lstm_in_fp16():
    """On a GPU, autocast to bf16 runs an LSTM in fp16."""
    with torch.autocast("cuda", torch.bfloat16):
        output = nn.LSTM(4, 4).cuda()(torch.ones(1, 2, 4, device="cuda"))[0]
    return output.dtype != torch.bfloat16


@workaround("torch", 'accelerator.mixed_precision == "bf16" and strategy == "dp"', gpu=True)
def threads_autocast_to_fp16():
    """In a thread that DataParallel starts, autocast to bf16 computes in fp16."""

    def compute():
        ones = torch.ones(2, 2, device="cuda")
        with torch.autocast("cuda", enabled=True):
            return (ones @ ones).dtype

    with torch.autocast("cuda", torch.bfloat16), ThreadPoolExecutor() as pool:
        return pool.submit(compute).result() == torch.float16


# -------- the test


def be_rank(program, gpu, environment, folder):
    """In a forked process: run a program. Returns what it returns, or None if it needs a GPU."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return None if gpu and not torch.cuda.is_available() else program()


def run_program(program, ranks, gpu, folder):
    """What a program returns on each rank."""
    import isolated  # not above: forked processes import this file, and must not import that one

    visible = "0" if isolated.VISIBLE_GPUS is None else isolated.VISIBLE_GPUS
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible if gpu else ""}
    worlds, _store = warm.make_worlds(ranks)  # the ranks meet at the store
    with warm.start_server().Pool(len(worlds)) as pool:  # ends the ranks, too
        tasks = [(program, gpu, environment | world, folder) for world in worlds]
        running = [pool.apply_async(be_rank, task) for task in tasks]
        return [rank.get(timeout=60) for rank in running]


@pytest.mark.canary
@pytest.mark.parametrize("program, library, line, ranks, gpu", PROGRAMS)
def test_the_library_still_goes_wrong(program, library, line, ranks, gpu, tmp_path):
    files = sorted([*ROOT.glob("train_*.py"), *ROOT.glob("tools/**/*.py")])
    scripts = [path.name for path in files if line in path.read_text()]
    assert scripts, f"no file has the line any more, so remove this program: {line}"
    results = run_program(program, ranks, gpu, tmp_path)
    if None in results:
        pytest.skip("torch sees no GPU here")
    version = importlib.metadata.version(library)
    assert all(results), (  # benchmarks/versions.py looks for the words "no longer"
        f"{library} {version} no longer goes wrong in this: {program.__doc__} So remove this "
        f"program, and what belongs to `{line}` in {' and '.join(scripts)}."
    )
