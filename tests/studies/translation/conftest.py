"""The script of the translation study, and a folder with toy data for it."""

import pytest

from tests.lab.systems.translation import digits
from tests.scripts import study


@pytest.fixture(scope="module")
def script():
    with study("studies.translation.run") as module:
        yield module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = digits.make_data(tmp_path_factory.mktemp("study"), size=120, iwslt14="valid")
    for task in ("multi30k", "europarl"):
        (made / "data").mkdir(exist_ok=True)
        (made / "data" / task).symlink_to(made / "prepared")
    return made
