"""Protection against untrusted files, names and text, and clean shutdown of processes."""

from repulsive.safety.interrupts import install_interrupt_handler, is_command

if is_command():  # before torch is imported, which takes seconds
    install_interrupt_handler()
