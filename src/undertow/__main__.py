"""`python -m undertow`: the `undertow` command where it is not installed as one."""

from .cli import main

if __name__ == "__main__":
    main()
