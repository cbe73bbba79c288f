#!/usr/bin/env bash
# Figures of text on a GPU, in one call of some minutes: letters (perplexity against ε) and LoRA on IMDB, three seeds each.
#
#   LIPDP_DATA=FOLDER bash benchmarks/accuracy/text.sh WEIGHTS RESULTS [QUICK]
#
# WEIGHTS: a folder of pretrained weights with its tokenizer, or - for none (LoRA is left out). RESULTS: folder for the lines. Rates are
# chosen on held-out tenths of the training data, and the test data read with them, once. QUICK: a trial that reads no test data.
set -uo pipefail
weights=$1 results=$2 quick=${3:-}
run=(python3 -W ignore "$(dirname "$0")/text.py")
common=(--device "${DEVICE:-cuda}" --results "$results")
if [ -n "$quick" ]; then
  common+=(--seeds 0 --steps 2 --batch 64 --records 200)
else
  common+=(--seeds 0 1 2 --test)
fi
"${run[@]}" letters --epsilon 1 3 8 --choose 0.002 0.004 0.008 "${common[@]}" || exit
"${run[@]}" letters --epsilon inf --choose 0.001 0.002 "${common[@]}" || exit
[ "$weights" = - ] || "${run[@]}" lora --weights "$weights" --epsilon 3 8 --choose 0.001 0.003 "${common[@]}"
