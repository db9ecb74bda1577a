# shellcheck shell=bash
# What scripts/quickstart, scripts/test and .ci/run share: system packages, a fitting Python, the virtual environment.
#
# Everything is asked by ability, not by package name ("is there a gcc?"), so that nothing is installed that is there
# already under another name, and the scripts work on systems without apt too. Environment variables:
#
#   PYTHON         the Python to use (3.11 or later, with the venv module and the C headers)
#   VAULTFS_VENV   where the virtual environment goes (default: .venv in the checkout)

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VAULTFS_VENV:-$checkout/.venv}
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin # mkfs and losetup are no commands of a user's PATH everywhere

say() { printf '%s\n' "$*"; }
fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  hint: %s\n' "$@" >&2
    exit 1
}

# fits PYTHON: is it 3.11 or later?  complete PYTHON: can it make virtual environments and build C extensions?
fits() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
complete() {
    fits "$1" && "$1" -c '
import ensurepip, os, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null
}

# The first Python that is complete, else nothing. PYTHON alone counts if it is set.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3}; do
        if complete "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

# Debian packages for what vaultfs itself needs and this machine lacks, one a line.
missing_packages() {
    if [ -z "$(find_python)" ]; then
        say python3-venv
        say python3-dev
    fi
    command -v gcc >/dev/null || command -v cc >/dev/null || say gcc
    # The C library's headers come with python3-dev, but a Python from elsewhere does not bring them.
    [ -e /usr/include/stdio.h ] || say libc6-dev
    command -v pkg-config >/dev/null || say pkg-config
    pkg-config --exists fuse3 2>/dev/null || say libfuse3-dev
    command -v fusermount3 >/dev/null || say fuse3
    command -v git >/dev/null || say git
}

# Debian packages for what the tests need besides, as command:package.
missing_test_packages() {
    local pair
    for pair in mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs losetup:mount flock:util-linux \
        strace:strace setfacl:acl getfattr:attr vim:vim nano:nano rsync:rsync sqlite3:sqlite3 tar:tar sed:sed \
        pgrep:procps fuser:psmisc sudo:sudo node:nodejs npm:npm perl:perl make:make rg:ripgrep shellcheck:shellcheck; do
        command -v "${pair%%:*}" >/dev/null || say "${pair##*:}"
    done
}

# install_packages PACKAGE...: as root with apt; otherwise says exactly what to do and fails.
install_packages() {
    [ $# -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null; then
        fail "these Debian packages, or what corresponds to them here, are needed: $*" \
            "Install them with your system's package manager, then run this again." \
            "(Fedora: gcc pkgconf fuse3 fuse3-devel python3-devel. Arch: base-devel fuse3 python. Alpine: build-base fuse3 fuse3-dev python3-dev.)"
    fi
    if [ "$(id -u)" -ne 0 ]; then
        fail "system packages are missing, and installing them needs root" \
            "sudo apt-get update && sudo apt-get install -y --no-install-recommends $*" "Then run this again."
    fi
    say "Installing system packages: $*"
    # Mirrors fail now and then; the third failure is a real one.
    retry apt_get update || fail "apt-get update failed three times" "Look at what it says above."
    retry apt_get install -y --no-install-recommends "$@" ||
        fail "apt-get could not install: $*" "Look at what it says above."
}
apt_get() { DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 "$@" >/dev/null; }
retry() {
    local attempt
    for attempt in 1 2 3; do
        "$@" && return
        [ "$attempt" -eq 3 ] || sleep $((attempt * 3))
    done
    return 1
}

# prepare_venv EXTRAS: the virtual environment with vaultfs (editable) and the extras, made or brought up to date.
# Nothing is done if pyproject.toml and the Python are those of last time.
prepare_venv() {
    local python stamp wanted
    python=$(find_python)
    [ -n "$python" ] || fail "no Python 3.11 or later with venv and C headers is to be found" \
        "Name one: PYTHON=/path/to/python3 $0" "On Debian 12 or later: apt-get install python3-venv python3-dev"
    stamp=$venv/.vaultfs-${1:-plain}
    wanted=$(
        "$python" -VV
        say "$checkout"
        cksum <"$checkout/pyproject.toml"
    )
    if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    say "Preparing $venv with $("$python" -V) (a minute, the first time)"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "the virtual environment $venv cannot be made" \
        "Choose another place: VAULTFS_VENV=/some/where $0"
    retry "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input -e "$checkout${1:+[$1]}" ||
        fail "pip could not install vaultfs and its libraries" "Look at what it says above."
    say "$wanted" >"$stamp"
}

require_fuse_device() {
    [ -e /dev/fuse ] || fail "/dev/fuse is missing: this machine (or container) has no FUSE" \
        "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined"
}
