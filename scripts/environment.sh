# shellcheck shell=sh
# The environment that start.sh, test.sh and .ci/run use: the folder .venv of this checkout, with Keel and its packages.
# Sourced by sh or bash, with `root` set to the checkout. An environment that is activated, conda's included, is left alone.
#
# KEEL_TORCH_INDEX is the package index with torch's build for CPUs; it is used where there is no GPU. pip's own variables
# (PIP_INDEX_URL, PIP_FIND_LINKS, ...) hold as usual.

torch="torch==2.13.0"
torch_cpu_index="https://download.pytorch.org/whl/cpu"
# shellcheck disable=SC2154
venv=$root/.venv
gib_for_cpu=3
gib_for_cuda=10

fail() {
    echo "keel: $1" >&2
    exit 1
}

# Install Keel in .venv unless that has been done, and put .venv first on PATH. $1: "", or "[test]" for the tests' packages.
prepare_environment() {
    if ! is_installed "$1"; then
        remove_unusable
        test -d "$venv" || make_venv
        install_packages "$1"
    fi
    VIRTUAL_ENV=$venv
    PATH=$venv/bin:$PATH
    export VIRTUAL_ENV PATH
}

# What decides whether an installation is still good. Line 1: what the environment was made for; line 2: Keel's packages.
description() {
    "$venv/bin/python" -c 'import sys; print(sys.prefix, "Python %d.%d" % sys.version_info[:2], *sys.argv[1:])' "$torch" \
        2>/dev/null && cksum <"$root/pyproject.toml"
}

# Where the tests' packages are installed, everything that training needs is, too.
is_installed() {
    for stamp in "$venv/keel-installed$1" "$venv/keel-installed[test]"; do
        test -f "$stamp" && test "$(description)" = "$(cat "$stamp")" && return
    done
    return 1
}

# Remove an environment that was made here, but not to its end, or for another Python, place or torch. Others are kept.
remove_unusable() {
    stamp=$(find "$venv" -maxdepth 1 -name 'keel-installed*' 2>/dev/null | head -n 1) || stamp="" # with bash's pipefail
    now=$(description | head -n 1) || now=""
    if ! test -f "$venv/keel-made"; then
        test -n "$now" || ! test -d "$venv" || fail "$venv has no Python that runs: delete that folder, then repeat the command"
    elif test -n "$stamp"; then
        test "$now" = "$(head -n 1 "$stamp")" || remake "was made for another Python, place or torch"
    else
        maker=$(cat "$venv/keel-made")
        ! kill -0 "$maker" 2>/dev/null || fail "process $maker is making $venv: wait until it ends"
        remake "is unfinished"
    fi
}

remake() {
    echo "keel: $venv $1: making it again"
    rm -rf "$venv"
}

make_venv() {
    python=$(find_python) || exit 1
    needed=$gib_for_cpu
    has_gpu && needed=$gib_for_cuda
    free=$(df -Pk "$root" | awk 'NR == 2 && $4 ~ /^[0-9]+$/ {print int($4 / 1048576)}')
    if test "${free:-$needed}" -lt "$needed"; then
        fail "the disk of $root has $free GiB free; the installation needs $needed"
    fi
    echo "keel: making $venv with $python; this takes some minutes once"
    mkdir "$venv"
    echo $$ >"$venv/keel-made"
    "$python" -m venv "$venv" || fail "$python could not make $venv; its message is above"
}

# Print the first Python on the PATH that will do; without one, say what each lacks.
find_python() {
    problems=""
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        problem=$("$name" -c '
import sys
version = "%d.%d" % sys.version_info[:2]
try:
    import ensurepip, venv
except ImportError:
    lacks = "cannot make environments (apt install python3-venv, or python%s-venv)" % version
else:
    lacks = ""
if sys.version_info < (3, 11):
    lacks = "is too old"
print(lacks and "%s, Python %s, %s" % (sys.argv[1], version, lacks))
' "$name" 2>/dev/null) || continue
        if test -z "$problem"; then
            echo "$name"
            return
        fi
        problems="$problems; $problem"
    done
    fail "Keel needs Python 3.11 or newer with the module venv${problems:-; there is no Python on the PATH}"
}

has_gpu() {
    test -e /dev/nvidia0 || nvidia-smi -L >/dev/null 2>&1
}

# An environment that somebody else made keeps its torch.
install_packages() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null ||
        fail "$venv has no pip: delete that folder, then repeat the command"
    "$venv/bin/python" -c 'import importlib.metadata as found; found.version("torch")' 2>/dev/null || install_torch
    pip_install -e "$root$1"
    description >"$venv/keel-installed$1"
}

install_torch() {
    if has_gpu || test "$(uname)" != Linux; then
        pip_install "$torch"
    elif test -n "${KEEL_TORCH_INDEX-}"; then
        # Without what torch depends on, which an index of torch alone may lack; Keel's own installation brings it.
        pip_install --no-deps --index-url "$KEEL_TORCH_INDEX" "$torch"
    else
        echo "keel: no GPU here: if pip downloads gigabytes of CUDA libraries, stop it and set KEEL_TORCH_INDEX=$torch_cpu_index"
        pip_install "$torch"
    fi
}

pip_install() {
    rm -f "$venv/pip.log"
    PIP_USER=0 "$venv/bin/python" -m pip install --log "$venv/pip.log" "$@" && return
    if grep -q "No space left" "$venv/pip.log" 2>/dev/null; then
        fail "the disk is full (see above): the installation needs $gib_for_cpu GiB, and $gib_for_cuda with CUDA"
    elif grep -Eq "NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|name resolution" "$venv/pip.log" 2>/dev/null; then
        fail "pip reaches no package index (see above): it needs a network, or PIP_INDEX_URL or PIP_FIND_LINKS"
    fi
    fail "pip could not install $*; its message is above"
}
