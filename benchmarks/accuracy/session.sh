#!/usr/bin/env bash
# What needs a GPU of benchmarks/accuracy, in stages of minutes; README.md beside this file says how they belong together.
#
#   bash benchmarks/accuracy/session.sh STAGE…       in this order, several in one call; the first that fails ends the call
#
#   begin         looks for packages, GPU, datasets, and marks the machine; takes a network from NETWORK=FOLDER where one is given
#   learn         the large network, in the background; goes on where it was stopped
#   learned       waits for it; OUT/network.*
#   search        digits compared on held-out tenths, families of FAMILIES (default: straight small)
#   cifar10       test set of CIFAR-10, recipes of the large network; clothes: of Fashion-MNIST
#   digits        test set of MNIST, recipes of DIGITS (default mnist-drawn)
#   small         recipes of the network that comes with lipdp that have not been read yet
#   own           images that nothing was tuned for
#
# Every stage but `begin` refuses to run on a machine that `begin` has not marked. Readings that KEEP's logs hold are not made again.
# LIPDP_DATA: datasets, networks and constants. KEEP: a folder that outlasts a call. OUT: what is to come back. COMMIT: that holds
# the catalogue. DEVICE, SEEDS, ROWS (of a microbatch), LIMIT (seconds for a call), QUICK=1 (tiny, to try the script; reads no test set).
set -uo pipefail
usage() { sed -n '2,${/^#/!q;p}' "$0"; exit 2; }
[ $# -gt 0 ] || usage
: "${LIPDP_DATA:?has to name the folder of the datasets}"
KEEP=${KEEP:-$PWD/runs/session}
OUT=${OUT:-$KEEP/out}
DEVICE=${DEVICE:-cuda}
SEEDS=${SEEDS:-0 1 2}
LIMIT=${LIMIT:-480}
DIGITS=${DIGITS:-mnist-drawn}
FAMILIES=${FAMILIES:-straight small}
QUICK=${QUICK:-}
networks=$LIPDP_DATA/networks
marker=$KEEP/machine
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

fail() { echo "session.sh: $*" >&2; return 1; }
limited() { timeout -k 5 $((LIMIT > SECONDS ? LIMIT - SECONDS : 1)) "$@"; } # what is left of the call
machine() { cat /proc/sys/kernel/random/boot_id; hostname; }

shown() { # LOG PATTERN COMMAND…: the lines that tell; the log's end where it fails
  local log=$1 pattern=$2; shift 2
  limited "$@" 2>&1 | tee "$log" | { grep --line-buffered -E "$pattern" || true; }
  local status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] && return
  tail -5 "$log" >&2
  [ "$status" -eq 124 ] && { fail "stopped at the limit of $LIMIT s: $*"; return; }
  fail "exit $status: $*"
}

pids=()
together() { # waits for what was started; fails where one failed
  local bad=0 pid
  for pid in "${pids[@]}"; do wait "$pid" || bad=1; done
  pids=()
  return $bad
}

begin() {
  mkdir -p "$KEEP" "$OUT" "$networks" || return
  if [ -n "${NETWORK:-}" ]; then
    for name in large large-48; do
      cat "$NETWORK/network.$name".[0-9]* >"$networks/$name.npz" && cp "$NETWORK/$name.sha256" "$networks/" || { fail "no network in $NETWORK"; return; }
    done
  fi
  python3 - "$DEVICE" <<'PY' || { fail "this machine lacks something (above); nothing was run"; return; }
import sys
import torch
import lipdp, lipdp.cli
from lipdp import data, recipes
from lipdp.data.files import data_root
from lipdp.features.learned import read_network

if "cuda" in sys.argv[1] and not torch.cuda.is_available():
    sys.exit("no GPU")
recipes.prepare("digits", epsilon=1.0)  # the accountant and what it needs
for name in ("cifar10", "fashion_mnist", "mnist"):
    data.load(name, download=False)
for name in ("small", "large", "large-48"):
    if name == "small" or (data_root() / "networks" / f"{name}.npz").exists():
        print(name, read_network(name).digest[:16])  # refuses a file that is not its digest's
PY
  machine >"$marker"
}

here() { # the machine of the former stages
  [ -f "$marker" ] || { fail "$1: 'begin' has not been run here (no $marker): a bare machine, or not the one of the former stages"; return; }
  [ "$(cat "$marker")" = "$(machine)" ] || { fail "$1: not the machine that 'begin' marked"; return; }
  mkdir -p "$OUT"
}

has_network() { [ -f "$networks/large-48.sha256" ] && [ -f "$networks/large.sha256" ]; }

