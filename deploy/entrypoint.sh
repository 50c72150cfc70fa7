#!/bin/sh
# libpq reads a password from the environment, or from a file that only its user may read, unlike a mounted secret.
set -eu
if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then
    PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE")
    export PGPASSWORD
fi
exec "$@"
