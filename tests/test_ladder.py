"""The memory ladder of BERT: more YAMLs, activation checkpointing, clipping, and what is said when memory runs out."""

import json
import math
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, RUNGS, STRATEGIES, launch, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_bert import NO_GRADIENT, SCRIPT, STEPS, flags, ids_seen, predictions
from test_mnist_resume import assert_same_end, step_of
from torch.testing import assert_close

import report
import train_bert_squad as script

CLIPPED = ["--max_grad_norm", 1.0, "--with_tracking", "--checkpointing_steps", 5]
PAGE = (ROOT / "docs" / "ladder.md").read_text()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(YAML, more flags) -> the Result of a run that clips, on two processes, or on one of twice the batch."""
    results = {}

    def get(name, *more, accumulation=1):
        key = name, *more, accumulation
        if key not in results:
            folder = tmp_path_factory.mktemp(name)
            micro_batch = (16 if name == "baseline" else 8) // accumulation
            results[key] = launch(name, SCRIPT, folder, *flags(micro_batch, accumulation), *CLIPPED, *more,
                                  env={"SPY_DIR": str(folder), "SPY_BYTES": "1"} if name in RUNGS else None)
        return results[key]

    return get


def norms(result):
    """{step: norm of its gradients} in TensorBoard's log of a run."""
    log = EventAccumulator(str(result.folder / "tensorboard")).Reload()
    return {event.step: event.value for event in log.Scalars("grad_norm")}


@pytest.mark.parametrize("name", [*STRATEGIES, *RUNGS])
def test_clipping_is_the_same_under_every_strategy(name, runs):
    """Losses, weights, answers and the norms before clipping; the rungs accumulate and recompute besides."""
    baseline = runs("baseline")
    result = runs(name, "--activation_checkpointing", accumulation=2) if name in RUNGS else runs(name)
    seen, expected = norms(result), norms(baseline)
    assert len(expected) >= 6 and max(expected.values()) > 2, "nothing was clipped"
    assert seen == pytest.approx(expected, rel=1e-5)
    assert result.losses == pytest.approx(baseline.losses, rel=1e-5) and len(result.losses) == STEPS
    for weight in baseline.weights:
        if not NO_GRADIENT.search(weight):
            assert_close(result.weights[weight], baseline.weights[weight], rtol=1e-3, atol=1e-4, msg=weight)
    assert predictions(result) == predictions(baseline)
    loss = max(abs(a / b - 1) for a, b in zip(result.losses, baseline.losses, strict=True))
    norm = max(abs(seen[step] / expected[step] - 1) for step in expected)
    print(f"{name}: losses differ by at most {loss:.1e}, norms by {norm:.1e}")


def test_clipping_changes_the_losses_and_is_in_the_settings(runs, tmp_path):
    clipped = runs("baseline")
    free = launch("baseline", SCRIPT, tmp_path, *flags(16), "--checkpointing_steps", 20)
    assert free.losses[0] == clipped.losses[0] and free.losses[2:] != pytest.approx(clipped.losses[2:], rel=1e-3)
    (tmp_path / "run.json").unlink()
    other = launch("baseline", SCRIPT, tmp_path, *flags(16), "--max_grad_norm", 1, "--resume", ok=False)
    assert "max_grad_norm None -> 1.0" in other.error_line()


