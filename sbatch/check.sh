#!/bin/bash
# Is the cluster ready? Hosts, GPUs, and how fast the nodes talk, in a minute or two:
#   sbatch sbatch/check.sh
# sbatch's options choose other shapes, as for 2node.sh.
#SBATCH --job-name=check
#SBATCH --nodes=2
#SBATCH --gres=gpu:1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:05:00
#SBATCH --open-mode=append

cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
[ -f sbatch/launch.sh ] ||
    { echo "error: no sbatch/launch.sh in $PWD: submit from the project's root" >&2 && exit 1; }
RECORD=check.json exec bash sbatch/launch.sh accelerate_configs/ddp.yaml tools/check.py "$@"
