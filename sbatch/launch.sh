#!/bin/bash
# What the wrappers run on the first node of a job. It checks what was asked for, launches
# `accelerate` once on every node, and lets an interrupted run continue. Read it from top to bottom.
#
#   launch.sh [YAML [flags of accelerate launch]] [SCRIPT.py] [flags of the script]
# The YAML can be the name of a strategy, such as fsdp.
set -uo pipefail

{ # bash reads all of it before it starts, so editing this file does not change running jobs

source sbatch/common.sh

# -------------------------------------------------------------------------------------- what to run

[ -n "${SLURM_JOB_ID:-}" ] || fail "this runs inside a Slurm job: sbatch sbatch/2node.sh"
warned='' stopped=''
trap 'warned=${warned:-$SECONDS}' USR1 USR2 # the time is nearly over
trap 'stopped=1' TERM                       # scancel, preemption, requeue: Slurm ends the job
load_site
RECORD=${RECORD:-run.json} # in the output directory; says "completed" or "failed"

config=accelerate_configs/ddp.yaml script=train_bert_squad.py launcher_flags=()
case ${1:-} in
    *.yaml | *.yml) config=$1 && shift ;;
    '' | -* | *.py) ;;
    *) config=accelerate_configs/$1.yaml && shift ;; # the name of a strategy
