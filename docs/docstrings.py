"""For mkdocstrings: docstrings as it reads them. Roles of Sphinx become code, an Example a section of examples."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class Docstrings(Extension):
    """Changes each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Of a module, a class, a function or an attribute."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
