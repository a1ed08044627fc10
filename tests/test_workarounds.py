"""Each workaround of the scripts, and a small program that shows why it is there.

A comment of a script that begins with "Workaround NAME" belongs to the program NAME below. The
program uses a library without the workaround, and returns whether the library still goes wrong. If
a release mends that, the test of NAME turns red, and says which line of the scripts can go.
"""

import contextlib
import importlib.metadata
import os
import pickle
import re
import resource
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import datasets
import evaluate
import huggingface_hub
import pytest
import torch
import transformers
import warm
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from torchvision.datasets import MNIST
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {path: path.read_text() for path in sorted(ROOT.glob("train_*.py"))}
PROGRAMS = {}


def workaround(library, line, ranks=0, gpu=False):
    """Decorator: what a program shows is why the scripts have `line`. Its docstring says it."""

    def note(program):
        PROGRAMS[program.__name__] = (program, library, line, ranks, gpu)
        return program

    return note


def fails(action, words):
    """Whether an action raises an error with these words in its type or text."""
    try:
        action()
    except Exception as problem:
        if words not in repr(problem):
            raise
        return True
    return False


def prepared(*loaders, **options):
    """An Accelerator for CPU ranks, and what it made of a model, its optimizer, and loaders."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loaders = loaders or [DataLoader(TensorDataset(torch.ones(8, 4)), 4)]
    accelerator = Accelerator(**options)
    return accelerator, *accelerator.prepare(model, optimizer, *loaders)


def deepspeed(stage, zero=None, **config):
    """What `prepared` needs for ZeRO over gloo."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState(backend="gloo")
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
    zero = {"stage": stage} | (zero or {})
    return DeepSpeedPlugin(hf_ds_config=sizes | config | {"zero_optimization": zero})


def bert():
    """A tiny BERT."""
    config = BertConfig.from_pretrained(ROOT / "tests" / "data" / "tiny_bert")
    return BertForQuestionAnswering(config).eval()


# -------- accelerate: the loop


