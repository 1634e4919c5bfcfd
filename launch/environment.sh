# Sourced by the scripts beside it: makes environments in the repository and installs geojax there.
# PYTHON names the interpreter to use; without it a supported one on the PATH is taken.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# In the order in which they are looked for. From 3.12 on they get the newest JAX, and 3.11 gets JAX
# 0.10. No test has run on the last.
supported_pythons=(3.12 3.13 3.11 3.14)

# interpreter COMMAND VERSION...: prints the path of COMMAND's interpreter if a VERSION is its own.
interpreter() {
    "$1" -c 'if True:
        import sys
        if "%d.%d" % sys.version_info[:2] not in sys.argv[1:]:
            sys.exit(1)
        print(sys.executable)' "${@:2}" 2>/dev/null
}

# find_python [VERSION...]: prints the path of an interpreter of a VERSION; without one PYTHON, or an
# interpreter of a supported version.
find_python() {
    local version command IFS=$'\n'
    if [ -n "${PYTHON:-}" ] && ! (($#)); then
        interpreter "$PYTHON" "${supported_pythons[@]}"
        return
    fi
    (($#)) || set -- "${supported_pythons[@]}"
    for version; do
        for command in $(type -aP "python$version" python3); do
            # A shim of pyenv runs the version that this variable names; others do not read it.
            PYENV_VERSION=$version interpreter "$command" "$version" && return
        done
    done
    return 1
}

# install EXTRAS [ENVIRONMENT [VERSION...]]: brings ENVIRONMENT (.venv) up to what pyproject.toml
# asks for. A second call with the same pyproject.toml and extras finds a stamp and returns at once.
install() {
    local environment=${2:-.venv}
    local wanted=".${1:+[$1]}" stamp="$environment/geojax-${1:-base}.stamp"
    if ! interpreter "$environment/bin/python" "${supported_pythons[@]}" >/dev/null; then
        local python
        python=$(find_python "${@:3}") || {
            echo "error: geojax needs Python 3.11, 3.12 or 3.13 (3.14 is untested)${PYTHON:+, and PYTHON=$PYTHON is none of them}; put one on the PATH or name it: PYTHON=/path/to/python3.12 $0" >&2
            return 2
        }
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
