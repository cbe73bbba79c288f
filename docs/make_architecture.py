"""The import graph of src/lipdp, lazy imports counted, as the figure of docs/architecture.md.

python docs/make_architecture.py            write docs/architecture.svg
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lipdp"
FIGURE = Path(__file__).resolve().parent / "architecture.svg"
# Small modules that everybody may use; they are one box.
FOUNDATIONS = {"errors", "behaviour", "digest", "fields", "fingerprint", "twins"}
_BOX, _GAP, _HEIGHT, _STEP = 92, 14, 30, 74


def imports() -> dict[str, set[str]]:
    """By package (or module of the root), the others that its files import anywhere, inside functions too."""
    files = {_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in files.items():
        if "." not in name:
            continue  # lipdp/__init__.py, the public names
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                while target and target not in files:
                    target = target.rpartition(".")[0]
                if target.count(".") and _package(target) != _package(name):
                    found[_package(name)].add(_package(target))
        found[_package(name)] |= set()
    return dict(found)


def _name(path: Path) -> str:
    return ".".join(part for part in ("lipdp", *path.relative_to(SOURCE).with_suffix("").parts) if part != "__init__")


def _package(module: str) -> str:
    return module.split(".")[1]


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """The packages from top to bottom, such that every arrow points downwards; an error names a cycle, if there is one."""
    depth: dict[str, int] = {}

    def visit(package: str, path: tuple[str, ...]) -> int:
        if package in path:
            raise ValueError("packages import each other: " + " → ".join([*path[path.index(package) :], package]))
        if package not in depth:
            depth[package] = 1 + max((visit(other, (*path, package)) for other in graph[package]), default=-1)
        return depth[package]

    for package in graph:
        visit(package, ())
    rows: dict[int, list[str]] = defaultdict(list)
    for package, number in depth.items():
        rows[number].append(package)
    return [sorted(rows[number]) for number in sorted(rows, reverse=True)]


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without foundations, and without arrows that a longer way makes superfluous."""
    small = {name for name in graph if name.startswith("_") or name in FOUNDATIONS}
    kept = {name: others - small for name, others in graph.items() if name not in small}

    def reach(name: str) -> set[str]:
        return {name} | {far for other in kept[name] for far in reach(other)}

    return {name: {o for o in others if not any(o in reach(p) for p in others - {o})} for name, others in kept.items()}


def figure(graph: dict[str, set[str]]) -> str:
    """Boxes in rows, arrows downwards."""
    drawn = rooms(graph)
    rows = levels(drawn)
    width = max(len(row) for row in rows) * (_BOX + _GAP) + _GAP
    height = (len(rows) + 1) * _STEP
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (_BOX + _GAP) + _GAP) / 2
        places |= {name: (left + k * (_BOX + _GAP), 16 + number * _STEP) for k, name in enumerate(row)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
    ]
    for name in sorted(drawn):
        x, y = places[name]
        for other in sorted(drawn[name]):
            to_x, to_y = places[other]
            ends = f'x1="{x + _BOX / 2:g}" y1="{y + _HEIGHT:g}" x2="{to_x + _BOX / 2:g}" y2="{to_y:g}"'
            lines.append(f'<line {ends} stroke="#99a" marker-end="url(#a)"/>')
    for name, (x, y) in places.items():
        lines.append(f'<rect x="{x:g}" y="{y:g}" width="{_BOX}" height="{_HEIGHT}" rx="5" fill="#eef3fb" stroke="#446"/>')
        lines.append(f'<text x="{x + _BOX / 2:g}" y="{y + 20:g}" text-anchor="middle">{name}</text>')
    below = 16 + len(rows) * _STEP
    lines.append(
        f'<rect x="{_GAP}" y="{below}" width="{width - 2 * _GAP}" height="{_HEIGHT}" rx="5" fill="#f4f4ee" stroke="#664"/>'
    )
    text = "foundations: errors, checks, numerics, deferred checks, digests, fields, behaviour, twins"
    lines.append(f'<text x="{width / 2:g}" y="{below + 20}" text-anchor="middle">{text}</text></svg>')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(figure(imports()))
