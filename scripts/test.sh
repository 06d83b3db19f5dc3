#!/bin/sh
# Run the tests on a machine that has nothing but Python: make the environment .venv, install Keel and the tests'
# packages in it, and run pytest in the checkout.
#
#   sh scripts/test.sh                          the quick tests
#   sh scripts/test.sh tests/unit -k tokenizer  the words of pytest
set -eu
root=$(CDPATH="" cd -- "$(dirname -- "$0")/.." && pwd -P)
. "$root/scripts/environment.sh"
prepare_environment "[test]"

cd "$root"
exec "$venv/bin/python" -m pytest "$@"
