#!/usr/bin/env bash
# What needs a GPU of benchmarks/accuracy, in stages of minutes; README.md beside this file says how they belong together.
#
#   bash benchmarks/accuracy/session.sh learn        the large network, in the background; goes on where it was stopped
#   bash benchmarks/accuracy/session.sh search       waits for it; digits compared on held-out tenths; OUT/network.*, OUT/search.tar
#   bash benchmarks/accuracy/session.sh read         test sets of CIFAR-10 and Fashion-MNIST, recipes of the large network
#   bash benchmarks/accuracy/session.sh read-digits  test set of MNIST, recipes named by DIGITS (default mnist-drawn)
#   bash benchmarks/accuracy/session.sh read-small   recipes of the network that comes with lipdp
#   bash benchmarks/accuracy/session.sh own          images that nothing was tuned for
#
# LIPDP_DATA: datasets, networks and constants. KEEP: a folder that outlasts a call. OUT: what is to come back. COMMIT: that holds
# the catalogue. DEVICE, SEEDS, ROWS (of a microbatch), LIMIT (seconds for a stage), QUICK=1 (tiny, to try the script; reads no test set).
set -uo pipefail
KEEP=${KEEP:-$PWD/runs/session}
OUT=${OUT:-$KEEP/out}
DEVICE=${DEVICE:-cuda}
SEEDS=${SEEDS:-0 1 2}
LIMIT=${LIMIT:-480}
DIGITS=${DIGITS:-mnist-drawn}
QUICK=${QUICK:-}
networks=$LIPDP_DATA/networks
mkdir -p "$KEEP" "$OUT"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

limited() { timeout -k 5 $((LIMIT > SECONDS ? LIMIT - SECONDS : 1)) "$@"; } # what is left of the stage

teach() {
  local tiny=()
  [ -n "$QUICK" ] && tiny=(--steps 2 --batch 4 --pool 8)
  python3 -m lipdp features train large --device "$DEVICE" --checkpoint "$KEEP/lesson.pt" "${tiny[@]}"
}

learn() { # by itself in a session of its own, so that it outlasts this call
  [ -f "$networks/large-48.sha256" ] && return
  setsid bash "$0" teach >"$KEEP/learn.log" 2>&1 </dev/null &
  echo $! >"$KEEP/learn.pid"
}

learned() { # waits; begins again where nobody is at it
  while [ ! -f "$networks/large-48.sha256" ]; do
    [ "$SECONDS" -lt "$LIMIT" ] || { echo "no network after $LIMIT s"; return 1; }
    if [ ! -f "$KEEP/learn.pid" ] || ! kill -0 "$(cat "$KEEP/learn.pid")" 2>/dev/null; then
      [ -f "$networks/large-48.sha256" ] || limited bash "$0" teach >>"$KEEP/learn.log" 2>&1 || { tail -5 "$KEEP/learn.log"; return 1; }
    fi
    sleep 1
  done
  echo "network after $SECONDS s"; tail -2 "$KEEP/learn.log"
}

compare() { # digits, on held-out tenths: compare NAME FAMILY…
  local tiny=(--folds 5) name=$1; shift
  [ -n "$QUICK" ] && tiny=(--folds 2 --limit 300)
  limited python3 benchmarks/accuracy/drawn.py mnist --steps 100 "${tiny[@]}" --families "$@" --device "$DEVICE" \
    --seconds "$LIMIT" --out "$KEEP/found-$name" >"$KEEP/search-$name.log" 2>&1
  grep -E '^[0-9]+ s|Error' "$KEEP/search-$name.log"
}

lockbox() { # one log for each process: lockbox NAME RECIPE…
  local name=$1; shift
  if [ -n "$QUICK" ]; then echo "would read: $*"; return; fi
  limited python3 benchmarks/accuracy/lockbox.py "$@" --seeds $SEEDS --device "$DEVICE" ${ROWS:+--rows "$ROWS"} ${COMMIT:+--commit "$COMMIT"} \
    --log "$OUT/lockbox-$name.jsonl" 2>&1 | tee "$KEEP/lockbox-$name.log" | grep -E 'seeds|seed|Error'
}

images() { # own images: images NAME CASE…
  local name=$1 tiny=(); shift
  [ -n "$QUICK" ] && tiny=(--few)
  limited python3 benchmarks/accuracy/own_images.py "$@" --seeds 2 --device "$DEVICE" --log "$OUT/own-$name.jsonl" "${tiny[@]}" \
    2>&1 | tee "$KEEP/own-$name.log" | grep -E 'behind|Error'
}

constants() {
  python3 benchmarks/accuracy/lockbox.py cifar10-drawn-eps1 cifar10-drawn-light-eps3 cifar10-drawn-small-eps1 fashion-mnist-drawn-eps1 \
    --constants >"$KEEP/constants.log" 2>&1
}

case ${1:-} in
teach) teach ;;
learn) learn ;;
search)
  [ -n "$QUICK" ] || constants &
  compare small straight small &
  lockbox light cifar10-drawn-light-eps3 &
  learned && {
    for file in large large-48; do split -b 15000000 -d "$networks/$file.npz" "$OUT/network.$file."; done
    cp "$networks"/*.sha256 "$KEEP/" && compare large large
  }
  wait
  tar cf "$OUT/search.tar" -C "$KEEP" --exclude out --exclude lesson.pt . --ignore-failed-read ;;
read)
  lockbox cifar10 cifar10-drawn-fading-eps3 cifar10-drawn-fading-eps8 cifar10-drawn-eps1 &
  lockbox clothes fashion-mnist-drawn-fading-eps8 fashion-mnist-drawn-eps3 fashion-mnist-drawn-eps1 &
  wait ;;
read-digits)
  for epsilon in 1 3 8; do lockbox "digits-$epsilon" "$DIGITS-eps$epsilon" & done
  wait ;;
read-small)
  lockbox small cifar10-drawn-small-fading-eps3 cifar10-drawn-small-eps1 cifar10-drawn-small-fading-eps8 &
  lockbox small-clothes fashion-mnist-drawn-small-fading-eps3 fashion-mnist-drawn-small-eps1 fashion-mnist-drawn-small-fading-eps8 &
  wait ;;
own)
  images digits digits digits-28 &
  images clothes clothes-5000 clothes-20000 &
  images few photographs-2-classes photographs-10000 &
  images five photographs-5-classes &
  wait ;;
*) sed -n '2,14p' "$0"; exit 2 ;;
esac
echo "$1 done after $SECONDS s"
