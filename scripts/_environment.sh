# Sourced by the scripts beside it, with $root set: one way to get a working .venv, to say what a
# script is for, and how long a part of it took.
#
# A stamp in .venv says for which pyproject.toml, place and extras it was made, so that a second
# run starts at once. Making it is left to _environment.py, under a lock.

# Prints a Python >= 3.11 that can make virtual environments; the usual one first.
find_python() {
    local name
    for name in python3 python3.12 python3.11 python3.13 python; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "loomserve needs Python 3.11 or newer with the venv module" \
        "(on Debian and Ubuntu: apt install python3-venv)" >&2
    return 1
}

# ensure_environment serve|test: with what serving needs, or with the test tools as well.
ensure_environment() {
    local extras=$1 wanted python
    wanted="$root $(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | cksum)"
    if [[ -x $root/.venv/bin/python && "$(cat "$root/.venv/.loomserve-$extras" 2>/dev/null)" == "$wanted" ]]; then
        return
    fi
    python=$(find_python)
    "$python" "$root/scripts/_environment.py" "$extras" "$wanted"
}

# What the tests of pages look through, and what compiles and runs the kernels of 64-bit Arm, where
# they can be had without asking anybody; the tests say what is missing otherwise.
ensure_tools() {
    command -v chromium chromium-browser google-chrome >/dev/null || install_quietly chromium
    command -v aarch64-linux-gnu-g++ >/dev/null || install_quietly g++-aarch64-linux-gnu
    command -v qemu-aarch64 >/dev/null || install_quietly qemu-user
}

# install_quietly PACKAGE: as root on Debian; nothing elsewhere.
install_quietly() {
    [[ $EUID == 0 ]] && command -v apt-get >/dev/null || return 0
    echo "loomserve: installing $1 for the tests" >&2
    apt-get install -qq -y --no-install-recommends "$1" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends "$1"; } >/dev/null ||
        echo "loomserve: $1 could not be installed" >&2
}

# The comment at the head of the script that runs.
usage() {
    sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0"
}

# phase NAME COMMAND...: runs the command between two lines that name it and its seconds.
phase() {
    local name=$1 begin=$SECONDS
    shift
    echo "== $name"
    "$@"
    echo "== $name: $((SECONDS - begin)) s"
}