esac
words=()
while [[ $# -gt 0 && $1 != *.py ]]; do words+=("$1") && shift; done
[[ ${words[0]:--} == -* ]] || fail "'${words[0]}' is neither a flag nor a script (.py)"
if [ $# -gt 0 ]; then
    script=$1 launcher_flags=("${words[@]}")
    shift # what is left are the script's flags
else
    set -- "${words[@]}"
fi
[ -f "$config" ] ||
    fail "no YAML $config (and a script ends in .py): $(echo accelerate_configs/*.yaml)"
[ -f "$script" ] || fail "no script $script in $PWD"
settings=$(<"$config")
! grep "^gpu_ids" <<<"$settings" | grep -qv all ||
    fail "$config has gpu_ids, but Slurm says which GPUs are yours: leave it out"
for flag in "${launcher_flags[@]}"; do
    case ${flag//-/_} in
        __num_processes* | __num_machines* | __machine_rank* | __main_process_* | \
            __config_file* | __gpu_ids*)
            fail "${flag%%=*} comes from what Slurm granted:" \
                "ask sbatch for it, with --nodes and --gres" ;;
        __gradient_accumulation_steps*) # accelerate hands it to DeepSpeed's ranks only
            grep -Eq "^distributed_type: *['\"]?DEEPSPEED" <<<"$settings" ||
                fail "${flag%%=*} has no effect before the script under $config: write it after" ;;
    esac
done

# Each job has its own output directory, so it finds its checkpoints when it runs again.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
own=runs/$(basename "$script" .py)-$(basename "${config%.*}")-$job previous=''
set -- --output_dir "$own" "$@" # one of yours comes later, and the last one counts
for word in "$@"; do
    case $word in --output_dir=*) output=${word#*=} ;; esac
    [ "$previous" != --output_dir ] || output=$word
    previous=$word
done
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || [ "$output" = "$own" ] ||
    fail "the tasks of an array would share --output_dir $output"
# As the scripts expand it.
home=$(grep -Eo '^~[a-zA-Z0-9._-]*' <<<"$output") && output=$(eval "echo $home")${output#"$home"}
mkdir -p "$output" || fail "cannot make the output directory $output"

# --------------------------------------------------------------------------------- what was granted

nodes=$SLURM_JOB_NUM_NODES
cores=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}} # of the one task on each node
# One task per node. Each is a launcher, which starts this node's ranks.
on_each_node=(srun "--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1 "--cpus-per-task=$cores"
    --export=ALL)
# A step has the GPUs that were asked for. This shell has all of its node, if that is exclusive.
# Each node looks for a file that this shell makes. On a network disk, it may appear late.
export PROOF=$output/.job-$job DISK_TIMEOUT=${DISK_TIMEOUT:-60} NODES_TIMEOUT=${NODES_TIMEOUT:-600}
touch "$PROOF" || fail "cannot write into $output"
# shellcheck disable=SC2016
seen=$(timeout "$NODES_TIMEOUT" "${on_each_node[@]}" --label "${SRUN_OPTIONS[@]}" bash -c '
    gpus=${SLURM_GPUS_ON_NODE:-0} visible=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")
    launcher=$(command -v accelerate-launch)
    echo "$SLURMD_NODENAME: $gpus GPU(s), $SLURM_CPUS_ON_NODE core(s), ${launcher:-no accelerate}"
    [ "$gpus" != 0 ] || [ "$visible" = 0 ] || [ -n "${PROCESSES_PER_NODE:-}" ] ||
        echo "warning: $SLURMD_NODENAME has $visible GPU(s), of which Slurm granted none, so one" \
            "process starts: ask for --gres=gpu:N, or set PROCESSES_PER_NODE"
    [ -n "$launcher" ] || echo "error: $SLURMD_NODENAME finds no accelerate:" \
        "make setup, or activate in sbatch/site.sh what has it, on a disk of all nodes"
    until [ -e "$PROOF" ] || [ "$SECONDS" -ge "$DISK_TIMEOUT" ]; do sleep 1; done
    [ -e "$PROOF" ] || echo "error: $SLURMD_NODENAME does not see what the first node writes into" \
        "${PROOF%/*}: choose an --output_dir on a disk of all nodes"' 2>&1)
code=$?
rm -f "$PROOF"
seen=$(sort -n <<<"$seen")
echo "$seen"
[ $code != 124 ] || fail "not every node answered within $NODES_TIMEOUT s, the NODES_TIMEOUT"
[ $code = 0 ] || fail "srun does not reach all nodes, or Slurm granted other GPUs than were asked" \
    "for: ask with --gres=gpu:N, which the wrapper has, not with --gpus-per-node or -task"
# Behind the number of a node. Slurm itself may say "0: slurmstepd-n1: error: ..." and go on.
[[ ! $seen =~ (^|$'\n')\ *[0-9]+:\ error:\ ([^$'\n']*) ]] || fail "${BASH_REMATCH[2]}"
read -r first gpus < <(sed -n 's/^ *0: \(.*\): \([0-9]*\) GPU(s), .*/\1 \2/p' <<<"$seen")
[ "$(grep -c ": $gpus GPU(s), " <<<"$seen")" = "$nodes" ] ||
    fail "not every node was granted $gpus GPU(s), like $first:" \
        "ask for the same on each, with --gres=gpu:N"
per_node=$gpus
[ "$gpus" -gt 0 ] || per_node=${PROCESSES_PER_NODE:-1}
[[ $per_node =~ ^[1-9][0-9]*$ ]] ||
    fail "PROCESSES_PER_NODE must be a positive number, got '$per_node'"
if grep -Eq "^distributed_type: *['\"]?NO" <<<"$settings"; then # baseline or DP: one process
    [ "$nodes" = 1 ] || fail "$config is one process on one node, but the job has $nodes nodes:" \
        "use sbatch/1node.sh for it, or accelerate_configs/ddp.yaml on several nodes"
    per_node=1
    [ "$gpus" -lt 2 ] || grep -q data_parallel <<<"$settings" ||
        echo "warning: $config uses one of $gpus GPUs: ask for one, with --gres=gpu:1"
elif [ "$gpus" -gt 0 ] && [ $((cores / gpus)) -lt 4 ]; then
    echo "warning: $cores core(s) for $gpus GPU(s), where the wrappers ask for 4 each: times do" \
        "not compare; ask for as many, with --cpus-per-task=$((4 * gpus))"
fi
# Rank 0 of a run holds this lock. Ranks of an earlier attempt may still be saving, so a job that is
# queued again waits here.
taken="another run is writing into $output"
locked() { # a file system without locks gives another exit code
    flock "$@" --conflict-exit-code 75 "$output/.lock" true
    [ $? = 75 ]
}
! locked --wait "$DISK_TIMEOUT" || fail "$taken: wait for it, or choose another --output_dir"

# ---------------------------------------------------------------------------------- the launch line

# Each job has a port of its own (array tasks have job ids of their own). It is below the ports that
# the kernel hands out.
port=$((10000 + SLURM_JOB_ID % 20000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done # in use
# Static rendezvous: Slurm numbers the nodes, so rank 0 is on the node whose address is known (c10d
# would number the nodes as they come). No node joins or leaves: if one is lost, the whole job is
# queued again.
line=(--config_file "$config" --num_machines "$nodes" --num_processes $((nodes * per_node))
    --rdzv_backend static --rdzv_conf timeout=300 --main_process_ip "${MASTER_ADDR:-$first}"
    --main_process_port "$port" --deepspeed_multinode_launcher standard)
# Hybrid sharding, as HSDP: shards inside a node, whose links are fast, and a replica on each node.
if grep -q '^parallelism_config:' <<<"$settings"; then
    [ "$per_node" != 1 ] || fail "$config shards the model inside a node, which has one process" \
        "here: ask for several GPUs per node, or use accelerate_configs/fsdp.yaml"
    line+=(--parallelism_config_dp_replicate_size "$nodes"
        --parallelism_config_dp_shard_size "$per_node")
fi
line+=("${launcher_flags[@]}" "$script" --resume "$@")

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > per_node ? cores / per_node : 1))}
# When C++ ends a rank, as NCCL does after a timeout, Python says where its threads stood, and torch
# writes the rank's last collectives to ~/.cache/torch/comm_lib_trace_rank_*.
export PYTHONFAULTHANDLER=${PYTHONFAULTHANDLER-1} TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT-1}
# When one node's launcher has failed, the others are ended at once; when it is done, they get 20 s.
run=("${on_each_node[@]}" --kill-on-bad-exit=1 --wait=20 "${SRUN_OPTIONS[@]}")
echo "job $SLURM_JOB_ID${SLURM_RESTART_COUNT:+ (restart $SLURM_RESTART_COUNT)}:" \
    "$script with $config, $nodes node(s) x $per_node process(es), $(date '+%F %T')"
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS; on each node, with the machine_rank of its own:"
printf '%q ' "${run[@]}" accelerate-launch --machine_rank 0 "${line[@]}"
echo

