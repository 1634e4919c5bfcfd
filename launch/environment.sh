# Sourced by the scripts beside it: makes .venv in the repository and installs geojax into it.
# PYTHON names the interpreter to use; without it the newest supported one on the PATH is taken.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: geojax needs Python 3.11 or 3.12${PYTHON:+, and PYTHON=$PYTHON is not one}; put one on the PATH or name it: PYTHON=/path/to/python3.12 $0" >&2
    return 2
}

# install EXTRAS [ENVIRONMENT]: brings ENVIRONMENT (.venv) up to what pyproject.toml asks for. A
# second call with the same pyproject.toml and extras finds a stamp and returns at once.
install() {
    local environment=${2:-.venv}
    local wanted=".${1:+[$1]}" stamp="$environment/geojax-${1:-base}.stamp"
    if ! [ -x "$environment/bin/python" ] || ! supported "$environment/bin/python"; then
        local python
        python=$(find_python) || return
        echo "making $environment with $("$python" --version)"
        "$python" -m venv --clear "$environment" || {
            echo "error: '$python -m venv' failed; on Debian: apt-get install python3-venv" >&2
            return 2
        }
    fi
    if ! cmp -s pyproject.toml "$stamp"; then
        echo "installing geojax and what it needs into $environment (a minute or two)"
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
            --editable "$wanted" || return
        cp pyproject.toml "$stamp"
    fi
}
