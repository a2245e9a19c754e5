#!/usr/bin/env bash
# The one entry point; `./run.sh help` tells what it does.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
venv="$root/.venv"
requirements="$root/requirements"

export PIP_USER=0 # pip is to install into .venv, whatever else it is used to
unset PIP_TARGET PIP_PREFIX PIP_ROOT

main_script=sac_continuous_action_torchcompile
main_steps=12000

note() { printf 'run.sh: %s\n' "$*" >&2; }
die() {
    note "$@"
    exit 2
}

scripts() {
    local path names=""
    for path in "$root"/leanrl/[!_]*.py; do
        [[ -f $path ]] && names+=" $(basename -- "$path" .py)"
    done
    printf '%s\n' "${names:- (none)}"
}

usage() {
    cat <<EOF
./run.sh                         set up, then train $main_script for $main_steps steps
./run.sh setup                   only set up: makes .venv and installs the tested versions of what the scripts need
./run.sh test [PYTEST ARGS]      set up, then run the tests
./run.sh train SCRIPT [FLAGS]    set up, then run leanrl/SCRIPT.py; --help as a flag lists its flags
./run.sh bench [FLAGS]           set up, then compare the variants of the scripts; --quick takes under 5 minutes
./run.sh help                    print this

Scripts:$(scripts)
PYTHON=/path/to/python chooses the Python (3.11 or newer) that .venv is made with.
Relative paths, the folder runs/ included, are taken from where you are, except in the tests.
EOF
}

# --- setup -----------------------------------------------------------------------------------------------------------

# Prints the path of the interpreter behind $1, which is not the one of an activated .venv (that .venv may be about to
# be removed); fails unless it is a Python from 3.11 to 3.$2.
base_python() {
    "$1" -c "
import sys, venv
if not (3, 11) <= sys.version_info[:2] <= (3, $2):
    sys.exit(1)
print(sys._base_executable)" 2>/dev/null
}

find_python() {
    local newest candidate
    if [[ -n ${PYTHON:-} ]]; then
        base_python "$PYTHON" 99 || die "PYTHON=$PYTHON is not a Python 3.11 or newer with its venv module"
        return
    fi
    # The tested versions go first: for a newer Python the pinned packages may have no wheels.
    for newest in 13 99; do
        for candidate in python3 python3.13 python3.12 python3.11; do
            base_python "$candidate" "$newest" && return
        done
    done
    die "found no Python 3.11 or newer (tried python3, python3.13, python3.12, python3.11);" \
        "install one, or name it: PYTHON=/path/to/python ./run.sh"
}