@pytest.mark.parametrize("name", RUNGS)
def test_each_rank_of_a_rung_holds_what_the_formula_says(name, runs):
    """Of parameters, gradients and Adam's states, in fp32 on two ranks; on a CPU the host's part is counted too."""
    result = runs(name, "--activation_checkpointing", accumulation=2)
    assert report.name_yaml(result.record["strategy"], result.record["strategy_options"]) == name
    for rank in (0, 1):
        held = json.loads((result.folder / f"bytes_{rank}.json").read_text())
        sizes = held.pop("sizes")
        seen, formula = sum(held.values()), report.bytes_held(name, sum(sizes), 2)
        print(f"{name} rank {rank}: {', '.join(f'{part} {size / 4 / sum(sizes):.2f}' for part, size in held.items())}")
        assert seen == pytest.approx(formula, rel=0.05), f"counted {seen}, by formula {formula}"


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_resumes_exactly_after_sigkill(name, runs, tmp_path):
    reference = runs(name, "--activation_checkpointing", accumulation=2)
    same = [*flags(4, 2), *CLIPPED, "--activation_checkpointing"]
    killed = launch(name, SCRIPT, tmp_path, *same, env={"SPY_DIR": str(tmp_path), "SPY_SIGNAL": "SIGKILL 1 36"},
                    ok=False)  # fmt: skip
    assert killed.code != 0 and not (tmp_path / "run.json").exists()
    for rank in (0, 1):
        (tmp_path / f"ids_{rank}.jsonl").unlink()
    resumed = launch(name, SCRIPT, tmp_path, *same, "--resume", env={"SPY_DIR": str(tmp_path)})
    assert step_of(resumed.record["resumed_from"]) == 15  # in the second epoch
    for rank in (0, 1):
        assert ids_seen(tmp_path, rank) == ids_seen(reference.folder, rank)[30:]
    assert_same_end(resumed, reference)


# ------------------------------------------------------------------------------------------------------ out of memory


def test_what_does_not_fit_under_ddp_fits_under_fsdp_that_recomputes(tmp_path):
    """Each rank may have 400 MB more than its libraries. Tried: ddp needs 500 to 550, fsdp with recomputing 200 to 300.
    The ranks' own limit ends them as a full GPU does: an allocation fails.
    """
    model, folder = tmp_path / "model", tmp_path / "ddp"
    shutil.copytree(ROOT / "tests" / "data" / "tiny_bert", model)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_hidden_layers": 8}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | sizes))
    some = ["--model_name_or_path", model, "--max_train_steps", 3, "--max_eval_samples", 8]
    limited = {"SPY_LIMIT": "400"}
    failed = launch("ddp", SCRIPT, folder, *flags(), *some, env=limited, ok=False)
    line = failed.error_line()
    found = re.fullmatch(
        r"error: out of memory on rank [01] in step [123], with (\S+) MB in use: parameters 58, gradients 58, "
        r"optimizer states 116, activations and all else (\S+), libraries and data (\S+)\. Try, in this order, "
        r"--per_device_train_batch_size 4 --gradient_accumulation_steps 2, the same global batch \(saves 50% of the "
        r"activations\); --activation_checkpointing \(saves most of the (\S+) MB of activations\); fsdp\.yaml on 2 "
        r"devices \(saves 116 MB\)\. See docs/ladder\.md", line)
    assert found, line
    used, activations, others, again = (int(number.replace(",", "")) for number in found.groups())
    assert activations == again and used == pytest.approx(58 + 58 + 116 + activations + others, abs=3)
    assert not (folder / "run.json").exists()
    fits = launch("fsdp", SCRIPT, tmp_path / "fsdp", *flags(), *some, "--activation_checkpointing", env=limited)
    assert fits.record["status"] == "completed" and fits.record["parameters"] == 14_526_722


