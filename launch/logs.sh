# Prints a log of a run. Set before: RUN_DIR, ATTEMPT (empty: the newest), FILE, and options of tail as $1, ...
cd "$RUN_DIR/" && [ -d attempts ] || { echo 'no attempt has started' >&2; exit 1; }
cd "attempts/${ATTEMPT:-$(ls -1tr attempts 2>/dev/null | tail -1)}" || exit 1
[ -f "$FILE" ] || { echo "$FILE does not exist (yet); files in $PWD:" $(ls) >&2; exit 1; }
exec tail "$@" "$FILE"
