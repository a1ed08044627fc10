"""docs/troubleshooting.md: each symptom appears, and each fix removes it. What is printed is read
from the page.
"""

import json
import re
import shlex
import socket
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from accelerate import skip_first_batches
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.data_loader import prepare_data_loader
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from conftest import ACCELERATE, ROOT, anchor, run
from torch.utils.data import DataLoader, Sampler

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
WORDS = " ".join(PAGE.split())  # as if it were one line
ENTRIES = {title: " ".join(text.split())
           for title, text in re.findall(r"^### (.+)\n((?:(?!##).*\n?)*)", PAGE, re.M)}
BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.S)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
FOLDER = "tests/troubleshooting"
TEXTS = r"(`[^`]+`(?: and `[^`]+`)?)"
Shown = namedtuple("Shown", "name strategy wrong fixed both")
SHOWN = [
    Shown(name, strategy.strip("`").removesuffix(".yaml"),
          *(re.findall("`([^`]+)`", texts) for texts in printed))
    for name, strategy, *printed in re.findall(
        r"\[`(\w+\.\w+)`\]\(\.\./tests/troubleshooting/\1\), (`\w+\.yaml`|one process): "
        rf"{TEXTS}; with `--fix`: {TEXTS}(?:\. Both: {TEXTS})?", WORDS)
]
SCRIPTS = {shown.name: shown for shown in SHOWN}
# Both ranks hang and end with an error, so nothing can run after them, and their short timeout is
# not for others.
HANGS = [f"{FOLDER}/{name}" for name in ("hang_uneven.py", "hang_rank_0.py")]
# What the page says of ZeRO besides.
NO_CLIPPING = f"ACCELERATE_GRADIENT_CLIPPING=0.0 {FOLDER}/zero_clips.py"
NO_GATHERING = f"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=false {FOLDER}/zero3_save.py --fix"
# What it says of the other way out of entry 7.
UNPREPARED = f"{FOLDER}/lr_times_n.py --unprepared"
# What it says of accelerate_configs/zero3.yaml, whose JSON mends what accelerate's own keys cannot.
WITH_JSON = [f"{FOLDER}/zero_clips.py", f"{FOLDER}/zero3_save.py --fix"]


