#!/bin/sh
# Create or update a virtual environment to run, test and check torchferry.
#
#     sh scripts/set_up_venv.sh PYTHON VENV [TORCH]
#
# VENV is relative to the root of the repository. TORCH is the version of torch; the default is 2.13.0. On failure, the
# message says what failed and what to do.
set -u
cd "$(dirname "$0")/.." || exit 1

python=$1
venv=$2
torch=${3:-2.13.0}
log=$venv/install.log

give_up() {
    printf '\nSetting up %s failed: %s\n' "$venv" "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

log_mentions() {
    grep -q -i -E "$1" "$log"
}

# Exit with a short explanation of pip's error. $1 is what was being installed.
explain_pip() {
    grep -i -E '^ *error' "$log" | tail -n 5 | sed 's/^ */  pip: /' >&2
    if log_mentions 'no space left|disk quota'; then
        give_up "$1 could not be installed: the disk is full." \
            'Free some space (torch alone needs about 1 GB), then run make again.'
    elif log_mentions 'CERTIFICATE_VERIFY_FAILED|SSLError'; then
        give_up "$1 could not be installed: this machine does not trust the certificate of the package index." \
            'If a proxy inspects the traffic, set PIP_CERT to the file of its certificate.'
    elif log_mentions 'name resolution|name or service not known|NewConnectionError|ConnectTimeout|Network is unreachable|ProxyError|Connection refused|Read timed out'; then
        give_up "$1 could not be installed: the package index is not reachable." \
            'Check the network. For a proxy, set HTTPS_PROXY. For a mirror, set PIP_INDEX_URL.' \
            'Without a network, set PIP_FIND_LINKS to a folder of wheels, and PIP_NO_INDEX=1.'
    elif log_mentions 'no matching distribution|could not find a version'; then
        give_up "$1 could not be installed: the package index has no version for this machine." \
            "$("$venv/bin/python" -c 'import platform as p; print("This is Python", p.python_version(), "on", p.system(), p.machine() + ".")')" \
            'If you chose the version of torch, check that it exists.' \
            'Otherwise try another Python: make distclean, then for example make demo PYTHON=python3.12.'
    elif log_mentions 'permission denied'; then
        give_up "$1 could not be installed: $venv is not writable." \
            "Remove $venv (it may belong to another user), then run make again."
    fi
    give_up "$1 could not be installed." "The output of pip is in $log."
}

install() {
    what=$1
    shift
    printf 'Installing %s ...\n' "$what"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" \
        >"$log" 2>&1 </dev/null || explain_pip "$what"
}

command -v "$python" >/dev/null 2>&1 || give_up "there is no command $python." \
    'Install Python 3.11 or newer, or choose another command: for example make demo PYTHON=python3.12.'

is_new_enough "$python" || give_up \
    "torchferry needs Python 3.11 or newer, but $python is $("$python" -V 2>&1)." \
    'Install a newer Python, or choose another command: for example make demo PYTHON=python3.12.'

# Create the environment again if it has an older Python or is incomplete.
if ! { is_new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version; } >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || give_up \
        "$python can't create virtual environments." \
        'On Debian and Ubuntu, install the package for it: apt install python3-venv.'
    printf 'Creating %s with %s ...\n' "$venv" "$("$python" -V 2>&1)"
    said=$("$python" -m venv --clear "$venv" 2>&1) || give_up "python -m venv failed." "$said"
fi

touch "$log" 2>/dev/null || give_up "$venv is not writable." \
    "Remove $venv (it may belong to another user), then run make again."

# Install exactly this torch first. torchferry itself requires only a minimum version, and pip would pick the newest.
install "torch $torch" "torch==$torch"
install 'torchferry and the dependencies of its tests' --editable '.[dev]'
rm -f "$log"