class EpochSampler(SequentialSampler):
    """Begins at the number of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([*range(self.epoch, 16), *range(self.epoch)])


@workaround("accelerate", "loader.set_epoch(epoch)", ranks=2)
def epoch_of_a_skipped_loader():
    """Through what skip_first_batches returns, no set_epoch reaches a user's own sampler."""
    accelerator = Accelerator(cpu=True)
    numbers = TensorDataset(torch.arange(16))
    loader = accelerator.prepare(DataLoader(numbers, 2, sampler=EpochSampler(numbers)))
    rest = accelerator.skip_first_batches(loader, 2)
    rest.set_epoch(3)
    after = [batch[0].tolist() for batch in rest]
    loader.set_epoch(3)
    before = [batch[0].tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    return before != after


@workaround("accelerate", "accelerator.step = 0")
def count_of_micro_batches():
    """load_state restores the count of micro-batches, also of another accumulation."""
    accelerator, *_ = prepared(cpu=True, gradient_accumulation_steps=2)
    accelerator.step = 3
    accelerator.save_state("saved")
    accelerator.step = 0
    accelerator.load_state("saved")
    return accelerator.step == 3


@workaround("accelerate", "restore_random_states(f")
def lost_random_states():
    """load_state goes on, although the file of the random states is missing (accelerate#4283)."""
    accelerator, *_ = prepared(cpu=True)
    accelerator.save_state("saved")
    Path("saved", "random_states_0.pkl").unlink()
    return not fails(lambda: accelerator.load_state("saved"), "random_states_0.pkl")


class Payload:
    """What a pickle can do: it makes a file while it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("code_ran",)


@workaround("accelerate", '"progress.json").write_text(json.dumps(state))')
def registered_objects_run_code():
    """load_state runs the code in the file of a registered object."""
    accelerator, _, optimizer, _ = prepared(cpu=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    accelerator.register_for_checkpointing(schedule)
    accelerator.save_state("saved")
    Path("saved", "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Payload()))
    with contextlib.suppress(Exception):
        accelerator.load_state("saved")
    return Path("code_ran").exists()


@workaround("accelerate", 'name.replace("_orig_mod.", "")')
def prefix_of_compiled_weights():
    """get_state_dict leaves torch.compile's prefix in the names of weights."""
    accelerator, model, *_ = prepared(cpu=True, dynamo_backend="eager")
    return any("_orig_mod." in name for name in accelerator.get_state_dict(model))


@workaround("accelerate", "dynamo_plugin.dynamic = None")
def dynamic_shapes_off():
    """The launcher turns dynamic shapes off, so each new shape is compiled until torch gives up."""
    words = "--config_file accelerate_configs/ddp.yaml --dynamo_backend eager x.py".split()
    os.chdir(ROOT)
    os.environ |= warm.what_the_launcher_starts(words, dict(os.environ))[1]
    dynamic = Accelerator(cpu=True).state.dynamo_plugin.dynamic
    counts = []
    for setting in (dynamic, None):
        counter = CompileCounter()
        compiled = torch.compile(torch.sin, backend=counter, dynamic=setting)
        for width in range(2, 6):
            compiled(torch.ones(width))
        counts.append(counter.frame_count)
    return counts[0] > counts[1]


@workaround("accelerate", "would train alone. Use ddp.yaml")
def ranks_train_alone():
    """Processes of which MASTER_ADDR and WORLD_SIZE say that they belong together train alone."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    return Accelerator().num_processes == 1


@workaround("accelerate", '"fsdp_version must be 2')
def fsdp_version_is_1():
    """Where FSDP_VERSION is not set, accelerate takes version 1."""
    return FullyShardedDataParallelPlugin().fsdp_version == 1


@workaround("accelerate", 'os.environ |= {"ACCELERATE_USE_FSDP": str(fsdp)', ranks=1)
def flags_that_must_say_true():
    """ACCELERATE_USE_FSDP=1 is true in some places of accelerate, and false in others."""
    PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU
    os.environ |= {"ACCELERATE_USE_FSDP": "1", "FSDP_VERSION": "2"}
    return Accelerator().distributed_type != DistributedType.FSDP


@workaround("accelerate", "accelerate drops --dynamo_backend under DeepSpeed")
def deepspeed_gets_no_compiler():
    """The launcher hands --dynamo_backend to all ranks but DeepSpeed's."""
    os.chdir(ROOT)
    found = []
    for yaml in ("fsdp", "zero2"):
        words = f"--config_file accelerate_configs/{yaml}.yaml --dynamo_backend eager x.py"
        env = warm.what_the_launcher_starts(words.split(), dict(os.environ))[1]
        found.append(env.get("ACCELERATE_DYNAMO_BACKEND"))
    return found == ["EAGER", None]


@workaround("accelerate", "only the script's --gradient_accumulation_steps counts")
def launchers_accumulation_wins():
    """The launcher's number of micro-batches wins over the script's, without a word."""
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return accelerator.gradient_accumulation_steps == 4


@workaround("accelerate", '"fp16 needs a GPU')
def fp16_without_a_gpu():
    """Without a GPU, fp16 computes in fp32, without a word."""
    accelerator, model, *_ = prepared(cpu=True, mixed_precision="fp16")
    seen = []
    model.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with accelerator.autocast():
        model(torch.ones(1, 4))
    return accelerator.mixed_precision == "fp16" and seen == [torch.float32]


@workaround("accelerate", "no such tracker is installed here")
def missing_trackers():
    """A tracker that is not installed is left out."""
    return Accelerator(cpu=True, log_with="comet_ml").log_with == []


# -------- accelerate: FSDP


@workaround("accelerate", "state.distributed_type = utils.DistributedType.MULTI_GPU", ranks=1)
def no_fsdp_on_a_cpu():
    """On a CPU, accelerate shards nothing, without a word."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    return Accelerator(cpu=True).distributed_type != DistributedType.FSDP


def fsdp(model, **options):
    """An Accelerator that shards over gloo, and what it made of a model."""
    PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU
    defaults = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    defaults["cpu_ram_efficient_loading"] = False
    plugin = FullyShardedDataParallelPlugin(**defaults | options)
    accelerator = Accelerator(fsdp_plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


@workaround("accelerate", 'model._no_split_modules = ["BertLayer"]', ranks=1)
def berts_own_fsdp_units():
    """FSDP2 fails with transformers' list of BERT's units, which has the embeddings too."""
    ids = torch.ones(1, 4, dtype=torch.long)

    def train():
        accelerator, model, _ = fsdp(bert())
        accelerator.backward(sum(model(ids)).sum())

    return fails(train, "value was None")


@workaround("accelerate", "plugin.activation_checkpointing and args.dropout", ranks=1)
def fsdp_checkpointing_masks():
    """fsdp_activation_checkpointing draws other dropout masks the second time."""
    seen = []
    head = nn.Linear(64, 1)
    head.register_forward_pre_hook(lambda *args: seen.append(args[1][0].detach().clone()))
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), head))
    model._no_split_modules = ["Sequential"]
    accelerator, model, _ = fsdp(model, activation_checkpointing=True)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    return len(seen) == 2 and not torch.equal(*seen)


@workaround("transformers", '"write fsdp_cpu_ram_efficient_loading: false', ranks=2)
def ram_efficient_loading():
    """With fsdp_cpu_ram_efficient_loading, ranks other than 0 do not train a new head."""
    PartialState(backend="gloo")
    rank = int(os.environ["RANK"])
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    if rank == 0:
        bert().bert.save_pretrained("encoder")
    torch.distributed.barrier()
    model = BertForQuestionAnswering.from_pretrained("encoder")
    model._no_split_modules = ["BertLayer"]
    accelerator, model, optimizer = fsdp(model, cpu_ram_efficient_loading=True)
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return rank == 0 or id(model.qa_outputs.weight) not in trained


@workaround("torch", "plugin.cpu_offload.pin_memory = False", ranks=1)
def offloading_pins_memory():
    """FSDP2's offloading wants to pin memory for a GPU, where there is none."""

    def train():
        model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy())
        model(torch.ones(1, 4)).sum().backward()

    torch.distributed.init_process_group("gloo")
    return fails(train, "RuntimeError")


