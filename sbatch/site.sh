# shellcheck shell=bash disable=SC1091,SC2034
# What this cluster needs. It is the one file to edit. Every job reads it on its first node before
# anything starts, and sweep.sh reads it where you type. But sbatch reads SBATCH_ variables from
# your shell only. If you set some here, type this once per session:
#     source sbatch/site.sh

# Where jobs go, and who pays; anything that sbatch has an SBATCH_ variable for (man sbatch).
# export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=my_project
# export SBATCH_TIMELIMIT=02:00:00 SBATCH_MEM_PER_NODE=64G

# Software. After these lines `accelerate` has to be on the PATH. If it is not, .venv is taken.
# With conda, or in a container, packages in ~/.local would come before its own.
# module load cuda/13.0
# source ~/miniconda3/bin/activate my_environment
# export PYTHONNOUSERSITE=1
command -v accelerate-launch >/dev/null || [ ! -f .venv/bin/activate ] || source .venv/bin/activate
# Modules may set PYTHONPATH. What it names comes before the packages of a venv.
[ -z "${VIRTUAL_ENV:-}" ] || unset PYTHONPATH

# More options of srun, and a program that starts the ranks, such as a container's.
# SRUN_OPTIONS=(--cpu-bind=cores)
# SRUN_OPTIONS=(apptainer exec --nv ~/torch.sif)
# SRUN_OPTIONS=(--container-image="$HOME/torch.sqsh" --container-mounts="$HOME,$PWD"
#     --container-workdir="$PWD")

# The network of the ranks, if they do not find each other: a name that `ip address` shows. If the
# nodes have another name on the fast network, name the first one so, without `export`.
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=ib0
# export NCCL_DEBUG=INFO
# MASTER_ADDR=$(hostname -s)-ib0

# Seconds that a job waits for all of its nodes (default: 600), and for a network disk that shows
# files late, or for an earlier attempt that still saves (default: 60).
# export NODES_TIMEOUT=1200 DISK_TIMEOUT=120

# Models and data: a folder with space that all nodes see. If compute nodes have no network, set
# HF_HUB_OFFLINE, and prepare the data on a login node:
#     source sbatch/site.sh; python train_bert_squad.py --prepare_data_only
# export HF_HOME=/scratch/$USER/huggingface
# if [ -n "${SLURM_JOB_ID:-}" ]; then export HF_HUB_OFFLINE=1; fi

# Processes on each node of a job without GPUs, such as one on a CPU partition (default: 1).
# What stands before sbatch counts more, and so do the shapes of a sweep.
# export PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-2}

# What sweep.sh asks for on each node: gpu, gpu:a100 and the like, or none for a CPU partition.
# export SWEEP_GRES=gpu:a100
