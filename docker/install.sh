#!/bin/sh
# Installs packages into /venv during an image build: install.sh ARGUMENTS-OF-PIP
# Optional build secrets: certificates (ca) and pip's configuration (pip).
set -eu
if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi
exec /pip/bin/pip --python /venv/bin/python install --no-compile --only-binary=:all: "$@"
