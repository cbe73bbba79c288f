"""The command line: each command parses its options, calls the library and prints what came back.

Modules here import torch and the rest of the library inside the commands only, so that ``lipdp --help`` is quick.
"""

from lipdp.cli.app import app, main

__all__ = ["app", "main"]