teach() {
  local tiny=()
  [ -n "$QUICK" ] && tiny=(--steps 2 --batch 4 --pool 8)
  exec python3 -m lipdp features train large --device "$DEVICE" --checkpoint "$KEEP/lesson.pt" "${tiny[@]}"
}

learn() { # in a session of its own, so that it outlasts this call
  has_network && return
  setsid bash "$0" teach >>"$KEEP/learn.log" 2>&1 </dev/null &
  echo $! >"$KEEP/learn.pid"
}

learned() { # waits; where nobody is at it, goes on itself, once
  local pid
  pid=$(cat "$KEEP/learn.pid" 2>/dev/null)
  while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; do
    [ "$SECONDS" -lt "$LIMIT" ] || { tail -2 "$KEEP/learn.log" >&2; fail "no network after $LIMIT s; it is still learning"; return; }
    sleep 1
  done
  if ! has_network; then
    shown "$KEEP/learn-again.log" '^wrote|Error|00 of ' bash "$0" teach || return
    has_network || { fail "the lesson ended without a network"; return; }
  fi
  echo "network after $SECONDS s"
  local name
  for name in large large-48; do
    split -b 15000000 -d "$networks/$name.npz" "$OUT/network.$name." && cp "$networks/$name.sha256" "$OUT/" || return
  done
}

search() { # digits, on held-out tenths
  local tiny=(--folds 5)
  [ -n "$QUICK" ] && tiny=(--folds 2 --limit 300)
  # shellcheck disable=SC2086
  shown "$KEEP/search.log" '^[0-9]+ s|Error' python3 benchmarks/accuracy/drawn.py mnist --steps 100 "${tiny[@]}" --families $FAMILIES \
    --device "$DEVICE" --seconds "$LIMIT" --out "$KEEP/found"
}

lockbox() { # one log for each process: lockbox NAME RECIPE…
  local name=$1; shift
  if [ -n "$QUICK" ]; then echo "would read: $*"; return; fi
  # shellcheck disable=SC2086
  shown "$KEEP/lockbox-$name.log" 'seed|Error' python3 benchmarks/accuracy/lockbox.py "$@" --seeds $SEEDS --device "$DEVICE" --missing \
    ${ROWS:+--rows "$ROWS"} ${COMMIT:+--commit "$COMMIT"} --log "$KEEP/lockbox-$name.jsonl"
}

needs_network() { has_network || fail "$1: no large network in $networks: 'learn learned', or 'begin' with NETWORK"; }

cifar10() { # the readings that are missing first
  needs_network cifar10 || return
  lockbox cifar10 cifar10-drawn-fading-eps3 cifar10-drawn-fading-eps8 cifar10-drawn-eps1
}

clothes() {
  needs_network clothes || return
  lockbox clothes fashion-mnist-drawn-fading-eps8 fashion-mnist-drawn-eps3 fashion-mnist-drawn-eps1
}

digits() {
  local epsilon
  for epsilon in 1 3 8; do lockbox "digits-$epsilon" "$DIGITS-eps$epsilon" & pids+=($!); done
  together
}

small() {
  lockbox small-clothes fashion-mnist-drawn-small-eps1 & pids+=($!)
  lockbox small cifar10-drawn-small-fading-eps3 cifar10-drawn-small-eps1 cifar10-drawn-small-fading-eps8 & pids+=($!)
  together
}

images() { # own images: images NAME CASE…
  local name=$1 tiny=(); shift
  [ -n "$QUICK" ] && tiny=(--few)
  shown "$KEEP/own-$name.log" 'behind|Error' python3 benchmarks/accuracy/own_images.py "$@" --seeds 2 --device "$DEVICE" \
    --log "$KEEP/own-$name.jsonl" "${tiny[@]}"
}

own() {
  images digits digits digits-28 & pids+=($!)
  images clothes clothes-5000 clothes-20000 & pids+=($!)
  images few photographs-2-classes photographs-10000 & pids+=($!)
  images five photographs-5-classes & pids+=($!)
  together
}

bring() { # what is small enough, whatever became of the stages
  [ -d "$OUT" ] || return
  cp "$KEEP"/*.jsonl "$KEEP"/*.log "$OUT/" 2>/dev/null
  [ -d "$KEEP/found" ] && cp -r "$KEEP/found" "$OUT/"
}

[ "${1:-}" = teach ] && teach
known=' begin learn learned search cifar10 clothes digits small own '
for stage; do
  [[ $known == *" $stage "* ]] || { fail "no stage '$stage'"; usage; }
done
for stage; do
  if [ "$stage" != begin ]; then here "$stage" || exit 3; fi
  "$stage" || { bring; fail "$stage FAILED after $SECONDS s"; exit 1; }
  echo "$stage done after $SECONDS s"
done
bring
exit 0