@workaround("torch", 'config.architectures = ["BertForQuestionAnswering"]', ranks=1)
def fsdp_renames_classes():
    """FSDP2 gives a sharded module another class."""
    torch.distributed.init_process_group("gloo")
    return type(fully_shard(nn.Linear(4, 4))).__name__ != "Linear"


@workaround("torch", "isinstance(problem, (KeyboardInterrupt, MemoryError")
def checkpoint_errors_are_no_exceptions():
    """What torch raises if it cannot load a sharded checkpoint is no Exception."""
    return not issubclass(CheckpointException, Exception)


# -------- DeepSpeed


@workaround("accelerate", "loader = accelerator.prepare(", ranks=1)
def deepspeed_takes_the_smallest_batch():
    """DeepSpeed gets the smallest batch size of the loaders that are prepared with the model."""
    plugin = deepspeed(0)
    loaders = [DataLoader(TensorDataset(torch.ones(8, 4)), size) for size in (4, 2)]
    prepared(*loaders, deepspeed_plugin=plugin)
    return plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 2


@workaround("deepspeed", 'config["gradient_clipping"] = 0.0', ranks=1)
def deepspeed_clips_unasked():
    """With gradient_clipping: auto, or without it, DeepSpeed clips gradients."""
    plugin = deepspeed(0, gradient_clipping="auto")
    prepared(deepspeed_plugin=plugin)
    return plugin.deepspeed_config["gradient_clipping"] == 1.0


@workaround("deepspeed", 'zero.pop("compute_grad_norm", None)', ranks=1)
def clipping_needs_the_norm():
    """DeepSpeed refuses to clip if compute_grad_norm is false."""
    plugin = deepspeed(2, gradient_clipping=1.0, zero={"compute_grad_norm": False})
    return fails(lambda: prepared(deepspeed_plugin=plugin), "compute_grad_norm")


@workaround("deepspeed", 'zero["stage3_gather_16bit_weights_on_model_save"] = True', ranks=1)
def zero_3_gathers_no_weights():
    """Under ZeRO-3, get_state_dict fails, unless the config asks for 16-bit weights."""
    accelerator, model, *_ = prepared(deepspeed_plugin=deepspeed(3))
    return fails(
        lambda: accelerator.get_state_dict(model), "stage3_gather_16bit_weights_on_model_save"
    )


@workaround("deepspeed", '"DeepSpeed cannot load from', ranks=1)
def deepspeed_globs_its_folder():
    """DeepSpeed takes the characters [ ] * ? in a checkpoint's path for a pattern."""
    accelerator, *_ = prepared(deepspeed_plugin=deepspeed(2))
    accelerator.save_state("a[1]")
    return fails(lambda: accelerator.load_state("a[1]"), "AssertionError")


@workaround("deepspeed", '__compatible_ops__["deepspeed_shm_comm"] = False')
def deepspeed_compiles_on_a_cpu():
    """On a CPU, DeepSpeed compiles an operator when it connects the ranks."""
    import deepspeed.ops

    return deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is True


