"""train_bert_squad.py under every strategy: the same numbers, shards, saved models, resumed runs, and real text."""

import json
import math
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ACCELERATE, REAL_DATA, ROOT, STRATEGIES, environment, launch, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_mnist_resume import assert_same_end, ids_seen, step_of

import report

SCRIPT = "train_bert_squad.py"
QUESTIONS = "tests/data/squad_v1.json"
TINY = f"""--model_name_or_path tests/data/tiny_bert --from_scratch --train_file {QUESTIONS}
    --validation_file {QUESTIONS} --max_seq_length 128 --doc_stride 32 --learning_rate 1e-3""".split()
STEPS = 24  # of a global batch of 16; an epoch has 13
# These move the logits of all tokens, or of all keys, alike: a softmax does not see that, their gradients are zero but
# for rounding, and Adam makes steps of a fixed size out of the rounding.
NO_GRADIENT = re.compile(r"qa_outputs\.bias|encoder\.layer\.1\.output\.LayerNorm\.bias|attention\.self\.key\.bias")


def flags(micro_batch=8, accumulation=1, dropout=0.0):
    return [*TINY, "--per_device_train_batch_size", micro_batch, "--gradient_accumulation_steps", accumulation,
            "--dropout", dropout, "--max_train_steps", STEPS]  # fmt: skip