# --------------------------------------------------------------- run, and continue when interrupted

checkpoint() { # the newest; without any, the pattern itself
    local all=("$output"/checkpoints/step_[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9])
    basename "${all[-1]}"
}
status_is() { grep -q "\"status\": \"$1\"" "$output/$RECORD" 2>/dev/null; }
record() { stat -c %Y.%i "$output/$RECORD" 2>/dev/null; }

before=$(checkpoint) record_before=$(record) left=''
export FIRST_NODE_ENDED=$output/.ended
rm -f "$FIRST_NODE_ENDED"
"${run[@]}" bash sbatch/node.sh "${line[@]}" &
srun=$! code=unknown
while kill -0 "$srun" 2>/dev/null; do
    [ ! -e "$FIRST_NODE_ENDED" ] || left=${left:-$SECONDS}
    # Again and again, because a rank that is just starting does not listen yet.
    if [ -n "$warned" ]; then kill -USR1 "$srun"; fi
    # srun waits for ever for a node that it cannot reach, and a rank may be too busy to stop.
    [ $((SECONDS - ${left:-$SECONDS})) -lt 30 ] || break
    [ $((SECONDS - ${warned:-$SECONDS})) -lt 90 ] || break
    sleep 3 &
    wait -n "$srun" $! # a signal ends this, but not srun
done
kill -0 "$srun" 2>/dev/null || { wait "$srun"; code=$?; }
rm -f "$FIRST_NODE_ENDED"

echo "end: $(date '+%F %T'), $SECONDS s, srun's exit code $code"
[ "$(record)" != "$record_before" ] && new=1 || new=''
[[ $code = 0 || $code = unknown ]] || ! locked --nonblock || fail "$taken, so not queued again"
if status_is completed && { [ "$code" = 0 ] || [ -n "$new" ]; }; then
    for dropped in ${DROP_WHEN_COMPLETED:-}; do rm -rf "${output:?}/$dropped"; done
    exit 0
fi
if status_is failed && [ -n "$new" ]; then
    fail "the run broke down, so not queued again; see above"
fi
advice="the same sbatch with --output_dir $output continues where it stopped"
[ -z "$stopped" ] || fail "ended by Slurm; if it does not run again by itself, $advice"
# The job is queued again only if it got further. A job that always fails would never end.
[ "$(checkpoint)" != "$before" ] ||
    fail "not completed, and without a new checkpoint, so not queued again; see above"
echo "not completed, but saved as far as $(checkpoint): queued again"
scontrol requeue "$job" || fail "Slurm does not queue this job again: $advice"
exit
}
