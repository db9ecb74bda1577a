#!/bin/sh
# lock.sh FILE COMMAND [ARGUMENT…]: run COMMAND while holding the path lock of FILE (docs/lock-protocol.md).
#
# POSIX shell, and `mv -T` and `stat -c` as GNU and busybox have them. Exit code: that of COMMAND; 75 if FILE is busy
# for 5 s. A directory is entered before it is judged or taken apart: the working directory is the descriptor that
# the protocol asks for. What this script cannot tell for sure it takes for alive.
set -u
file=$1 && shift
lock=$file.lock
token=$(cat /proc/sys/kernel/random/uuid)
boot=$(cat /proc/sys/kernel/random/boot_id)
pid_ns=$(stat -L -c %i /proc/self/ns/pid)
time_ns=$(stat -L -c %i /proc/self/ns/time)

value() { # value KEY <RECORD: a text or number of a record that is one line
    sed -n 's/.*"'"$1"'" *: *"\{0,1\}\([^",}]*\).*/\1/p'
}

same() { [ "$(stat -c %d:%i . 2>/dev/null)" = "$(stat -c %d:%i "$1" 2>/dev/null)" ]; }

remove() { # remove NAME TOKEN, in the lock directory: the lease decides; only the last step uses the name
    same "$1" && rm ".lease-$2" 2>/dev/null || return 1
    rm -f .owner.json
    if same "$1"; then rmdir "$1" 2>/dev/null; fi
    return 0 # somebody may have taken the name when the lease was gone
}

dead() { # in the lock directory; sets theirs, the token of an owner that is proven to be gone
    [ -f .owner.json ] && [ ! -L .owner.json ] && [ "$(stat -c %s .owner.json 2>/dev/null || echo 65537)" -le 65536 ] || return 1
    record=$(cat .owner.json 2>/dev/null) && theirs=$(echo "$record" | value token) || return 1
    [ "$(echo "$record" | value v)" = 1 ] && [ -f ".lease-$theirs" ] || return 1
    pid=$(echo "$record" | value pid)
    case $pid in '' | *[!0-9]*) return 1 ;; esac
    case $record in
    *'"boot_id"'*) # it says where its number counts
        [ "$(echo "$record" | value boot_id)" = "$boot" ] && [ "$(echo "$record" | value pid_ns)" = "$pid_ns" ] &&
            [ "$(echo "$record" | value time_ns)" = "$time_ns" ] || return 1
        ;;
    *'"host"'* | *'"pid_ns"'*) return 1 ;;
    *) [ $(($(date +%s) - $(stat -c %Y . || date +%s))) -gt 10 ] || return 1 ;; # it does not: only once it is stale
    esac
    case $(LC_ALL=C kill -0 "$pid" 2>&1) in *[Nn]'o such process'*) return 0 ;; *) return 1 ;; esac
}

take() {
    pending=$lock.$$.$token.pending
    mkdir -m 750 "$pending" || exit 1
    printf '{"v":1,"pid":%d,"token":"%s","created_at":"%s"}\n' "$$" "$token" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
        >"$pending/.owner.json" && echo "$token" >"$pending/.lease-$token" && touch "$pending" &&
        mv -T "$pending" "$lock" 2>/dev/null && return # refuses to replace what is not empty
    rm -f "$pending/.owner.json" "$pending/.lease-$token" && rmdir "$pending"
    return 1
}

here=$(pwd -P)
case $lock in /*) ;; *) lock=$here/$lock ;; esac
deadline=$(($(date +%s) + 5))
until { [ ! -e "$lock" ] && [ ! -L "$lock" ]; } && take; do
    # shellcheck disable=SC2015 # either way the next look tells
    (cd -P "$lock" 2>/dev/null && dead && remove "$lock" "$theirs") && continue
    [ "$(date +%s)" -lt "$deadline" ] || { echo "$file: busy" >&2 && exit 75; }
    sleep 0.01 2>/dev/null || sleep 1
done
trap '(cd -P "$lock" 2>/dev/null && remove "$lock" "$token") || echo "$file: its lock was taken away" >&2' EXIT
trap 'exit 130' HUP INT TERM
"$@"
