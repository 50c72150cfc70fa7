#!/bin/sh
# trim.sh FOLDER: removes from an environment what the service never loads, a third of it: the tests of packages, pip,
# and plotly's Python code (pages read its JavaScript).
set -eu
cd "$1"/lib/python3*/site-packages
find . -type d -name tests -prune -exec rm -r {} +
find plotly -mindepth 1 -maxdepth 1 ! -name __init__.py ! -name package_data -exec rm -r {} +
"$1"/bin/pip uninstall --quiet --yes setuptools pip
