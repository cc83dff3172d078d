"""Everything that reads files, with a small valid sample for each."""

from tests.fuzz.input_readers import INPUTS
from tests.fuzz.prepared_readers import PREPARED
from tests.fuzz.raw_readers import RAW
from tests.fuzz.run_readers import RUNS

SUBJECTS = [*RAW, *PREPARED, *RUNS, *INPUTS]