@workaround("deepspeed", 'os.environ.setdefault("DS_ACCELERATOR", "cpu")')
def deepspeed_warns_on_a_cpu():
    """Without DS_ACCELERATOR, DeepSpeed warns that it has found no GPU."""
    from deepspeed.accelerator import real_accelerator

    real_accelerator.ds_accelerator = None
    os.environ.pop("DS_ACCELERATOR", None)
    said = []
    real_accelerator.accel_logger.warning = said.append
    real_accelerator.get_accelerator()
    return len(said) > 0


# -------- torch


@workaround("torch", "import torch._dynamo")
def optimizers_import_dynamo():
    """The first optimizer imports torch._dynamo."""
    ask = "print('torch._dynamo' in sys.modules)"
    make = "torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())"
    code = f"import sys, torch; {ask}; {make}; {ask}"
    return subprocess.check_output([sys.executable, "-c", code], text=True) == "False\nTrue\n"


@workaround("torch", '"generator": torch.Generator()')
def loaders_draw_random_numbers():
    """A DataLoader draws from the generator that dropout uses, too."""
    before = torch.get_rng_state()
    next(iter(DataLoader(TensorDataset(torch.ones(2)))))
    return not torch.equal(before, torch.get_rng_state())


@workaround("torch", "shutil.disk_usage(args.output_dir")
def errors_without_their_number():
    """An error of a full disk has no number when torch raises it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        torch.save(torch.ones(10_000), "x")
    except Exception as problem:
        return getattr(problem, "errno", None) is None
    return False


# -------- transformers, datasets, evaluate, safetensors, torchvision


@workaround("transformers", "transformers.integrations.unset_hf_deepspeed_config()", ranks=1)
def zero_3_shards_while_loading():
    """Under ZeRO-3, from_pretrained shards at once, and draws a new head otherwise."""
    bert().bert.save_pretrained("encoder")
    torch.manual_seed(0)
    whole = BertForQuestionAnswering.from_pretrained("encoder").qa_outputs.weight
    deepspeed(3)
    sizes = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
    keep = transformers.integrations.HfDeepSpeedConfig(sizes | {"zero_optimization": {"stage": 3}})
    torch.manual_seed(0)
    model = BertForQuestionAnswering.from_pretrained("encoder")
    return bool(keep) and model.qa_outputs.weight.shape != whole.shape


@workaround("transformers", 'config._attn_implementation = "sdpa"')
def eager_attention_adds_masks():
    """Without SDPA, a bool mask is added to the scores, and hides nothing."""
    model = bert()
    logits = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        mask = torch.tensor([True, True, True, False]).expand(1, 1, 4, 4)
        with torch.no_grad():
            output = model(torch.arange(4)[None] + 1, attention_mask=mask)
        logits.append(output.start_logits[0, :3])
    return not torch.allclose(*logits, atol=1e-4)


@workaround("transformers", "tokenizer.backend_tokenizer.no_truncation()")
def tokenizers_remember_truncation():
    """A tokenizer keeps the truncation of its last call."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests" / "data" / "tiny_bert")
    before = tokenizer.backend_tokenizer.to_str()
    tokenizer("a b c d", truncation=True, max_length=3)
    return tokenizer.backend_tokenizer.to_str() != before


@workaround("datasets", "cache_file_name=")
def datasets_in_memory_have_no_cache():
    """What `map` makes of questions in memory is in no cache."""
    rows = datasets.Dataset.from_list([{"a": 1}]).map(lambda row: {"b": row["a"]})
    return not rows.cache_files


@workaround("evaluate", "class Squad(evaluate.Metric)")
def squad_metric_needs_a_network():
    """The package evaluate has SQuAD's scores on the Hub alone."""
    return fails(lambda: evaluate.load("squad"), "FileNotFoundError")


@workaround("safetensors", 'shutil.copymode(f"{accelerator.project_dir}/.lock"')
def safetensors_are_private():
    """A file of safetensors can be read by its owner alone, whatever the umask says."""
    os.umask(0o022)
    save_file({"a": torch.ones(1)}, "a")
    return stat.S_IMODE(os.stat("a").st_mode) == 0o600


@workaround("torchvision", "would read {old} instead of {raw}")
def torchvision_reads_old_files():
    """torchvision reads processed/*.pt, if an old torchvision left them."""
    folder = Path("MNIST", "processed")
    folder.mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        torch.save((torch.zeros(3, 28, 28), torch.zeros(3)), folder / name)
    return len(MNIST(".").data) == 3


