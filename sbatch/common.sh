# shellcheck shell=bash disable=SC1091,SC2034
# What launch.sh and sweep.sh share.

fail() {
    echo "error: $*" >&2
    exit 1
}

load_site() { # a function, as conda would take the arguments of the script for its own
    unset MASTER_ADDR # of your shell: site.sh may set another
    # If you type sbatch in the shell of a job, your job gets these from it, and srun obeys them.
    unset "${!SLURM_CPU_BIND@}" SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE
    SRUN_OPTIONS=()
    set +u # what modules and conda read is not always set
    source sbatch/site.sh || fail "sbatch/site.sh ended with an error"
    set -u
    # Only the launcher gets it. With it, a baseline would think that it is one of several ranks.
    export -n MASTER_ADDR
}
