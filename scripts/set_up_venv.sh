#!/bin/sh
# Makes a virtual environment in which torchferry can be run, tested and checked.
#
#     sh scripts/set_up_venv.sh PYTHON VENV [TORCH]
#
# TORCH is the version of torch, 2.13.0 if it is not given.
# Run again, it brings an existing one up to date. When it fails, it says what failed, and what to do.
set -u

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

# What pip says at length, in a sentence or two. $1 is what was being installed.
explain_pip() {
    grep -i -E '^ *error' "$log" | tail -n 5 | sed 's/^ */  pip: /' >&2
    if log_mentions 'no space left|disk quota'; then
        give_up "$1 could not be installed: the disk is full." \
            'Free some space (torch alone unpacks to about a gigabyte), then run make again.'
    elif log_mentions 'CERTIFICATE_VERIFY_FAILED|SSLError'; then
        give_up "$1 could not be installed: the package index's certificate is not trusted here." \
            'Behind a proxy that inspects traffic, point PIP_CERT at its certificate.'
    elif log_mentions 'name resolution|name or service not known|NewConnectionError|ConnectTimeout|Network is unreachable|ProxyError|Connection refused|Read timed out'; then
        give_up "$1 could not be installed: the package index can't be reached." \
            'Check the network. Behind a proxy, set HTTPS_PROXY; with a mirror, set PIP_INDEX_URL;' \
            'without a network, point PIP_FIND_LINKS at a folder of wheels and set PIP_NO_INDEX=1.'
    elif log_mentions 'no matching distribution|could not find a version'; then
        give_up "$1 could not be installed: the package index has nothing that fits." \
            "$("$venv/bin/python" -c 'import platform as p; print("This is Python", p.python_version(), "on", p.system(), p.machine() + ".")')" \
            'Another may be supported: make distclean, then make demo PYTHON=python3.12, for example.'
    elif log_mentions 'permission denied'; then
        give_up "$1 could not be installed: $venv can't be written to." \
            "Remove it (it may belong to another user), then run make again."
    fi
    give_up "$1 could not be installed." "The whole of what pip said is in $log."
}

install() {
    what=$1
    shift
    printf 'Installing %s ...\n' "$what"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" \
        >"$log" 2>&1 </dev/null || explain_pip "$what"
}

command -v "$python" >/dev/null 2>&1 || give_up "there is no $python here." \
    'Install Python 3.11 or newer, or name the one to use: make demo PYTHON=python3.12, for example.'

is_new_enough "$python" || give_up \
    "torchferry needs Python 3.11 or newer, and $python is $("$python" -V 2>&1)." \
    'Install a newer one, or name the one to use: make demo PYTHON=python3.12, for example.'

# An environment left by an older Python, or cut off half-way, is made anew.
if ! { is_new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version; } >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || give_up \
        "this Python can't make virtual environments." \
        'Debian and Ubuntu keep that in a package of its own: apt install python3-venv.'
    printf 'Making %s with %s ...\n' "$venv" "$("$python" -V 2>&1)"
    said=$("$python" -m venv --clear "$venv" 2>&1) || give_up "python -m venv failed." "$said"
fi

# torch goes first and alone: what is named exactly here is what the tests run on, and the package's
# own, open-ended requirement is then already met.
install "torch $torch" "torch==$torch"
install 'torchferry and what its tests need' --editable '.[dev]'
rm -f "$log"