@pytest.mark.parametrize("name, strategy, options, rungs", [
    ("baseline", "baseline", {}, "--activation_checkpointing fsdp.yaml"),
    ("ddp", "ddp", {}, "--activation_checkpointing fsdp.yaml"),
    ("zero1", "zero1", {}, "--activation_checkpointing fsdp.yaml"),
    ("zero2", "zero2", {}, "--activation_checkpointing fsdp.yaml"),
    ("zero3", "zero3", {}, "--activation_checkpointing fsdp.yaml"),  # which has no second copy
    ("fsdp", "fsdp", {"reshard_after_forward": "true"}, "--activation_checkpointing twice"),
])  # fmt: skip
def test_the_line_has_the_bytes_of_the_report_and_the_next_rungs(name, strategy, options, rungs):
    devices = 1 if name == "baseline" else 4
    args = SimpleNamespace(per_device_train_batch_size=6, gradient_accumulation_steps=1, activation_checkpointing=False)
    run = SimpleNamespace(strategy=strategy, settings={"strategy_options": options}, devices=devices, args=args,
                          record={"parameters": 10**6, "precision": "no"}, step=3, memory_before=0)
    assert sum(script.bytes_by_formula(run).values()) == pytest.approx(report.bytes_held(name, 10**6, devices))
    with pytest.raises(SystemExit) as exit, script.explain_out_of_memory(run, torch.nn.Linear(1, 1)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    line = str(exit.value)
    assert line.startswith("error: out of memory on rank 0 in step 4, with ") and "\n" not in line
    order = re.findall(r"--per_device_train_batch_size 3 --gradient_accumulation_steps 2|--activation_checkpointing|"
                       r"fsdp\.yaml on|twice", line)  # fmt: skip
    assert order[0].startswith("--per_device") and " ".join(order[1:]).removesuffix(" on") == rungs
    for other in (RuntimeError("Connection closed by peer"), ValueError("out of memory")):
        with pytest.raises(type(other)), script.explain_out_of_memory(run, torch.nn.Linear(1, 1)):
            raise other


# ----------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    """What the commands of docs/ladder.md print, word for word, in a folder of their own, and that folder."""
    folder = tmp_path_factory.mktemp("ladder")
    for name in ("accelerate_configs", "tests", "fit.py", "report.py", SCRIPT):
        (folder / name).symlink_to(ROOT / name)
    [commands] = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    done = run(["bash", "-c", f"cd {shlex.quote(str(folder))} && set -e\n{commands}"], timeout=600)
    assert done.code == 0, done.out + done.err
    return done.out, folder


def test_each_rung_of_the_page_holds_what_fit_says(climbed):
    """The page has fit.py's totals, and what was counted on one machine. The count on this one is as near to it."""
    printed, folder = climbed
    tables = [{row.split()[1]: row for row in text.split("\nMB:")[0].splitlines() if row.startswith("| ")}
              for text in printed.split("parameters, 2 x 900 MB")[1:4]]  # fmt: skip
    at_once, halved, again = ({name: [cell.strip() for cell in row.split("|")[1:-1]] for name, row in rows.items()}
                              for rows in tables)  # fmt: skip
    records = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/ladder/*/run.json")}
    parameters = records["1-ddp"]["parameters"]
    said = {"1-ddp": at_once["ddp"], "2-accumulate": halved["ddp"], "3-recompute": again["ddp"],
            "4-fsdp_keep": again["fsdp_keep"], "5-fsdp": again["fsdp"]}
    rows = re.findall(r"^\| `(\S+)` \|.*?\| ([\d,]+)(?: \+ (\d+))? \| ([\d,]+) \|$", PAGE, re.M)
    assert [row[0] for row in rows] == sorted(records) == sorted(said)
    before = math.inf
    for name, total, more, counted in rows:
        assert total == said[name][6], f"{name}: fit.py says {said[name][6]} MB"
        assert not more or int(more) == round(4 * parameters / 1e6)
        peaks = [rank["peak_memory_mb"] - rank["memory_before_mb"] for rank in records[name]["ranks"]]
        formula = int(total.replace(",", "")) + int(more or 0)
        print(f"{name}: {formula} MB by formula, counted {max(peaks):.0f}; the page says {counted}")
        assert max(peaks) == pytest.approx(formula, rel=0.2) and int(counted.replace(",", "")) < before
        before = int(counted.replace(",", ""))
    losses = [[loss for _, loss in record["loss_history"]] for record in records.values()]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    text = (folder / "runs" / "ladder" / "report.md").read_text()
    assert "| fsdp_keep, recomputing " in text and "of it training's, MB" in text


def test_the_page_names_every_rung_and_its_commands_work(tmp_path):
    for name in RUNGS:
        assert f"`{name}.yaml`" in PAGE
    for command in ["python fit.py 40GB", *re.findall(r"^python fit\.py.*$", PAGE.split("```sh")[0], re.M)]:
        done = run(shlex.split(command.replace("python", shlex.quote(sys.executable), 1)))
        assert done.code == 0 and all(f"| {name} " in done.out for name in RUNGS), done.err