def timeout_of(action):
    """The timeout with which an action asks for its last connection, which it does not get."""
    with mock.patch("socket.create_connection", side_effect=OSError) as connect:
        with contextlib.suppress(Exception):
            action()
    return connect.call_args.args[1]


@workaround("torchvision", "socket.setdefaulttimeout(7)")
def torchvision_waits_for_ever():
    """torchvision sets no timeout for its downloads."""
    return timeout_of(lambda: MNIST("data", download=True)) is socket._GLOBAL_DEFAULT_TIMEOUT


@workaround("huggingface_hub", "timeout=20)")
def the_hub_waits_for_ever():
    """huggingface_hub sets no timeout when it asks for a model."""
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    return timeout_of(lambda: huggingface_hub.HfApi().model_info("a/b")) is None


# -------- GPUs


@workaround("torch", "class UnflattenedLSTM(nn.LSTM)", ranks=1, gpu=True)
def flattened_weights_leave_fsdp():
    """On a GPU, an LSTM that flattens its weights moves them away from FSDP2."""
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(0)
    outputs = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = nn.LSTM(4, 4, batch_first=True).cuda()
        model = fully_shard(model) if shard else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            output = model(torch.ones(1, 2, 4, device="cuda"))[0]
            output.sum().backward()
            optimizer.step()
        outputs.append(output.detach())
    return not torch.allclose(*outputs)


@workaround("torch", "torch.autocast(rows.device.type, enabled=False)", gpu=True)
def autocast_runs_an_lstm_in_fp16():
    """On a GPU, autocast runs an LSTM in fp16 where bf16 is asked for."""
    with torch.autocast("cuda", torch.bfloat16):
        output = nn.LSTM(4, 4).cuda()(torch.ones(1, 2, 4, device="cuda"))[0]
    return output.dtype != torch.bfloat16


@workaround("torch", "\"dp's threads would compute in fp16", gpu=True)
def threads_autocast_to_fp16():
    """In a thread that DataParallel starts, autocast to bf16 computes in fp16."""
    seen = []

    def compute():
        with torch.autocast("cuda", enabled=True):
            seen.append((torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype)

    with torch.autocast("cuda", torch.bfloat16):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    return seen == [torch.float16]


# -------- the tests


def be_rank(name, environment, folder):
    """In a forked process: run a program, and return what it returns, or what it raises."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    program, *_, gpu = PROGRAMS[name]
    try:
        return None if gpu and not torch.cuda.is_available() else bool(program())
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def run_program(name, folder):
    """What a program returns on each rank."""
    import isolated  # here, as it would change the environment of the forked processes

    *_, ranks, gpu = PROGRAMS[name]
    environment = dict(os.environ)
    if gpu and isolated.VISIBLE_GPUS is None:
        del environment["CUDA_VISIBLE_DEVICES"]
    elif gpu:
        environment["CUDA_VISIBLE_DEVICES"] = isolated.VISIBLE_GPUS
    worlds, _store = warm.make_worlds(ranks)  # the ranks meet at the store
    with warm.start_server().Pool(len(worlds)) as pool:  # which ends them, too
        tasks = [(name, environment | world, folder) for world in worlds]
        running = [pool.apply_async(be_rank, task) for task in tasks]
        for rank in running:
            rank.wait(60)
        return [rank.get() if rank.ready() else "it ran for 60 s" for rank in running]


ON_A_GPU = [pytest.mark.gpu, pytest.mark.slow]
NAMES = [pytest.param(name, marks=ON_A_GPU * gpu) for name, (*_, gpu) in PROGRAMS.items()]


def test_each_workaround_of_the_scripts_has_a_program():
    said = {name for text in SCRIPTS.values() for name in re.findall(r"Workaround (\w+)", text)}
    assert said == PROGRAMS.keys() and len(said) > 14


@pytest.mark.canary
@pytest.mark.parametrize("name", NAMES)
def test_the_library_still_goes_wrong(name, tmp_path):
    program, library, line, *_ = PROGRAMS[name]
    scripts = [path.name for path, text in SCRIPTS.items() if line in text]
    assert scripts, f"no script has the line any more: {line}"
    results = run_program(name, tmp_path)
    if None in results:
        pytest.skip("torch sees no GPU here")
    assert all(type(result) is bool for result in results), results
    version = importlib.metadata.version(library)
    assert all(results), (
        f"{library} {version} goes wrong no longer in this: {program.__doc__} So what belongs to "
        f"`{line}` in {' and '.join(scripts)} can go, and the program {name}."
    )
