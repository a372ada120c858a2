#!/bin/sh
# Install what is in this folder into a new virtual environment, hashes checked, without a network: sh install.sh VENV
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-scaffpd-venv}
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip --isolated --disable-pip-version-check install \
    --no-index --find-links "$here/wheels" --require-hashes -r "$here/requirements.txt"
