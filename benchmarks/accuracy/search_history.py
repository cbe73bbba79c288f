"""The trials of search.py as histories for ``lipdp pareto``: one dot for each, at the ε it was planned for.

    python benchmarks/accuracy/search_history.py benchmarks/results/accuracy/search/[123]-*.jsonl --out heads.jsonl
    lipdp pareto heads.jsonl --dataset cifar10 --epsilons 1,3,8 --output front/

The models are the heads on scattering features: linear, with a hidden layer, with a convolution. Scores are of a tenth of the
training set, held out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

DELTA = 1e-5  # of all those trials


def lines(file: Path) -> Iterator[str]:
    """A line for each trial that came to its end."""
    dataset = file.stem.partition("-")[2]
    for trial in map(json.loads, file.read_text().splitlines()):
        if "scores" not in trial:
            continue
        head, config = f"scattering-{trial['config']['head']}", trial["config"]
        yield json.dumps({
            "recipe": f"{dataset.replace('_', '-')}-{head}", "dataset": dataset, "model": head, "method": "clipless",
            "delta": DELTA, "epsilon": trial["epsilon"], "steps": config["steps"], "seconds": round(trial["seconds"], 3),
            "evaluated_on": "validation", "accuracy": trial["score"] / 100, "certified": {}, "history": {}, "settings": config,
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = [line for file in options.files for line in lines(file)]
    options.out.write_text("\n".join(found) + "\n")
    print(len(found), "trials")


if __name__ == "__main__":
    main()
