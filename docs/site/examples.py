"""Docstrings here say `Example:`; the reader of docstrings knows code under `Examples:` alone."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class CodeUnderExample(Extension):
    """Makes the one heading the other."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of one object as it was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