def predictions(result):
    return json.loads((result.folder / "predictions.json").read_text())


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    return launch("baseline", SCRIPT, folder, *flags(16), env={"SPY_DIR": str(folder)})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(strategy, accumulation) -> the Result of a run on two processes, with the baseline's global batch."""
    results = {}

    def get(strategy, accumulation=1):
        key = strategy, accumulation
        if key not in results:
            folder = tmp_path_factory.mktemp("runs") / f"{strategy}{accumulation}"
            folder.mkdir()
            env = {"SPY_DIR": str(folder), "SPY_BYTES": "1"}
            options = ["--per_device_eval_batch_size", 7] + ["--with_tracking"] * (strategy == "ddp")
            results[key] = launch(strategy, SCRIPT, folder, *flags(8 // accumulation, accumulation), *options, env=env)
        return results[key]

    return get


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_numbers_as_the_baseline(strategy, accumulation, baseline, runs):
    result = runs(strategy, accumulation)
    record, reference = result.record, baseline.record
    assert (record["strategy"], record["processes"], record["devices"]) == (strategy, 2, 2)
    assert record["global_batch_size"] == reference["global_batch_size"] == 16
    assert len(result.losses) == STEPS
    assert result.losses == pytest.approx(baseline.losses, rel=1e-5)
    assert result.weights.keys() == baseline.weights.keys()
    for name, weight in baseline.weights.items():
        if not NO_GRADIENT.search(name):
            torch.testing.assert_close(result.weights[name], weight, rtol=1e-3, atol=1e-4, msg=name)
    # Features in batches of 7 from 2 processes: the last round is uneven, and each still counts once.
    assert record["metrics"]["eval_loss"] == pytest.approx(reference["metrics"]["eval_loss"], rel=1e-6)
    assert {**record["metrics"], "eval_loss": 0} == {**reference["metrics"], "eval_loss": 0}
    assert predictions(result) == predictions(baseline) and len(predictions(result)) == 132
    assert record["tokens"] == reference["tokens"]

    steps = ids_seen(baseline.folder, 0)
    mine = [ids_seen(result.folder, rank) for rank in (0, 1)]
    for step, ids in enumerate(steps):
        micro_batches = [mine[rank][step * accumulation + micro] for micro in range(accumulation) for rank in (0, 1)]
        assert sum(micro_batches, []) == ids, f"step {step + 1} saw other samples, or in another order"

    losses = max(abs(a / b - 1) for a, b in zip(result.losses, baseline.losses, strict=True))
    weights = max((result.weights[name] - weight).abs().max().item()
                  for name, weight in baseline.weights.items() if not NO_GRADIENT.search(name))  # fmt: skip
    print(f"{strategy}, accumulation {accumulation}: relative loss {losses:.1e}, absolute weights {weights:.1e}")


def test_dp_is_the_baseline_on_one_device(baseline, tmp_path):
    result = launch("dp", SCRIPT, tmp_path, *flags(16))
    assert result.record["strategy"] == "dp"
    assert result.losses == baseline.losses and predictions(result) == predictions(baseline)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_holds_what_the_strategy_says(strategy, runs):
    """Bytes of parameters, gradients and Adam's two states, of Ψ parameters in fp32 on N = 2 ranks, against 16 Ψ."""
    for rank in (0, 1):
        held = json.loads((runs(strategy).folder / f"bytes_{rank}.json").read_text())
        psi = 4 * sum(held["sizes"])  # bytes of one copy
        whole = 4 * sum(size for size in held["sizes"] if size < 10_000)  # ZeRO-3 does not shard these parameters
        cut = 4 * max(held["sizes"])  # a gradient that the border between two ranks cuts through is held by both
        expected = {
            "ddp": {"parameters": psi, "gradients": psi, "states": 2 * psi, "master_copy": 0},
            "fsdp": {"parameters": psi / 2, "gradients": psi / 2, "states": psi, "master_copy": 0},
            "zero2": {"parameters": psi, "gradients": psi / 2, "states": psi, "master_copy": psi / 2},
            "zero3": {"parameters": psi / 2 + whole, "gradients": psi / 2, "states": psi, "master_copy": psi / 2},
        }[strategy]
        assert whole < 0.02 * psi
        for name, size in expected.items():
            most = size * 1.01 + (cut if (strategy, name) == ("zero2", "gradients") else 0)
            assert size * 0.99 <= held[name] <= most, f"rank {rank}: {name} {held[name]} bytes instead of {size:.0f}"
        formula = report.bytes_held(strategy, psi / 4, 2)
        assert sum(held[name] for name in expected) == pytest.approx(formula, rel=0.04), "the formula of the report"
        print(f"{strategy} rank {rank}: " + ", ".join(f"{name} {held[name] / psi:.2f}" for name in expected))


@pytest.mark.slow
def test_saved_models_answer_the_same_in_a_fresh_process(baseline, runs):
    results = [baseline, *(runs(strategy) for strategy in STRATEGIES)]
    command = [sys.executable, "tests/reload.py", QUESTIONS, "128", "32", *(str(result.folder) for result in results)]
    answers = run(command)
    assert answers.code == 0, answers.err
    for result, reloaded in zip(results, json.loads(answers.out.splitlines()[-1]), strict=True):
        assert reloaded == predictions(result)
        config = json.loads((result.folder / "config.json").read_text())
        assert config["architectures"] == ["BertForQuestionAnswering"] and config["vocab_size"] == 344


def test_the_record_is_complete(runs):
    result = runs("ddp")
    record = result.record
    assert set(record) == set("""activation_checkpointing argv device_name devices precision dynamo
        global_batch_size gradient_accumulation_steps loss_history metrics nodes padding_share
        parameters per_device_batch_size processes profiled ranks resumed_from samples_per_second
        script seconds slurm_job_id status steps strategy strategy_options threads tokens
        tokens_per_second versions workload""".split())
    assert record["script"] == SCRIPT and record["parameters"] == sum(map(torch.numel, result.weights.values()))
    assert set(record["metrics"]) == {"exact_match", "f1", "eval_loss"} and record["metrics"]["f1"] > 5
    assert 0 < record["padding_share"] < 0.1
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"]["train"], rel=1e-3)
    lengths = {"max": 128, "min": 20}
    assert lengths["min"] * 16 * STEPS < record["tokens"] < lengths["max"] * 16 * STEPS
    assert record["workload"]["questions"] == 132 and record["workload"]["model"] == "tiny_bert, from scratch"
    logs = EventAccumulator(str(result.folder / "tensorboard")).Reload()
    assert set(logs.Tags()["scalars"]) >= {"loss", "learning_rate", "exact_match", "f1", "eval_loss"}
    for event in logs.Scalars("learning_rate"):  # falls linearly to zero, not N times as fast
        assert event.value == pytest.approx(1e-3 * (1 - (event.step - 1) / STEPS), rel=1e-5)


def test_the_best_by_validation_loss_is_kept(runs):
    result = runs("fsdp")
    losses = [float(found) for found in re.findall(r"validation loss ([\d.]+)", result.out)]
    assert len(losses) == 2
    best = (13, STEPS)[losses.index(min(losses))]  # the last step of that epoch
    assert step_of((result.folder / "checkpoints" / "best").resolve()) == best


# ------------------------------------------------------------------------------------------------------ nothing lost


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """strategy -> the Result of a run with dropout that nothing happened to."""
    results = {}

    def get(strategy):
        if strategy not in results:
            folder = tmp_path_factory.mktemp("undisturbed") / strategy
            folder.mkdir()
            env = {"SPY_DIR": str(folder)}
            results[strategy] = launch(strategy, SCRIPT, folder, *flags(dropout=0.1), env=env)
        return results[strategy]

    return get


def kill_and_resume(strategy, folder, reference, saving, accumulation=1):
    """A run with the flags `saving`, every 5 steps, of which rank 1 gets SIGKILL in step 19; the Result after --resume.
    It has seen the rest of what the undisturbed `reference` saw, and ends as that did.
    """
    spying = {"SPY_DIR": str(folder)}
    killed = launch(strategy, SCRIPT, folder, *saving, env=spying | {"SPY_SIGNAL": f"SIGKILL 1 {18 * accumulation}"},
                    ok=False)  # fmt: skip
    assert killed.code != 0 and killed.record["status"] == "running"
    for rank in (0, 1):
        (folder / f"ids_{rank}.jsonl").unlink()
    resumed = launch(strategy, SCRIPT, folder, *saving, "--resume", env=spying)
    assert step_of(resumed.record["resumed_from"]) == 15  # in the second epoch
    for rank in (0, 1):
        whole = ids_seen(reference.folder, rank)
        assert len(whole) == STEPS * accumulation and ids_seen(folder, rank) == whole[15 * accumulation :]
    assert_same_end(resumed, reference)
    return resumed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_after_sigkill_is_exact(strategy, undisturbed, tmp_path):
    reference = undisturbed(strategy)
    saving = [*flags(dropout=0.1), "--checkpointing_steps", 5]
    resumed = kill_and_resume(strategy, tmp_path, reference, saving)
    assert predictions(resumed) == predictions(reference)
    assert resumed.record["tokens"] == reference.record["tokens"]
    assert resumed.record["padding_share"] == reference.record["padding_share"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_activation_checkpointing_changes_no_number(strategy, undisturbed, tmp_path):
    """With dropout: the second time a layer is computed, it draws the same masks. No bit may differ."""
    again = launch(strategy, SCRIPT, tmp_path, *flags(dropout=0.1), "--activation_checkpointing")
    assert again.record["activation_checkpointing"]
    assert not undisturbed(strategy).record["activation_checkpointing"]
    assert_same_end(again, undisturbed(strategy))


@pytest.mark.parametrize("strategy, signal, rank", [("ddp", "SIGUSR1", 1), ("fsdp", "SIGTERM", 0)])
def test_preemption_stops_all_ranks_at_one_step_and_resumes_exactly(strategy, signal, rank, undisturbed, tmp_path):
    env = {"SPY_DIR": str(tmp_path), "SPY_SIGNAL": f"{signal} {rank} 4"}
    stopped = launch(strategy, SCRIPT, tmp_path, *flags(dropout=0.1), "--checkpointing_steps", 6, env=env)
    assert stopped.record["status"] == "preempted" and "--resume" in stopped.out
    assert stopped.record["steps"] == 6 and stopped.record["metrics"] is None
    assert [len(ids_seen(tmp_path, rank)) for rank in (0, 1)] == [6, 6]
    resumed = launch(strategy, SCRIPT, tmp_path, *flags(dropout=0.1), "--checkpointing_steps", 6, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 6
    assert_same_end(resumed, undisturbed(strategy))
    # A kill after the last checkpoint and before the record costs nothing but the saving of the model.
    for name in ("run.json", "model.safetensors"):
        (tmp_path / name).unlink()
    again = launch(strategy, SCRIPT, tmp_path, *flags(dropout=0.1), "--checkpointing_steps", 6, "--resume")
    assert_same_end(again, undisturbed(strategy))
    assert again.record["tokens"] == resumed.record["tokens"] and again.record["tokens_per_second"] is None
    (tmp_path / "run.json").unlink()
    # A tokeniser, a length or data that differ are another run.
    other = launch(strategy, SCRIPT, tmp_path, *flags(dropout=0.1), "--max_seq_length", 96, "--resume", ok=False)
    assert "sequence_length 128 -> 96" in other.error_line()


@pytest.mark.slow
def test_a_run_goes_on_with_one_process_that_accumulates(baseline, tmp_path):
    saving = ["--checkpointing_steps", 5]
    stopped = launch("ddp", SCRIPT, tmp_path, *flags(), *saving,
                     env={"SPY_DIR": str(tmp_path), "SPY_SIGNAL": "SIGTERM 1 18"})  # fmt: skip
    assert stopped.record["steps"] == 20
    resumed = launch("baseline", SCRIPT, tmp_path, *flags(accumulation=2), *saving, "--resume")
    assert resumed.record["devices"] == 1
    assert resumed.losses == pytest.approx(baseline.losses, rel=1e-5)


@pytest.mark.slow
def test_sigterm_in_the_evaluation_stops_it_and_costs_no_step(undisturbed, tmp_path):
    env = {"SPY_DIR": str(tmp_path), "SPY_EVAL": "SIGTERM 1 5"}
    small = ["--per_device_eval_batch_size", 4]  # 28 batches
    stopped = launch("zero3", SCRIPT, tmp_path, *flags(dropout=0.1), *small, env=env)
    assert stopped.record["status"] == "preempted" and stopped.record["steps"] == 13
    assert "preempted after 13 steps" in stopped.out
    assert not (tmp_path / "predictions.json").exists()
    resumed = launch("zero3", SCRIPT, tmp_path, *flags(dropout=0.1), "--resume")
    assert step_of(resumed.record["resumed_from"]) == 13
    assert_same_end(resumed, undisturbed("zero3"))


@pytest.mark.slow
def test_sigterm_while_tokenising_ends_all_processes_in_seconds(tmp_path):
    begun, spying = tmp_path / "begun", {"SPY_SCRIPT": "train_bert_squad", "HF_HOME": str(tmp_path / "cache")}
    words = ["--config_file", "accelerate_configs/ddp.yaml", "--main_process_port", "0", "tests/spy.py"]
    launcher = subprocess.Popen(
        [*ACCELERATE, *words, "--output_dir", tmp_path / "run", *map(str, flags())], cwd=ROOT,
        env=environment(spying | {"SPY_TOKENS": str(begun)}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    processes = psutil.Process(launcher.pid)
    try:
        while not begun.exists():
            assert launcher.poll() is None
            time.sleep(0.1)
        processes = [processes, *processes.children(recursive=True)]
        assert len(processes) >= 3
        launcher.terminate()
        assert launcher.wait(20) != 0  # tokenising would take two minutes
        assert not psutil.wait_procs(processes[1:], timeout=10)[1]
    finally:
        launcher.kill()
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------- other data, other precision


@pytest.mark.slow
def test_unanswerable_questions_get_no_answer(tmp_path):
    """SQuAD v2.0: after some epochs on the tiny data, most questions without an answer are recognised."""
    data = ROOT / "tests" / "data" / "squad_v2.json"
    command = [*TINY, "--train_file", data, "--validation_file", data, "--version_2_with_negative", "--dropout", 0]
    result = launch("ddp", SCRIPT, tmp_path, *command, "--num_epochs", 25, "--per_device_train_batch_size", 4)
    questions = [qa for article in json.loads(data.read_text())["data"] for part in article["paragraphs"]
                 for qa in part["qas"]]  # fmt: skip
    answers = predictions(result)
    empty = {qa["id"] for qa in questions if qa["is_impossible"]}
    right = sum(answers[question] == "" for question in empty)
    assert len(empty) == 24 and right >= 20 and "" not in {answers[qa["id"]] for qa in questions[:3]}
    assert result.record["metrics"]["f1"] > 80 and result.record["workload"]["version_2"] is True


@pytest.mark.slow
def test_bf16_and_compiled_runs_walk_nearly_the_same_curve(baseline, tmp_path):
    """Lower precision and torch.compile come from the launcher; "eager" compiles without a C++ compiler. The weights
    that a run leaves have the same dtype under every strategy."""
    for strategy, precision, dynamo in (("ddp", "bf16", "no"), ("zero2", "bf16", "no"), ("zero3", "bf16", "no"),
                                        ("fsdp", "bf16", "no"), ("ddp", "no", "eager"), ("fsdp", "no", "eager")):
        launcher = ["--mixed_precision", precision, "--dynamo_backend", dynamo]
        result = launch(strategy, SCRIPT, tmp_path / (strategy + precision), *flags(8), launcher=launcher)
        workload = result.record["workload"]
        assert (workload["precision"], workload["dynamo"]) == (precision, dynamo)
        assert "recompile_limit" not in result.err + result.out
        assert result.losses == pytest.approx(baseline.losses, rel=0.05 if precision == "bf16" else 1e-5)
        assert result.weights.keys() == baseline.weights.keys()
        assert {weight.dtype for weight in result.weights.values()} == {torch.float32}


@pytest.mark.slow
def test_every_width_is_compiled_once(tmp_path):
    """Batches of BERT differ in width. If torch compiled for each, it would soon give up, and run
    the rest uncompiled. It compiles for the first, then for all, and again to evaluate.
    """
    few = [*TINY, "--max_train_steps", 12, "--per_device_train_batch_size", 2, "--dropout", 0]
    result = launch("baseline", SCRIPT, tmp_path, *few, launcher=["--dynamo_backend", "eager"],
                    env={"SPY_SHAPES": "4"})  # fmt: skip
    assert result.record["workload"]["dynamo"] == "eager"
    assert "recompile_limit" not in result.err + result.out


# ------------------------------------------------------------------------------------------------------- real data


REAL = ["--model_name_or_path", REAL_DATA / "minilm", "--train_file", REAL_DATA / "squad" / "train.json",
        "--validation_file", REAL_DATA / "squad" / "dev.json"]  # fmt: skip


@pytest.mark.slow
def test_real_text_and_weights_give_the_same_first_losses(real_data, tmp_path):
    """SQuAD v1.1 and a pretrained encoder, four steps of each strategy against the baseline."""
    few = [*REAL, "--max_train_samples", 64, "--max_eval_samples", 16, "--max_train_steps", 4, "--dropout", 0]
    reference = launch("baseline", SCRIPT, tmp_path / "baseline", *few, "--per_device_train_batch_size", 8)
    assert 0 < reference.record["metrics"]["f1"] <= 100 and math.isfinite(reference.losses[-1])
    for strategy in STRATEGIES:
        result = launch(strategy, SCRIPT, tmp_path / strategy, *few)  # 4 a device, the default
        assert result.losses == pytest.approx(reference.losses, rel=1e-4), strategy
        assert result.record["parameters"] == reference.record["parameters"] == 22_566_146
        for name in ("exact_match", "f1"):
            assert result.record["metrics"][name] == pytest.approx(reference.record["metrics"][name]), strategy
        assert predictions(result) == predictions(reference), strategy
