"""docs/reference/troubleshooting.md: each symptom appears, and each fix removes it. What is printed
is read from the page.
"""

import json
import re
import socket
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
from accelerate import skip_first_batches
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.data_loader import prepare_data_loader
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from conftest import ACCELERATE, ROOT, run, run_forked
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow
FOLDER, DDP = "docs/reference/troubleshooting", "accelerate_configs/ddp.yaml"
PAGE = (ROOT / f"{FOLDER}.md").read_text()
COMMANDS = re.findall(r"^accelerate launch .*", PAGE.replace("\\\n", ""), re.M)
TEXTS = r"(`[^`]+`(?: and `[^`]+`)?)"
Shown = namedtuple("Shown", "yaml wrong fixed both")
SHOWN = {  # what an entry says of its program
    name: Shown(yaml, *(re.findall("`([^`]+)`", texts) for texts in printed))
    for name, yaml, *printed in re.findall(
        r"\[`(\w+\.\w+)`\]\(troubleshooting/\1\), `?(\w+|one process)(?:\.yaml`)?: "
        rf"{TEXTS}; with `--fix`: {TEXTS}(?:\. Both: {TEXTS})?",
        " ".join(PAGE.split()),
    )
}
PROGRAMS = [name for name in SHOWN if name.endswith(".py")]
FILES = {"one process": "accelerate_configs/baseline.yaml", "zero3": f"{FOLDER}/zero3.yaml"}
BESIDES = [  # what the page says besides: YAML, command, a text that it prints
    ("ddp", f"{FOLDER}/lr_times_n.py --unprepared", "[1.0, 0.75, 0.5, 0.25]"),
    ("zero3", f"ACCELERATE_GRADIENT_CLIPPING=0.0 {FOLDER}/zero_clips.py", "weights by 1.0"),
    (
        "zero3",
        f"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=false {FOLDER}/zero3_save.py --fix",
        "ValueError: Cannot get 16bit model weights",
    ),
    ("zero3 with JSON", f"{FOLDER}/zero_clips.py", "weights by 10.0"),
    ("zero3 with JSON", f"{FOLDER}/zero3_save.py --fix", "weight: [100, 400]"),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """(YAML, command) -> what all ranks print, with the error that ends it. See together.py."""
    groups, texts = {}, {}
    for yaml, command in [
        (SHOWN[name].yaml, f"{FOLDER}/{name}{flag}") for name in PROGRAMS for flag in ("", " --fix")
    ] + [case[:2] for case in BESIDES]:
        # A hang has its own timeout, and may leave ranks at odds; so may DDP's error.
        alone = command if re.search("hang|unused", command) else ""
        groups.setdefault((yaml, alone), []).append(command)
    for (yaml, alone), commands in groups.items():
        folder = tmp_path_factory.mktemp("printed")
        config = FILES.get(yaml, f"accelerate_configs/{yaml.split()[0]}.yaml")
        words = alone.split() or ["tests/together.py", str(folder), *commands]
        result = run_forked(["--config_file", config], words, folder, {"TMPDIR": str(folder)}, 120)
        texts[yaml, alone] = result.out + result.err
        if alone:
            continue
        assert result.code == 0, result.err
        ranks = [json.loads(file.read_text()) for file in folder.glob("rank_*.json")]
        for command in commands:
            texts[yaml, command] = " ".join("".join(rank[command] for rank in ranks).split())
    return texts


def assert_symptom_and_fix(shown, before, after):
    for text in shown.wrong:
        assert text in before and text not in after
    for text in shown.fixed:
        assert text in after and text not in before
    assert all(text in before and text in after for text in shown.both)


def test_each_program_is_shown_by_an_entry():
    files = {path.name for path in (ROOT / FOLDER).glob("*.*")}
    assert files - {"without_gpu.py", "zero3.yaml"} == set(SHOWN)


@pytest.mark.parametrize("name", PROGRAMS)
def test_symptom_and_fix(name, printed):
    command, shown = f"{FOLDER}/{name}", SHOWN[name]
    before, after = printed[shown.yaml, command], printed[shown.yaml, f"{command} --fix"]
    assert_symptom_and_fix(shown, before, after)
    assert name != "alone.py" or before.count(shown.wrong[0]) == 2, "each process prints it"


def test_what_else_helps_or_does_not(printed):
    for yaml, command, text in BESIDES:
        assert text in printed[yaml, command], command


def test_commands_of_the_page():
    """Word for word; one after the other, as they take the default port."""
    before, after = (run(["bash", "-c", command]) for command in COMMANDS)
    assert before.code == after.code == 0
    assert_symptom_and_fix(SHOWN["lr_times_n.py"], before.out, after.out)


class Shifted(list):
    """A sampler of one's own: 8 samples, other ones in each epoch."""

    def set_epoch(self, epoch):
        self[:] = range(8 * epoch, 8 * epoch + 8)


@pytest.mark.parametrize("prepared, seen", [(True, [[12, 13]]), (False, [[4, 5]])])  # of epoch 0
def test_the_epoch_of_a_sampler_of_ones_own(prepared, seen):
    """The first of two processes resumes in epoch 1, after a batch."""
    loader = DataLoader(range(16), 4, sampler=Shifted(range(8)))
    loader = prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=True)
    loader.set_epoch(int(prepared))
    rest = skip_first_batches(loader, 1)
    rest.set_epoch(1)
    assert [batch.tolist() for batch in rest] == seen


