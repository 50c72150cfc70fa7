#!/bin/sh
# libpq reads a password from the environment, or from a file that nobody else may read, which a mounted secret is not.
set -eu
if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then
    PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE")
    export PGPASSWORD
fi
exec "$@"