python_version() { "$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "no python"; }

# Prints the kinds of requirements up to $1: each holds those before it.
kinds_up_to() {
    local kind
    for kind in core envpool ray bench dev; do
        echo "$kind"
        [[ $kind != "$1" ]] || return 0
    done
}

# Prints the requirement file of the kind $1.
requirement_file() { echo "$requirements/requirements$([[ $1 == core ]] || echo "-$1").txt"; }

# What the stamp of a complete install says: the Python version and a hash of each file that decides what is installed.
stamp_text() {
    python_version "${PYTHON:-$venv/bin/python}"
    cksum <"$requirements/constraints.txt"
    local kind
    for kind in $(kinds_up_to "$1"); do cksum <"$(requirement_file "$kind")"; done
}

is_installed() {
    [[ -x $venv/bin/python && -f $venv/.stamp-$1 && "$(<"$venv/.stamp-$1")" == "$(stamp_text "$1")" ]]
}

# Whether .venv can be installed into as it is. A package that a killed pip had half unpacked looks installed to the
# next pip, so a .venv whose install broke off is never built upon.
is_sound() {
    [[ -f $venv/.stamp-core && ! -e $venv/.installing ]] &&
        [[ "$(head -n 1 "$venv/.stamp-core")" == "$(python_version "${PYTHON:-$venv/bin/python}")" ]]
}

make_venv() {
    local python=$1
    if [[ -e $venv && ! -e $venv/.installing && ! -e $venv/.stamp-core ]]; then
        local kept
        kept="$venv.old-$(date +%s)"
        mv -- "$venv" "$kept"
        note "the .venv that was here is not from run.sh: kept as $kept"
    fi
    # The stamps go first, so that a removal that breaks off leaves nothing that looks complete.
    rm -f -- "$venv"/.stamp-*
    rm -rf -- "$venv"
    mkdir -- "$venv"
    touch -- "$venv/.installing"
    # Debian's bare python3 has no ensurepip; its pip can install into .venv from outside.
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --without-pip "$venv"
    else
        die "$python has neither pip nor ensurepip (on Debian and Ubuntu: apt install python3-venv)"
    fi
}

# Makes .venv hold the requirements of $1 completely; calls pip only if it does not hold them yet.
install() {
    is_installed "$1" && return
    # The lock lives as long as this subshell and the pip that it starts: also when this shell is killed, the next
    # run.sh does not touch .venv under a pip that is still at work.
    (
        if command -v flock >/dev/null && ! flock -n 9; then
            note "another run.sh is setting up .venv: waiting for it"
            flock 9
        fi
        is_installed "$1" || install_locked "$1"
    ) 9>>"$venv.lock"
}

install_locked() {
    local kind=$1 python file pip
    python=$(find_python)
    note "setting up .venv ($(python_version "$python"), $kind requirements); the first time takes some minutes"
    is_sound || make_venv "$python"
    touch -- "$venv/.installing"
    # Adding requirements leaves a complete core as it is, so its scripts stay usable even if that fails.
    is_installed core || rm -f -- "$venv"/.stamp-*

    pip=("$venv/bin/python" -m pip)
    "${pip[@]}" --version >/dev/null 2>&1 || pip=("$python" -m pip --python "$venv/bin/python")
    file=$(requirement_file "$kind")
    if ! "${pip[@]}" install -qq --no-input --disable-pip-version-check -r "$file" -c "$requirements/constraints.txt"; then
        note "the install broke off; the next ./run.sh takes it up again"
        exit 1
    fi

    for kind in $(kinds_up_to "$kind"); do stamp_text "$kind" >"$venv/.stamp-$kind"; done
    rm -f -- "$venv/.installing"
}

# --- commands --------------------------------------------------------------------------------------------------------

# Prints the name of the script that $1 means: X, X.py or leanrl/X.py.
script_name() {
    local name=${1#./}
    name=${name#leanrl/}
    name=${name%.py}
    [[ -n $name && $name != */* && $name != _* && -f $root/leanrl/$name.py ]] ||
        die "there is no script '$1'; the scripts are:$(scripts)"
    printf '%s\n' "$name"
}

# Prints which requirements the script $1 has.
script_kind() {
    local path="$root/leanrl/$1.py"
    if grep -q '^ *import ray$' "$path"; then
        echo ray
    elif grep -q '^import envpool' "$path"; then
        echo envpool
    else
        echo core
    fi
}

# Prints the flags of the fastest variant that this machine can run. torch.compile builds C++ against Python's headers.
variant_flags() {
    "$venv/bin/python" - <<'EOF'
import os, shutil, sys, sysconfig, torch

compiler = (os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")).split()[0]
header = os.path.join(sysconfig.get_path("include"), "Python.h")
missing = [name for name, found in ((compiler, shutil.which(compiler)), (header, os.path.exists(header))) if not found]
missing += ["a path without spaces"] * (" " in torch.__file__)  # Inductor hands it to the compiler unquoted
if missing:
    print("run.sh: without --compile, which needs", " and ".join(missing), file=sys.stderr)
else:
    print("--compile")
if torch.cuda.is_available():
    print("--cudagraphs")
EOF
}

command=${1:-}
[[ $# -eq 0 ]] || shift
case $command in
    "")
        name=$(script_name "$main_script")
        install core
        flags=$(variant_flags)
        # shellcheck disable=SC2086  # one word per flag
        set -- $flags --total-timesteps "$main_steps"
        note "leanrl/$name.py $*"
        exec "$venv/bin/python" "$root/leanrl/$name.py" "$@"
        ;;
    train)
        [[ $# -gt 0 ]] || die "train needs a SCRIPT; the scripts are:$(scripts)"
        name=$(script_name "$1")
        shift
        install "$(script_kind "$name")"
        exec "$venv/bin/python" "$root/leanrl/$name.py" "$@"
        ;;
    test)
        install dev
        cd -- "$root"
        if [[ $# -eq 0 ]]; then  # all of them: a file at a time on each core, of which none then has two threads
            export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
            set -- --numprocesses=logical --maxprocesses=4 --dist=loadfile
        fi
        exec "$venv/bin/python" -m pytest "$@"
        ;;
    bench)
        install bench
        exec "$venv/bin/python" "$root/benchmarks/compare.py" "$@"
        ;;
    setup)
        [[ $# -eq 0 ]] || die "setup takes no arguments, got: $*"
        install core
        note ".venv is ready"
        ;;
    help | -h | --help) usage ;;
    *) die "unknown command '$command'; the commands are: bench, setup, test, train, help (or none: a short training run)" ;;
esac
