# Shared by the scripts beside it, sourced, never run: their help, where the project is, how to speak, how to run pip quietly.
# shellcheck shell=bash

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

# The comment at the top of a script is its help.
case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
esac

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# One line that says what is wrong and how to mend it, and the exit status for a wrong environment.
fail() {
    say "$@"
    exit 78
}

no_arguments() {
    if [ $# -gt 0 ]; then
        say "takes no arguments, and got: $*; --help says what it does"
        exit 2
    fi
}

# Run the command (a pip) in silence; if it fails, say why: one line when the index cannot be reached, else the end
# of pip's own words, without its remarks on configured locations that do not exist on this machine.
quiet_pip() {
    local output
    if output=$(PIP_ROOT_USER_ACTION=ignore "$@" 2>&1); then
        return 0
    fi
    if grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Network is unreachable|from versions: none' <<<"$output"; then
        fail "the package index cannot be reached, or has not what is needed: check the network or pip's configuration (pip config list), then run this again"
    fi
    grep -vE '^WARNING: Location .* is ignored|^Looking in |^ *$' <<<"$output" | tail -n 15 >&2 || true
    fail "pip failed; its last words are above"
}

# Print the first usable Python of the names given, or say on standard error what was found instead and fail.
# `wanted` is a Python expression over v = sys.version_info[:2]; `words` says the same to a person.
find_python() {
    local wanted=$1 words=$2 name found=() version
    shift 2
    for name in "$@"; do
        version=$("$name" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
        if ! "$name" -c "import sys; v = sys.version_info[:2]; sys.exit(not ($wanted))"; then
            found+=("$name is $version")
        elif ! "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            found+=("$name is $version but has no venv module (Debian and Ubuntu: apt-get install python3-venv)")
        else
            command -v "$name"
            return 0
        fi
    done
    [ ${#found[@]} -gt 0 ] || found=("no Python at all")
    say "this needs $words; found: $(printf '%s; ' "${found[@]}" | sed 's/; $//')"
    return 1
}
