#!/bin/bash
# Exercise 7 of the lab as a Slurm job: two nodes, and a launcher on each. From the project's root:
#   sbatch sbatch/simple.sh --output_dir runs/lab/two-nodes
# It needs no other file of sbatch/. Put your own script and YAML into its last lines.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
# For GPUs, add a line such as "#SBATCH --gpus-per-node=4". PROCESSES follows.

# Slurm runs this file once, on the first node, in the folder where you typed sbatch.
export PATH=$PWD/.venv/bin:$PATH
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # where all ranks meet
PORT=$((10000 + SLURM_JOB_ID % 20000))                             # each job has its own
PROCESSES=$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-1}))             # of all nodes together
export FIRST PORT PROCESSES
# srun runs the quoted lines once on each node. If one launcher fails, srun ends the others. Because
# of the single quotes, the nodes fill in the variables: each has its own SLURM_NODEID (0, 1, ...).
# The words after the quotes pass on the flags that you typed after simple.sh.
# shellcheck disable=SC2016
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c '
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes $PROCESSES \
        --num_machines $SLURM_NNODES --machine_rank $SLURM_NODEID --main_process_ip $FIRST \
        --main_process_port $PORT train_mnist_rnn.py --dataset digits --num_epochs 30 \
        --dropout 0 --per_device_train_batch_size 32 "$@"' bash "$@"
