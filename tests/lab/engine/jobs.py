"""Jobs for worker processes, which import them by name."""

import time


def sleep(job, file) -> None:
    """Sleep for a minute."""
    time.sleep(60)
