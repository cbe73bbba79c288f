"""``python -m lipdp``: the same as the command ``lipdp``."""

from lipdp.cli import main

if __name__ == "__main__":
    main()
