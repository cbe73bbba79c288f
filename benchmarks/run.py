"""The one runner of the benchmarks.

python benchmarks/run.py                             # what there is, by question
python benchmarks/run.py speed/noise --sizes 1e5     # one of them, with its own arguments
python benchmarks/run.py figures                     # the figures and generated pages of docs/, from what is committed: no training
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QUESTIONS = {
    "accuracy": "What do private networks and heads reach, and how were their settings found?",
    "tables": "The same for tables of numbers, beside DP-SGD and other estimators",
    "models": "Which models of other people can be trained as they are?",
    "learned": "Are learned mechanisms better than experts' ones?",
    "audit": "Is what is promised true: ε against references and attacks, faults that must be seen?",
    "speed": "What does a step cost: clipless, clipped, noise, checks, several processes?",
    "data": "How fast is data read that is larger than memory?",
}
OUT_OF_THE_BOX = HERE / "results" / "out_of_the_box"
TRIALS = [OUT_OF_THE_BOX / name for name in ("cuda.jsonl", "earlier/cpu.jsonl", "earlier/cpu_cifar10.jsonl")]
# Commands (relative to the root) that draw figures and write pages of docs/ from committed results and the source.
CLIPPING = [f"benchmarks/results/clipping/{name}" for name in ("h200", "h200-2", "h200-3")]
FIGURES = [
    ["docs/make_architecture.py"],
    ["docs/make_calculus.py"],
    ["docs/make_layers.py"],
    ["docs/make_reference.py"],
    ["docs/make_results.py"],
    ["benchmarks/learned/mechanisms.py", "plot"],
    ["benchmarks/speed/clipping_plots.py", *CLIPPING, "docs/clipping"],
]
# Dataset → {figure of `lipdp pareto`: its name in docs/pareto}.
FRONTS = {
    "cifar10": {"by_model.svg": "cifar10_by_model.svg", "certified.svg": "cifar10_certified.svg"},
    "mnist": {"by_model.svg": "mnist_by_model.svg", "certified.svg": "mnist_certified.svg"},
}


def scripts() -> dict[str, str]:
    """FOLDER/NAME → the first sentence of each script that can be called."""
    found = {}
    for path in sorted(HERE.glob("*/*.py")):
        text = path.read_text(encoding="utf8")
        if 'if __name__ == "__main__"' in text:
            found[f"{path.parent.name}/{path.stem}"] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return found


def figures() -> None:
    """Draw all of them anew."""
    for command in FIGURES:
        print("$ python", *command, flush=True)
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    for dataset, names in FRONTS.items():
        with tempfile.TemporaryDirectory() as folder:
            front = [
                "pareto",
                *map(str, TRIALS),
                "--dataset",
                dataset,
                "--by",
                "model",
                "--epsilons",
                "1.5,3,10",
                "--output",
                folder,
            ]
            subprocess.run([sys.executable, "-m", "lipdp", *front], check=True)
            for drawn, name in names.items():
                (ROOT / "docs" / "pareto" / name).write_bytes((Path(folder) / drawn).read_bytes())
                print(f"docs/pareto/{name}")


def main() -> None:
    known = scripts()
    wanted, *rest = sys.argv[1:] or [""]
    if wanted == "figures":
        figures()
    elif wanted.removesuffix(".py") in known:
        raise SystemExit(
            subprocess.run([sys.executable, str(HERE / f"{wanted.removesuffix('.py')}.py"), *rest], check=False).returncode
        )
    else:
        for folder, question in QUESTIONS.items():
            print(f"\n{question}")
            for name, about in known.items():
                if name.startswith(f"{folder}/"):
                    print(f"  {name:36} {about}")
        raise SystemExit(
            0 if wanted in ("", "-h", "--help") else f"\nthere is no benchmark {wanted!r}: take one of the above, or figures"
        )


if __name__ == "__main__":
    main()
