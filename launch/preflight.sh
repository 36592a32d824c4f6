# Checks of the submitting machine for preflight.py. Set before: SHARED, PYTHON, ENGINE_PYTHON
# (empty: not checked), and the paths that must exist as $1, ...
show() { echo "@$1"; shift; timeout 20 "$@" 2>&1; }
slurm=$(command -v sbatch)
echo "@sbatch"; echo "$slurm"
if [ -n "$slurm" ]; then
    show partitions sinfo -h -o '%R|%a|%l|%D|%G|%c|%m|%f'
    show accounts sacctmgr -nP show assoc user="$(id -un)" format=account,qos
    show pyxis sh -c 'srun --help 2>&1 | grep -c -- --container-image'
fi
echo "@shared_dir"
{ mkdir -p "$SHARED" && touch "$SHARED/.gptoss-preflight" && rm "$SHARED/.gptoss-preflight"; } 2>&1
echo "@free"; df -Pk "$SHARED" 2>/dev/null | awk 'NR == 2 {print $4}'
echo "@python"; command -v "$PYTHON"
echo "@engine"
if [ -z "$ENGINE_PYTHON" ]; then :
elif ! command -v "$ENGINE_PYTHON" >/dev/null; then echo missing
elif timeout 20 "$ENGINE_PYTHON" -c 'import importlib.util as i, sys; sys.exit(i.find_spec("sglang") is None)' 2>/dev/null
then echo ready
else echo "no sglang"
fi
echo "@absent"; for path; do [ -r "$path" ] || echo "$path"; done
true
