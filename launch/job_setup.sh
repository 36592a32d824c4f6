# Runs in the batch script, outside of any container, before the node programs start. The head node writes its decision
# about another attempt to a file. Slurm's commands are only certain to exist here.
export GPTOSS_ATTEMPT=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export GPTOSS_NODES=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}" | paste -sd,)
if [ -n "${SLURM_JOB_NODELIST_HET_GROUP_1:-}" ]; then
    GPTOSS_NODES+=,$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1" | paste -sd,)
fi
after_attempt() {
    CODE=$? REQUEUE=0 EXCLUDE=
    set +evx
    trap '' TERM  # a requeue ends this script too, and the exclusion comes after it
    decision=$GPTOSS_RUN_DIR/attempts/$GPTOSS_ATTEMPT/decision.sh
    [ -f "$decision" ] && . "$decision"
    if [ "$REQUEUE" = 1 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T | head -1)" = RUNNING ]; then
        echo "requeue of job $SLURM_JOB_ID${EXCLUDE:+ without $EXCLUDE}"
        scontrol requeue "$SLURM_JOB_ID"
        [ -z "$EXCLUDE" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$EXCLUDE"
    fi
    exit "$CODE"
}
trap after_attempt EXIT
