#!/bin/sh
# Compiled code goes to where numba can write, and so reads it.
# libpq reads a password from the environment, or from a file that only its user may read, unlike a mounted secret.
set -eu
if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then
    PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE")
    export PGPASSWORD
fi
if [ -d "${0%/*}/compiled" ]; then
    mkdir -p "$NUMBA_CACHE_DIR"
    cp -r "${0%/*}/compiled/." "$NUMBA_CACHE_DIR"
fi
exec "$@"