def test_every_node_thinks_it_is_rank_0(cluster, tmp_path):
    """And the entry on interfaces: with its own loopback for all, a node reaches nobody."""
    runs = {
        "before": ([], {}),
        "after": (["--fix"], {}),
        "loopback": (["--fix"], {"GLOO_SOCKET_IFNAME": "lo"}),
    }
    jobs = {
        name: cluster.submit(
            f"--output={tmp_path}/{name}",
            f"{FOLDER}/every_node_rank_0.sh",
            *flags,
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **env},
        )
        for name, (flags, env) in runs.items()
    }
    states = {name: cluster.wait(job) for name, job in jobs.items()}
    logs = {name: (tmp_path / name).read_text() for name in jobs}
    assert states == {"before": "FAILED", "after": "COMPLETED", "loopback": "FAILED"}, logs
    assert_symptom_and_fix(SHOWN["every_node_rank_0.sh"], logs["before"], logs["after"])
    assert re.search(r"(?s)Gloo connectFullMesh failed.*remote=\[127.0.0.1\]", logs["loopback"])


def test_one_process_where_two_were_asked_for(tmp_path):
    config = tmp_path / "multi_cpu.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    for words in (["--config_file", str(config)], ["--cpu", "--num_processes", "2"]):
        result = run_forked(words, [f"{FOLDER}/alone.py", "--fix"], tmp_path, {}, 60)
        assert result.out.splitlines() == ["process 0 of 1; the launcher started 1"], result.err


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ddp = [*ACCELERATE, "--config_file", DDP, "--main_process_port", port]
        nodes = [*ddp, *"--num_machines 2 --machine_rank 0 --main_process_ip 127.0.0.1".split()]
        torchrun = [
            sys.executable,
            *"-m torch.distributed.run --nproc_per_node 2".split(),
            "--master_port",
            port,
        ]
        with ThreadPoolExecutor(2) as pool:
            one, several, bare = pool.map(
                lambda words: run([*words, f"{FOLDER}/alone.py", "--fix"]), (ddp, nodes, torchrun)
            )
    assert one.code == 0 and "process 1 of 2" in one.out
    assert f"Port `{port}` is already in use" in one.err
    assert f"on port `{port}`, but another process is utilizing it" in several.err and several.code
    assert "EADDRINUSE" in bare.err and bare.code and not several.out + bare.out


def parsed(*words):
    """The launcher's arguments, from a YAML and a command line."""
    args = launch_command_parser().parse_args([*map(str, words), "train.py"])
    return _validate_launch_command(args)[0]


def test_settings_that_do_something_else(tmp_path, monkeypatch):
    words = f"--config_file {DDP} --same_network false {FOLDER}/alone.py".split()
    result = run([*ACCELERATE, *words])
    assert re.search(r"can't open file '/\S*/false': \[Errno 2\]", result.err) and result.code
    config = tmp_path / "config.yaml"
    config.write_text(
        (ROOT / DDP).read_text() + "rdzv_backend: c10d\nsame_network: true\n"
        "machine_rank: 0\nnum_machines: 2\n"
    )
    args = parsed("--config_file", config)
    assert (args.rdzv_backend, args.same_network) == ("static", False)
    assert parsed("--config_file", config, "--rdzv_backend", "c10d").rdzv_backend == "c10d"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert parsed("--config_file", DDP).num_cpu_threads_per_process == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert parsed("--config_file", DDP).num_cpu_threads_per_process == 4


def test_zero_on_several_nodes_without_the_standard_launcher(tmp_path):
    """This node is the only one that is there, and does not miss the other."""
    own, config = ROOT / FOLDER / "zero3.yaml", tmp_path / "zero3.yaml"
    config.write_text(re.sub(".*multinode.*\n", "", own.read_text()))
    words = "--num_machines 2 --machine_rank 0 --main_process_ip 127.0.0.1 --main_process_port 0"
    nodes = words.split()
    words = ["--config_file", config, *nodes, ROOT / "tests/probe.py", "--output_dir", tmp_path]
    result = run(["env", "-C", *map(str, [tmp_path, *ACCELERATE, *words])])
    assert result.code == 0, result.err
    assert "Unable to find hostfile, will proceed with training with" in result.out + result.err
    assert json.loads((tmp_path / "rank_0.json").read_text())["WORLD_SIZE"] == "1"
    args = parsed("--config_file", own, *nodes)
    args.deepspeed_fields_from_accelerate_config = ""  # which the launcher adds later
    assert prepare_deepspeed_cmd_env(args)[0] is None and args.nnodes == "2"
