"""What protects the user from files, names and processes that are not trustworthy. One place for each."""

from repulsive.safety.interrupts import answer_interrupts, is_command

if is_command():  # torch takes seconds to import: the first thing to do
    answer_interrupts()
