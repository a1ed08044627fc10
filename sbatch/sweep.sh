#!/bin/bash
# Measure strategies x node shapes x repeats, and report. Run this from the project's root, without
# sbatch:
#   sbatch/sweep.sh --dry_run
#       lists the jobs and the GPU-hours that they may take, and submits nothing
#   sbatch/sweep.sh --yes train_bert_squad.py --num_epochs 2
#       prints their sum, and submits the jobs, and a last job that makes the report
#   sbatch/sweep.sh --local train_mnist_rnn.py --dataset digits
#       runs them here without Slurm, one after the other
# Options, before the script (default: train_bert_squad.py with its defaults):
#   --strategies "ddp fsdp"   default "baseline dp ddp fsdp hsdp zero2 zero3"; a baseline is one
#                             device, DP is several GPUs of one node, HSDP 2 x 2 devices or more
#   --shapes "1x2 2x1"        nodes x GPUs per node; default "1x1 1x2 2x1 2x2", with --local
#                             "1x1 1x2". 1x1 is each strategy on one device: what it costs alone
#   --repeats N               of each cell of the matrix; default 2. A report should have 5
#   --minutes N               time limit of each job; default 60
#   --yes                     submit also more than 20 GPU-hours
#   --global_batch_size N     the same for all shapes (strong scaling); without it, the batch per
#                             device is the same
#   --output_dir DIR          default a fresh folder under runs/; each run gets a folder in it
# Jobs run one after the other, as they would slow each other down on nodes that they share. Repeats
# take turns, as a machine may be slow for a while. A completed run drops its checkpoints and best/;
# only the first repeat keeps its weights.
# Where jobs go and what they ask for comes from sbatch/site.sh.
set -uo pipefail

{ # bash reads all of it before it starts, so editing this file does not change a running sweep

[ -f sbatch/common.sh ] ||
    { echo "error: run this from the project's root, as sbatch/sweep.sh" >&2 && exit 1; }
source sbatch/common.sh
load_site
strategies="baseline dp ddp fsdp hsdp zero2 zero3" shapes='' repeats=2 minutes=60
global_batch_size='' dry_run='' local='' yes=''
output_dir=runs/sweep-$(date +%Y%m%d-%H%M%S)-$$
while [ $# -gt 0 ]; do
    case $1 in
        --dry_run | --local | --yes) printf -v "${1#--}" 1 ;;
        --help | -h) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit ;;
        --strategies | --shapes | --repeats | --minutes | --global_batch_size | --output_dir)
            [ $# -gt 1 ] || fail "$1 needs a value"
            printf -v "${1#--}" %s "$2" && shift ;;
        *) break ;;
    esac
    shift
