#!/bin/bash
# Is the cluster fit? Hosts, GPUs, versions, and how fast the nodes talk, in a minute or two:
#   sbatch sbatch/check.sh
# sbatch's options choose other shapes, as for 2node.sh. To prove on one node what `make test-gpu`
# proves, or some groups of it, which `python sbatch/check_gpu.py --help` lists:
#   sbatch --nodes=1 --gres=gpu:2 --time=40 sbatch/check.sh --full
#   sbatch --nodes=1 --gres=gpu:2 --time=20 sbatch/check.sh --full --only fp32 link
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
if [ "${1:-}" = --full ]; then
    source sbatch/common.sh
    load_site
    exec python sbatch/check_gpu.py "${@:2}"
fi
RECORD=check.json exec bash sbatch/launch.sh accelerate_configs/ddp.yaml sbatch/check.py "$@"
