"""Speed of the scripts in this checkout, beside the same scripts in another one.

    git worktree add /tmp/old COMMIT
    python benchmarks/compare.py /tmp/old [--data_dir data] [--strategies baseline ddp] \\
        [--model DIR --train_file JSON --validation_file JSON] [--scripts train_bert_squad.py]

The same command runs in both checkouts, in pairs, now one first, now the other, as machines are
shared and noisy; rows are medians over the pairs. CPU time is less noisy than time. Then how long a
step waits for its batch, in this checkout.
On the CPU only, one thread a process. About half an hour on two cores, 7 minutes without BERT.
"""

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from side_by_side import ROOT, launcher, record, role, row

STEPS = {"train_mnist_rnn.py": 1500, "train_bert_squad.py": 30}  # of a run: 5 to 10 s, and a minute


def time_loading(accelerator, model, optimizer, schedule, loader, *_):
    """Stands in for a script's `train`: epochs that load batches, and nothing else."""
    milliseconds = []
    for epoch in range(5):
        loader.set_epoch(epoch)
        clock = time.perf_counter()
        batches = sum(1 for _ in loader)
        milliseconds.append(1000 * (time.perf_counter() - clock) / batches)
    if accelerator.is_main_process:
        print("number:", milliseconds)
    sys.exit()  # so no model is saved


def load_only(name, *flags):
    """Run a script as far as its prepared DataLoader, and time that in the place of training."""
    script = importlib.import_module(name.removesuffix(".py"))
    script.train = time_loading
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [name, "--output_dir", folder, *flags]
        with contextlib.suppress(SystemExit):
            script.main(script.parse_args())
    sys.stdout.flush()
    os._exit(0)  # as the script does


def main():
    if sys.argv[1:2] == ["--role"]:
        return load_only(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("other", type=Path, help="another checkout of this repository")
    add("--data_dir", help="where MNIST is (without: scikit-learn's digits)")
    add("--model", help="a pretrained BERT (without: no comparison of train_bert_squad.py)")
    add("--train_file", help="SQuAD's training questions")
    add("--validation_file", help="SQuAD's validation questions")
    add("--pairs", type=int, default=5, help="of runs")
    add("--scripts", nargs="+", choices=STEPS, default=list(STEPS), help="only these")
    add("--strategies", nargs="+", default=["baseline", "ddp"], help="only these")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    mnist, bert = STEPS
    commands = {mnist: ["--dataset", "digits", "--per_device_train_batch_size", "64"]}
    if args.data_dir:
        commands[mnist][:2] = ["--data_dir", Path(args.data_dir).resolve()]
    if args.model:
        model, train, validation = (
            Path(name).resolve() for name in (args.model, args.train_file, args.validation_file)
        )
        commands[bert] = [
            "--model_name_or_path",
            model,
            "--train_file",
            train,
            "--validation_file",
            validation,
            "--max_train_samples",
            600,
            "--max_eval_samples",
            1,
            "--per_device_train_batch_size",
            8,
        ]

    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, one thread a process\n")
    print("| what | median | from to | target |\n|---|---|---|---|")
    for script in filter(commands.get, args.scripts):
        for strategy in args.strategies:
            flags, others, ours, ratios = commands[script], [], [], []
            for pair in range(args.pairs):
                cpu = {}
                for times, root in ((others, args.other), (ours, ROOT))[:: 1 - 2 * (pair % 2)]:
                    run = record(
                        strategy, script, *flags, "--max_train_steps", STEPS[script], root=root
                    )
                    times.append(1000 * run["seconds"]["train"] / STEPS[script])
                    cpu[root] = sum(rank["train_cpu"] for rank in run["ranks"])
                ratios.append(cpu[args.other] / cpu[ROOT])
            row(f"{script}, {strategy}: a step in the other checkout", others, "ms")
            row("... in this one", ours, "ms")
            speeds = [old / new for old, new in zip(others, ours, strict=True)]
            row("... speed of this one / of the other", speeds, "times", ">= 0.98")
            row("... CPU time of the other / of this one", ratios, "times")
            loading = role(__file__, script, *flags, launcher=launcher(strategy))
            row("... loading a batch in this one", loading, "ms")


if __name__ == "__main__":
    main()
