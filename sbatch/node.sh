#!/bin/bash
# What srun runs once on every node of a job, with the flags of `accelerate launch`. The ranks of
# this node are the children of the launcher.

{ # bash reads all of it before it starts, so editing this file does not change running jobs

# On most clusters Slurm signals this shell and nothing below it. So it passes the signal on to the
# ranks, which stop for USR1 and TERM. A site's USR2 becomes USR1. The launcher has to ignore all
# three, or it would die and take the ranks with it.
trap "" USR1 USR2 TERM
accelerate-launch --machine_rank "$SLURM_NODEID" "$@" &
launcher=$!
# shellcheck disable=SC2329 # the traps call it
pass_on() { # without pkill, which a container may lack
    read -ra ranks <"/proc/$launcher/task/$launcher/children"
    kill "-$1" "${ranks[@]}"
} 2>/dev/null
trap 'pass_on USR1' USR1 USR2
trap 'pass_on TERM' TERM
while kill -0 $launcher 2>/dev/null; do wait $launcher; done # a signal ends `wait`
wait $launcher
code=$?
[ "$SLURM_NODEID" != 0 ] || touch "$FIRST_NODE_ENDED"
exit $code
}
