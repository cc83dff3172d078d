"""Run a command with stderr at a terminal."""

import os
import pty
import re
import subprocess


def run_at_a_terminal(command: list[str], environment: dict[str, str], columns: int) -> tuple[str, str]:
    """Return stdout, and stderr without control sequences; the command must succeed and print little to stdout."""
    main, side = pty.openpty()
    environment = environment | {"TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen(command, stderr=side, stdout=subprocess.PIPE, text=True, env=environment)
    os.close(side)
    shown = b""
    while True:
        try:
            shown += os.read(main, 65536)
        except OSError:  # the process has closed the other side
            break
    os.close(main)
    out, _ = process.communicate()
    assert process.returncode == 0, shown.decode()
    return out, re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
