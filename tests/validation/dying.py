"""A process that ends at once, and imports next to nothing before."""

import os


def dies(*args: object) -> None:
    os._exit(3)
