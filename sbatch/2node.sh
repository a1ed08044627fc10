#!/bin/bash
# Train on two nodes, one GPU on each. It launches as sbatch/simple.sh does, and adds (launch.sh):
#   checks    before it trains: does each node have the GPUs, accelerate and the disk?
#   a lock    on the output directory, so that no second job writes there
#   a requeue after an interruption: the ranks save, and the job continues in the same log
# Fill one node first (sbatch/1node.sh): the GPUs of a node talk to each other faster than nodes do
# (docs/before-you-scale.md). From the project's root:
#   sbatch sbatch/2node.sh                                                  BERT on SQuAD under DDP
#   sbatch sbatch/2node.sh fsdp train_bert_squad.py --num_epochs 2
#   sbatch sbatch/2node.sh accelerate_configs/zero3.yaml --mixed_precision bf16 train_bert_squad.py
#   sbatch --nodes=4 --gres=gpu:2 --cpus-per-task=8 sbatch/2node.sh accelerate_configs/fsdp.yaml
#   PROCESSES_PER_NODE=4 sbatch --gres=none sbatch/2node.sh                 on a CPU partition
# Flags of `accelerate launch` come after the YAML, flags of the script after the script. Partition,
# account and modules belong in sbatch/site.sh.
#SBATCH --job-name=2node
#SBATCH --nodes=2
#SBATCH --gres=gpu:1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
# Slurm signals this shell (B:) two minutes before the time is over; then launch.sh lets the ranks
# save.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Slurm runs a copy of this file, so the folder it was submitted from says where the others are.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
[ -f sbatch/launch.sh ] ||
    { echo "error: no sbatch/launch.sh in $PWD: submit from the project's root" >&2 && exit 1; }
exec bash sbatch/launch.sh "$@"