def at_once(*calls):
    """The results of several calls; while one waits, the other computes."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def launch(*words, env=None):
    return run([*ACCELERATE, *map(str, words)], env=env)


def started(strategy, *words, env=None):
    """A launch under a YAML of the project; that of zero3 is the reproducers' own, unless a JSON is
    asked for. Or one process without a launcher.
    """
    if strategy == "one process":
        return partial(run, [sys.executable, *map(str, words)], env=env)
    own = {"zero3": f"{FOLDER}/zero3.yaml", "zero3 with JSON": "accelerate_configs/zero3.yaml"}
    yaml = own.get(strategy, f"accelerate_configs/{strategy}.yaml")
    return partial(launch, "--config_file", yaml, "--main_process_port", 0, *words, env=env)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """command -> what it prints on all ranks, with the error that ends it. One launch for all of a
    strategy.

    With JSON, commands have that before them.
    """
    groups = {"zero3": [NO_CLIPPING, NO_GATHERING], "fsdp": [], "ddp": [UNPREPARED],
              "ddp, hangs": [], "zero3 with JSON": [*WITH_JSON], "one process": []}
    for shown in SHOWN:
        script = f"{FOLDER}/{shown.name}"
        if script in HANGS:
            groups["ddp, hangs"] += [f"{script} --fix"]
        elif script.endswith(".py"):
            groups[shown.strategy] += [script, f"{script} --fix"]
    # A script that ends in an error may leave DDP in the middle of something, so it is the last.
    groups["ddp"].sort(key=lambda command: command.endswith("unused.py"))
    folders = {group: tmp_path_factory.mktemp("printed") for group in groups}
    launches = [started(group.split(",")[0], "tests/together.py", folders[group], *commands,
                        env={"TMPDIR": str(folders[group])}) for group, commands in groups.items()]
    results = at_once(*launches, *(started("ddp", hang) for hang in HANGS))
    texts = {hang: result.out + result.err
             for hang, result in zip(HANGS, results[len(launches) :], strict=True)}
    for result, (group, commands) in zip(results, groups.items(), strict=False):
        assert result.code == 0, result.err
        files = sorted(folders[group].glob("rank_*.json"))
        assert len(files) == (1 if group == "one process" else 2)
        ranks = [json.loads(file.read_text()) for file in files]
        prefix = "with JSON: " if "JSON" in group else ""
        texts |= {prefix + command: "".join(rank[command] for rank in ranks)
                  for command in commands}
    return {command: " ".join(text.split()) for command, text in texts.items()}


def assert_symptom_and_fix(shown, before, after):
    printed = f"\n\nwithout --fix:\n{before}\n\nwith it:\n{after}"
    for text in shown.wrong:
        assert text in before and text not in after, repr(text) + printed
    for text in shown.fixed:
        assert text in after and text not in before, repr(text) + printed
    assert all(text in before and text in after for text in shown.both)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.endswith(".py")])
def test_symptom_and_fix(name, printed):
    command = f"{FOLDER}/{name}"
    assert_symptom_and_fix(SCRIPTS[name], printed[command], printed[f"{command} --fix"])


def test_each_process_prints_when_it_trains_alone(printed):
    assert printed[f"{FOLDER}/alone.py"].count(SCRIPTS["alone.py"].wrong[0]) == 2


def test_what_does_not_help_under_zero(printed):
    [clipped] = SCRIPTS["zero_clips.py"].wrong
    heard = "the zero of the YAML is heard now: entry 11 says otherwise"
    assert clipped in printed[NO_CLIPPING], heard
    assert "ValueError: Cannot get 16bit model weights" in printed[NO_GATHERING]


def test_what_deepspeeds_json_mends(printed):
    clips, save = (f"with JSON: {command}" for command in WITH_JSON)
    assert SCRIPTS["zero_clips.py"].fixed[0] in printed[clips]
    assert SCRIPTS["zero3_save.py"].fixed[0] in printed[save]


def test_a_schedule_that_is_not_prepared(printed):
    assert SCRIPTS["lr_times_n.py"].fixed[0] in printed[UNPREPARED]


class Shifted(Sampler):
    """A sampler of one's own: 8 samples, other ones in each epoch."""

    epoch = 0

    def __len__(self):
        return 8

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(8 * self.epoch, 8 * self.epoch + 8))


@pytest.mark.parametrize("place", ["the prepared loader", "what skips"])
def test_the_epoch_of_a_sampler_of_ones_own(place):
    """The first of two processes resumes in epoch 1, after a batch."""
    loader = DataLoader(range(16), 4, sampler=Shifted())
    loader = prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=True)
    if place == "the prepared loader":
        loader.set_epoch(1)
    rest = skip_first_batches(loader, 1)
    if place == "what skips":
        rest.set_epoch(1)
    expected = [[12, 13]] if place == "the prepared loader" else [[4, 5]]  # of epoch 0
    assert [batch.tolist() for batch in rest] == expected


def test_commands_of_the_page():
    """Word for word; one after the other, as they take the default port."""
    assert len(COMMANDS) == 2
    before, after = (run(["bash", "-c", command]) for command in COMMANDS)
    [name] = {re.search(r"(\w+\.py)", command)[1] for command in COMMANDS}
    assert before.code == after.code == 0
    assert_symptom_and_fix(SCRIPTS[name], before.out, after.out)


def test_every_node_thinks_it_is_rank_0(cluster, tmp_path):
    """And the entry on interfaces: with its own loopback for all, a node reaches nobody."""
    script = "tests/troubleshooting/every_node_rank_0.sh"
    command = f"GLOO_SOCKET_IFNAME=lo sbatch {script} --fix"
    assert f"`{command}`: `Gloo connectFullMesh failed`" in WORDS
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    runs = {"before": ([], {}), "after": (["--fix"], {}), "loopback": (["--fix"], loopback)}
    jobs = {name: cluster.submit(f"--output={tmp_path}/{name}", script, *flags, cwd=ROOT,
                                 env={"OMP_NUM_THREADS": "1", **env})
            for name, (flags, env) in runs.items()}
    states = {name: cluster.wait(job) for name, job in jobs.items()}
    logs = {name: (tmp_path / name).read_text() for name in jobs}
    assert states == {"before": "FAILED", "after": "COMPLETED", "loopback": "FAILED"}, logs
    assert_symptom_and_fix(SCRIPTS["every_node_rank_0.sh"], logs["before"], logs["after"])
    for text in ("Gloo connectFullMesh failed", "remote=[127.0.0.1]"):
        assert text in logs["loopback"]


