"""Run a command with stderr at a terminal."""

import os
import pty
import re
import subprocess
import tempfile


def run_at_a_terminal(command: list[str], environment: dict[str, str], columns: int) -> tuple[str, str]:
    """Return stdout, and stderr without control sequences; the command must succeed."""
    main, side = pty.openpty()
    environment = environment | {"TERM": "xterm", "COLUMNS": str(columns)}
    shown = b""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:  # a pipe that nobody reads would block
        process = subprocess.Popen(command, stderr=side, stdout=file, env=environment)
        os.close(side)
        while True:
            try:
                shown += os.read(main, 65536)
            except OSError:  # the process has closed the other side
                break
        os.close(main)
        assert process.wait() == 0, shown.decode()
        file.seek(0)
        return file.read(), re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
