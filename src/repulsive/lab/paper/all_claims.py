"""Judge all claims of the paper by the committed results of a checkout."""

from __future__ import annotations

from repulsive.errors import DataError
from repulsive.lab.paper import classifier_claims, method_claims, system_claims
from repulsive.lab.paper.result_claims import ResultClaim
from repulsive.lab.paper.result_files import MissingFile, ResultFiles

ROWS = (*classifier_claims.ROWS, *method_claims.ROWS, *system_claims.ROWS)


def judge_claims(files: ResultFiles) -> tuple[list[ResultClaim], list[str]]:
    """Judge all claims, in the order of the paper; leave out those whose files do not exist.

    Returns:
        The claims, and the names of the missing files.

    Raises:
        DataError: a file is damaged or lacks a row, or there is no file at all.
    """
    claims, missing = [], []
    for judge in ROWS:
        try:
            claims.append(judge(files))
        except MissingFile as error:
            missing.append(error.name)
    if not claims:
        raise DataError(f"{files.folder}: no results on any claim; --from expects the folder results of a checkout")
    return claims, sorted(set(missing))