done
script=${1:-train_bert_squad.py}
[ $# = 0 ] || shift # what is left are the script's flags
[ -f "$script" ] || fail "no script or option $script (--help lists the options)"
[[ $repeats,$minutes =~ ^[1-9][0-9]*,[1-9][0-9]*$ ]] ||
    fail "--repeats and --minutes must be positive numbers"
[ ! -e "$output_dir/sweep.csv" ] || fail "$output_dir has a sweep: choose another --output_dir"
gres=${SWEEP_GRES:-gpu} unit=GPU here=2 # or the GPUs of this machine
[ "$gres" != none ] || unit=core here=0
[ -z "$local" ] ||
    here=$(python -c "import torch; print(torch.cuda.device_count())" 2>/dev/null || echo 0)
# With a fixed global batch, one device has another batch than each of several.
one=1x1 several="1x2 2x1 2x2"
[ -z "$global_batch_size" ] || one=''
[ -z "$local" ] || several=1x2
[ "$here" != 1 ] || several=''
shapes=${shapes:-$one $several}

# ------------------------------------------------------------------ the matrix: a line for each run

cells=() gpu_minutes=0
for repeat in $(seq "$repeats"); do for strategy in $strategies; do
    yaml=accelerate_configs/$strategy.yaml
    [ -f "$yaml" ] || fail "no strategy $strategy: no $yaml"
    for shape in $([ "$strategy" = baseline ] && echo 1x1 || echo "$shapes"); do
        [[ $shape =~ ^([1-9][0-9]*)x([1-9][0-9]*)$ ]] ||
            fail "a shape is NODESxGPUS, such as 2x1; got $shape"
        nodes=${BASH_REMATCH[1]} gpus=${BASH_REMATCH[2]}
        [ "$strategy" != dp ] || { [ "$nodes" = 1 ] && [ "$gpus" != 1 ] && [ "$here" -gt 1 ]; } ||
            continue # it is a matter of several GPUs
        { [ "$nodes" != 1 ] && [ "$gpus" != 1 ]; } || ! grep -q ^parallelism_config: "$yaml" ||
            continue # HSDP
        [ -z "$local" ] || [ "$nodes" = 1 ] || fail "--local is one node, but a shape is $shape"
        [ -z "$global_batch_size" ] || [ $((global_batch_size % (nodes * gpus))) = 0 ] ||
            fail "--global_batch_size $global_batch_size does not divide by" \
                "the $((nodes * gpus)) devices of $shape"
        cells+=("$strategy-${nodes}x$gpus-r$repeat,$strategy,$nodes,$gpus,$repeat")
        gpu_minutes=$((gpu_minutes + nodes * gpus * minutes))
    done
done; done
[ ${#cells[@]} -gt 0 ] || fail "none of the strategies '$strategies' runs on the shapes '$shapes'"
hours=$((gpu_minutes / 60)).$((gpu_minutes % 60 * 10 / 60))
sum="$((${#cells[@]} + 1)) jobs, at most $hours $unit-hours" # one job makes the report
if [ -n "$dry_run" ]; then
    printf '%s\n' "${cells[@]%%,*}" # names, such as ddp-1x2-r1
    echo "${#cells[@]} runs of $script $*"
fi
[ -n "$local" ] || echo "$sum, if every job took all its time"
[ -z "$dry_run" ] || exit 0

# ------------------------------------------------------------------------------------------- run it

if [ -n "$local" ]; then
    command -v accelerate-launch >/dev/null || fail "no accelerate on the PATH: make setup"
else
    command -v sbatch >/dev/null ||
        fail "no sbatch on the PATH: type this on the cluster, or use --local"
    [ -n "$yes" ] || [ $unit != GPU ] || [ $gpu_minutes -le $((20 * 60)) ] ||
        fail "$sum: add --yes, or lower --repeats, --minutes or --shapes"
fi
# The plan, so that the report also shows what is missing.
plan=$output_dir/sweep.csv report=(python tools/report.py "$output_dir")
mkdir -p "$output_dir" && echo "run,strategy,nodes,gpus_per_node,repeat,job" >"$plan" || exit 1
[ -z "$local" ] || printf '%s,\n' "${cells[@]}" >>"$plan"
# A site may set SBATCH_EXPORT=NONE, but a job needs the variables in front of its `sbatch`. No job
# is queued again: the time of a resumed run is not comparable, and would cost extra. In names of
# logs, Slurm fills in what follows a %.
submit=(sbatch --parsable --export=ALL --no-requeue) logs=${output_dir//%/%%}
last='' failed=0
for cell in "${cells[@]}"; do
    IFS=, read -r run strategy nodes gpus repeat <<<"$cell"
    yaml=accelerate_configs/$strategy.yaml flags=("$@" --output_dir "$output_dir/$run")
    [ -z "$global_batch_size" ] ||
        flags+=(--per_device_train_batch_size $((global_batch_size / nodes / gpus)))
    drop="checkpoints best"
    [ "$repeat" = 1 ] || drop+=" model.safetensors"
    if [ -n "$local" ]; then
        log=$output_dir/$run.log
        echo "$(date +%T) $run; its output goes to $log"
        # One thread per device, whatever your shell says: with more, several processes might share
        # cores that a baseline has for itself.
        environment=(OMP_NUM_THREADS=1) processes=$gpus
        if [ "$strategy" = dp ]; then # one process, which uses all GPUs that it sees
            seen=${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $((gpus - 1)))}
            environment+=(CUDA_VISIBLE_DEVICES="$(cut -d , -f "1-$gpus" <<<"$seen")") processes=1
        fi
        if env "${environment[@]}" accelerate-launch --config_file "$yaml" --main_process_port 0 \
            --num_processes "$processes" "$script" "${flags[@]}" >"$log" 2>&1; then
            for dropped in $drop; do rm -rf "${output_dir:?}/$run/$dropped"; done
        else
            failed=1
            echo "$run failed: $(grep '^error:' "$log" || echo "see $log")"
        fi
    else
        ask=(--gres="$gres:$gpus" --cpus-per-task=$((4 * gpus))) # as many cores per device on each
        # Two threads of one core are not two devices.
        [ "$gres" != none ] || ask=(--gres=none --cpus-per-task="$gpus" --threads-per-core=1)
        # afterany: also after a job that failed
        job=$(PROCESSES_PER_NODE=$gpus DROP_WHEN_COMPLETED="$drop" "${submit[@]}" "${ask[@]}" \
            --nodes="$nodes" --time="$minutes" ${last:+"--dependency=afterany:$last"} \
            --job-name="$run" --output="$logs/$run.log" \
            sbatch/1node.sh "$yaml" "$script" "${flags[@]}") || job=refused
        job=${job%%;*} # a cluster's name may follow
        [ "$job" = refused ] || last=$job
        echo "$run: job $job"
        echo "$cell,$job" >>"$plan"
    fi
done
if [ -n "$local" ]; then
    "${report[@]}" >"$output_dir/report.log" || exit 1
    tail -n 1 "$output_dir/report.log"
    exit $failed
fi
[ -n "$last" ] || fail "Slurm took none of the jobs; see above"
"${submit[@]}" --dependency="afterany:$last" --job-name=report \
    --nodes=1 --time=10 --output="$logs/report.log" >/dev/null <<REPORT ||
#!/bin/bash
source sbatch/common.sh
load_site
srun --ntasks=1 "\${SRUN_OPTIONS[@]}" $(printf '%q ' "${report[@]}")
REPORT
    fail "no job for the report; when all are done: ${report[*]}"
echo "the last job writes $output_dir/report.md; squeue --me shows how far they are. It asks for" \
    "no GPU. Where Slurm runs no such job, type this when the others are done: ${report[*]}"
exit
}
