#!/bin/sh
# Run torchft's own tests with torchferry's transports in the place of its own.
#
#     sh scripts/test_torchft.sh PYTHON REQUIREMENT [TORCH]
#
# REQUIREMENT is what pip installs: torchft==0.2.0, or torchft-nightly for the newest. TORCH is the version of torch; the
# default is 2.13.0. The environment is kept for the next run.
set -eu
cd "$(dirname "$0")/.."

root=$PWD
venv=$root/.venv-torchft-$(printf %s "$2" | tr -c 'A-Za-z0-9.\n' -)
[ -x "$venv/bin/python" ] || "$1" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "torch==${3:-2.13.0}" numpy . \
    parameterized pytest --upgrade "$2"

# run SUITE [PYTEST ARGUMENT...]: run a test module of torchft, with what the environment says.
run() {
    suite=$1
    shift
    printf '\n=== %s with %s%s\n' "$suite" "$TRANSPORT" "${SNAPSHOT:+, snapshot=True}"
    # In another folder, and without the settings for torchferry's own tests.
    (cd "$venv" && PYTHONPATH=$root/src:$root "$venv/bin/python" -m pytest -q -c /dev/null -p no:cacheprovider \
        -p tests.torchft.substitution --pyargs "torchft.$suite" "$@")
}

export TRANSPORT SNAPSHOT=
TRANSPORT=PGTransport
run checkpointing.pg_transport_test
run manager_integ_test
run local_sgd_integ_test
TRANSPORT=Transport
# The other tests of HTTPTransport check its URLs and locks.
run checkpointing.http_transport_test -k multi
run manager_integ_test
SNAPSHOT=1
run manager_integ_test
run local_sgd_integ_test
