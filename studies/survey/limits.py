"""Run the survey of one model in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

from studies.survey.examine import error_text, outcome


def limited(name: str, seconds: int, gigabytes: int, work: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return `work(name)`, computed in a forked process with limits on time and memory.

    The result of an error, or of a process that exceeds a limit, has the status "does not build" or "stopped".
    """
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        signal.alarm(seconds)
        try:
            result = work(name)
        except BaseException as error:  # any error is the result of this model
            result = outcome(name, "stopped" if isinstance(error, MemoryError) else "does not build", error_text(error))
        os.write(write_end, json.dumps(result).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else outcome(name, "stopped", f"no answer within {seconds} s, {gigabytes} GB")