# ---------------------------------------------------------------------------------------- launchers


def test_one_process_where_two_were_asked_for(tmp_path):
    config = tmp_path / "multi_cpu.yaml"
    lines = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\n"
    config.write_text(lines)
    script = [f"{FOLDER}/alone.py", "--fix"]
    for result in at_once(partial(launch, "--config_file", config, *script),
                          partial(launch, "--cpu", "--num_processes", 2, *script)):
        assert result.out.splitlines() == ["process 0 of 1; the launcher started 1"], result.err


def test_a_port_in_use():
    script = [f"{FOLDER}/alone.py", "--fix"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ddp = ["--config_file", "accelerate_configs/ddp.yaml", "--main_process_port", port]
        nodes = ["--num_machines", 2, "--machine_rank", 0, "--main_process_ip", "127.0.0.1"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                    "--master_port", port]
        one, several, bare = at_once(
            partial(launch, *ddp, *script), partial(launch, *ddp, *nodes, *script),
            partial(run, [*torchrun, *script]))
    assert one.code == 0 and "process 1 of 2" in one.out
    assert f"Port `{port}` is already in use" in one.err
    message = (f"Tried to launch distributed communication on port `{port}`, but another process "
               "is utilizing it")
    assert message in several.err and message.replace(port, "29500") in WORDS and several.code
    assert "EADDRINUSE" in bare.err and bare.code and not several.out + bare.out


def parsed(*words):
    """The launcher's arguments, from a YAML and a command line."""
    args = launch_command_parser().parse_args([*map(str, words), "train.py"])
    args = _validate_launch_command(args)[0]
    args.deepspeed_fields_from_accelerate_config = ""  # which the launcher adds later
    return args


def test_settings_that_do_something_else(tmp_path, monkeypatch):
    baseline = ["--config_file", "accelerate_configs/baseline.yaml"]
    result = launch(*baseline, "--same_network", "false", f"{FOLDER}/alone.py")
    message = r"can't open file '/\S*/false': \[Errno 2\] No such file or directory"
    assert re.search(message, result.err) and result.code

    config = tmp_path / "config.yaml"
    lines = "rdzv_backend: c10d\nsame_network: true\nmachine_rank: 0\nnum_machines: 2\n"
    config.write_text((ROOT / "accelerate_configs" / "ddp.yaml").read_text() + lines)
    args = parsed("--config_file", config)
    assert (args.rdzv_backend, args.same_network, args.machine_rank) == ("static", False, 0)
    args = parsed("--config_file", config, "--rdzv_backend", "c10d", "--machine_rank", 1)
    assert (args.rdzv_backend, args.machine_rank) == ("c10d", 1)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert parsed(*baseline).num_cpu_threads_per_process == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert parsed(*baseline).num_cpu_threads_per_process == 4


def test_reproducers_set_what_the_yaml_would(tmp_path):
    """Three of them put into the environment what accelerate makes of lines that their YAMLs do not
    have.
    """
    config = tmp_path / "config.yaml"

    def environment(yaml, *lines):
        folder = ROOT / (FOLDER if yaml == "zero3" else "accelerate_configs")
        config.write_text("\n".join([(folder / f"{yaml}.yaml").read_text(), *lines]))
        args = parsed("--config_file", config, "--main_process_port", 0)
        if yaml == "fsdp":
            return prepare_multi_gpu_env(args)
        return prepare_deepspeed_cmd_env(args)[1]

    env = environment("zero3", "  gradient_accumulation_steps: 1", "  gradient_clipping: 0.0")
    names = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING")
    assert tuple(env[name] for name in names) == ("1", "0.0")
    env = environment("zero3", "  zero3_save_16bit_model: false")
    assert env["ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"] == "false"
    assert not set(names) & set(environment("zero3"))
    assert environment("fsdp")["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    lines = ("distributed_type: FSDP", "num_processes: 2", "fsdp_config: {fsdp_version: 2}")
    config.write_text("\n".join(lines))
    env = prepare_multi_gpu_env(parsed("--config_file", config, "--main_process_port", 0))
    assert env["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true", "the default"


def test_zero_on_several_nodes_without_the_standard_launcher(tmp_path):
    """This node is the only one that is there, and does not miss the other."""
    config = tmp_path / "zero3.yaml"
    lines = (ROOT / FOLDER / "zero3.yaml").read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "multinode" not in line))
    nodes = ["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "127.0.0.1",
             "--main_process_port", "0"]
    args = parsed("--config_file", config, *nodes)
    command, _ = prepare_deepspeed_cmd_env(args)
    assert command[0] == "deepspeed" and "pdsh" in command
    for folder, yaml in ((FOLDER, "zero3"), ("accelerate_configs", "zero2"),
                         ("accelerate_configs", "zero3")):
        args = parsed("--config_file", f"{folder}/{yaml}.yaml", *nodes)
        assert prepare_deepspeed_cmd_env(args)[0] is None
        assert (args.nnodes, args.nproc_per_node) == ("2", "1")

    script = [f"{ROOT}/tests/probe.py", "--output_dir", str(tmp_path)]
    command = [*ACCELERATE, "--config_file", str(config), *nodes, *script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    message = "Unable to find hostfile, will proceed with training with local resources only"
    assert message in done.stdout + done.stderr
    assert json.loads((tmp_path / "rank_0.json").read_text())["WORLD_SIZE"] == "1"
    assert "PATH=" in (tmp_path / ".deepspeed_env").read_text()


# ----------------------------------------------------------------------------------------- the page


def test_every_entry_is_proven():
    assert len(ENTRIES) >= 24
    labels = ("Symptom:**", "Cause:**", "Fix:**", "Here:**")
    for title, text in ENTRIES.items():
        parts = [text.find(f"- **{label}") for label in labels]
        assert -1 < parts[0] < parts[1] < parts[2] < parts[3], title
        proof = text[parts[3]:].split("- **")[-1]
        proven = any(name in proof for name in SCRIPTS)
        proven = proven or "`tests/test_troubleshooting.py::" in proof
        assert proven or "Not shown on a CPU:**" in proof and "](https://" in text, title
    written = {path.name for path in (ROOT / FOLDER).glob("*.*")} - {"without_gpu.py", "zero3.yaml"}
    assert written == set(SCRIPTS), "each script is shown by an entry, with what it prints"
    assert set(re.findall(r"tests/troubleshooting/(\w+\.\w+)", PAGE)) <= written | {"zero3.yaml"}


def test_what_the_page_names_is_there():
    for file, name in re.findall(r"`tests/(\w+\.py)::(\w+)`", PAGE):
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"
    patterns = ("*.py", "*/*.yaml", "accelerate_configs/*.json", "sbatch/*")
    files = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    source = "\n".join(path.name + "\n" + path.read_text() for path in files)
    for title, text in ENTRIES.items():
        here = text.split("- **Here:**")[1].split("- **")[0]
        for name in re.findall(r"`([\w.-]+)`", here):
            assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source), f"{title}: {name}"


def test_the_table_leads_to_the_entries():
    slugs = [anchor(title) for title in ENTRIES]
    numbers = {slug: number for number, slug in re.findall(r"\[(\d+)\]\(#([^)]+)\)", PAGE)}
    assert numbers == {slug: slug.split("-")[0] for slug in slugs}
    assert [slug.split("-")[0] for slug in slugs] == [str(i + 1) for i in range(len(slugs))]
    for number, slug in re.findall(r"\[entry (\d+)\]\(#([^)]+)\)", WORDS):
        assert slug == slugs[int(number) - 1]
    assert set(re.findall(r"\[\d+\]\(#([^)]+)\) \|$", PAGE, re.M)) == set(slugs)


def test_commands_are_for_this_project():
    for command in COMMANDS:
        assert shlex.split(command)[:3] == ["accelerate", "launch", "--config_file"]
