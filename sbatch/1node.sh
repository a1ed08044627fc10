#!/bin/bash
# Train on one node with two GPUs. From the project's root:
#   sbatch sbatch/1node.sh                                                  BERT on SQuAD under DDP
#   sbatch sbatch/1node.sh fsdp train_bert_squad.py --num_epochs 2
#   sbatch sbatch/1node.sh accelerate_configs/zero3.yaml --mixed_precision bf16 train_bert_squad.py
#   sbatch --gres=gpu:a100:4 --cpus-per-task=16 sbatch/1node.sh accelerate_configs/fsdp.yaml
#   sbatch --exclusive --mem=64G sbatch/1node.sh            a whole node, and so much of its memory
#   PROCESSES_PER_NODE=4 sbatch --gres=none sbatch/1node.sh                 on a CPU partition
# Flags of `accelerate launch` come after the YAML, flags of the script after the script. Partition,
# account and modules belong in sbatch/site.sh. A job that is interrupted queues itself again and
# continues in the same log.
#SBATCH --job-name=1node
#SBATCH --nodes=1
#SBATCH --gres=gpu:2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
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
