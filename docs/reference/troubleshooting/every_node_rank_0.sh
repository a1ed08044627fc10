#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
# Every node thinks it is the first: $SLURM_NODEID has its value in what srun starts, and is 0 in
# this shell.
#   sbatch docs/reference/troubleshooting/every_node_rank_0.sh [--fix]
line="--config_file accelerate_configs/ddp.yaml --num_machines 2 --num_processes 2
    --rdzv_backend static
    --main_process_ip $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    --main_process_port $((10000 + SLURM_JOB_ID % 20000)) --rdzv_conf timeout=10
    docs/reference/troubleshooting/alone.py --fix"
if [ "${1:-}" = --fix ]; then # single quotes: expanded on each node
    srun --label --kill-on-bad-exit=1 bash -c 'echo "machine_rank $SLURM_NODEID on $(hostname)"
        accelerate launch --machine_rank $SLURM_NODEID $0' "$line"
else # double quotes: expanded here, once
    srun --label --kill-on-bad-exit=1 bash -c "echo \"machine_rank $SLURM_NODEID on \$(hostname)\"
        accelerate launch --machine_rank $SLURM_NODEID \$0" "$line"
fi
