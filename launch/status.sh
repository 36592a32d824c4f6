# Prints the status of a run from its cluster and its directory. Set before: RUN_DIR, KIND, NAMES (of its jobs).
cd "$RUN_DIR" 2>/dev/null || true
echo '@queue'
[ "$KIND" = slurm ] && timeout 20 squeue -h --me -n "$NAMES" -o '%i|%T|%M|%l|%D|%R'
echo '@accounting'
[ "$KIND" = slurm ] && timeout 20 sacct -nXP -S now-30days --name "$NAMES" -o JobID,State,Elapsed,End | tail -1
for attempt in $(ls -1tr attempts 2>/dev/null); do
    echo "@attempt $attempt"
    cat attempts/$attempt/outcome.json 2>/dev/null
    echo
    cat attempts/$attempt/head.json 2>/dev/null
done
echo '@metrics'
tail -n 1 metrics.jsonl 2>/dev/null
true
