# A log of a run. Set before it: RUN_DIR, ATTEMPT (empty: the newest), FILE, and tail's options as $1, ...
cd "$RUN_DIR/" && [ -d attempts ] || { echo 'no attempt has begun' >&2; exit 1; }
cd "attempts/${ATTEMPT:-$(ls -1tr attempts 2>/dev/null | tail -1)}" || exit 1
[ -f "$FILE" ] || { echo "$FILE is not there (yet); in $PWD:" $(ls) >&2; exit 1; }
exec tail "$@" "$FILE"
